"""What an operator asks at a shell: one module a command of `heterps`, with its HELP, `add_arguments` and `run`."""
