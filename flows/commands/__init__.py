"""What an operator asks at a shell: one module a command of `heterps`, with its HELP, `add_arguments` and `run`."""

RUN_HELP = "a run's id, the beginning of one, or latest"
"""For the help of every command that takes a run; `tasks/running/run_names.py` finds it."""
