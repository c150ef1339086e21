"""The command in a process of its own, for what a process that runs other tests too cannot tell."""

import subprocess
import sys

PROGRAM = """
import sys
from flows.cli import main
status = main(sys.argv[1:])
print(status, sorted({'torch', 'optuna'} & set(sys.modules)))
"""

HELPS = """
import sys
from flows.cli import COMMANDS, FLOWS, main
for name in (*COMMANDS, *FLOWS):
    try:
        main([name, '--help'])
    except SystemExit as ended:
        print(ended.code, sorted({'boto3', 'mlflow', 'optuna', 'prefect', 'scipy', 'torch'} & set(sys.modules)))
"""


def check_starts_light(*arguments: str) -> None:
    """Check that a command ends well without torch and Optuna, which take a second; scipy takes a fifth of one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def ends_of_helps() -> list[str]:
    """Return status and slow libraries that the help of each command loads, asked for in one process."""
    done = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(("0 [", "1 [", "2 ["))]
