"""The `heterps` command: the core's abilities, and those that an operator needs beside the flows.

`python -m heterps_core.cli` has the core's alone, for a node on which nothing else is installed. Modules of commands
are light to import: what takes seconds to load (Prefect, MLflow) they import when they run.
"""

from __future__ import annotations

import sys

from flows.commands import doctor, status
from heterps_core import cli
from tasks.commands import champion, cost, explain, interruptions, offers, rollback, runs, stop, sweep, tidy

_COMMANDS: tuple[cli.Command, ...] = (
    ("champion", "which model serves, since when, how good and how dear it is", champion),
    ("cost", "what runs cost: bills, months, and what the cloud charged", cost),
    ("doctor", "what is missing on this machine, and how to mend it", doctor),
    ("explain", "why a run had its plan", explain),
    ("interruptions", "how often spot pools take instances back, from traces", interruptions),
    ("offers", "what is sold for each device type, where and for how much", offers),
    ("rollback", "make an earlier champion champion again", rollback),
    ("runs", "the last runs side by side: plan, end, cost, throughput, AUC", runs),
    ("status", "what runs now, what it has cost, and what comes next", status),
    ("stop", "let a run write a checkpoint, then end its machines", stop),
    ("sweep", "end machines that nobody answers for; for cron", sweep),
    ("tidy", "delete files of old runs and models that nobody needs; for cron", tidy),
)


def main() -> int:
    """Run the command line and return the exit status."""
    return cli.main(commands=(*cli.CORE_COMMANDS, *_COMMANDS))


if __name__ == "__main__":
    sys.exit(main())
