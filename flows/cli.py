"""The `heterps` command: the core's abilities, and those that an operator needs beside the flows.

`python -m heterps_core.cli` has the core's alone, for a node on which nothing else is installed. Modules of commands
are light to import: what takes seconds to load (Prefect, MLflow) they import when they run.
"""

from __future__ import annotations

import sys

from heterps_core import cli
from tasks.commands import cost, interruptions, offers, stop, sweep

_COMMANDS: tuple[cli.Command, ...] = (
    ("cost", "what runs cost: bills, months, and what the cloud charged", cost),
    ("interruptions", "how often spot pools take instances back, from traces", interruptions),
    ("offers", "what is sold for each device type, where and for how much", offers),
    ("stop", "let a run write a checkpoint, then end its machines", stop),
    ("sweep", "end machines that nobody answers for; for cron", sweep),
)


def main() -> int:
    """Run the command line and return the exit status."""
    return cli.main(commands=(*cli.CORE_COMMANDS, *_COMMANDS))


if __name__ == "__main__":
    sys.exit(main())
