"""The command in a process of its own, for what a process that runs other tests too cannot tell."""

import subprocess
import sys

PROGRAM = """
import sys
from flows.cli import main
status = main(sys.argv[1:])
print(status, sorted({'torch', 'optuna', 'scipy'} & set(sys.modules)))
"""


def check_starts_light(*arguments: str) -> None:
    """Check that a command ends well and has loaded none of the libraries that take a second."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
