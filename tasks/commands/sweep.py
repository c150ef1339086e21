"""`heterps sweep`: the sweeper without Prefect, for plain cron."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

from heterps_core.errors import ProvisioningError
from infra.ledger import Ledger
from infra.providers import PROVIDERS
from infra.sweeper import providers_in_use, sweep_workspace
from infra.workspace import Workspace

HELP = """\
End machines whose lease is over or whose owner is dead, and bring the ledger up to date.

The served deployment sweep-orphans does the same every five minutes. This needs no Prefect, so that machines end also
where that is down. It trusts what the provider lists and the machines' own tags: with --provider aws it works where
the ledger was lost.

examples:
  heterps sweep
  heterps sweep --provider aws --provider local --json
  */5 * * * * cd /srv/heterps && HETERPS_HOME=/var/lib/heterps .venv/bin/heterps sweep --provider aws --provider local

exit status: 0, also when there was nothing to do; 5 where a provider could not be asked or a machine not be ended.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--provider",
        action="append",
        choices=sorted(PROVIDERS),
        help="may be given again (default: local, and those that the ledger has open entries of)",
    )
    parser.add_argument(
        "--region",
        default=os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
        help="of AWS (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Sweep providers.

    Raises:
        ProvisioningError: A provider could not be asked, or a machine could not be ended; the others are swept.
    """
    workspace = Workspace.locate().create()
    names = options.provider or providers_in_use(Ledger(workspace.ledger_path))
    done = sweep_workspace(workspace, names, region=options.region)
    if options.json:
        print(json.dumps([asdict(machine) for machine in done.machines], indent=2))
    else:
        print("\n".join([*map(str, done.machines), f"swept {', '.join(names)}"]), flush=True)
    left = [str(machine) for machine in done.machines if machine.problem is not None]
    if left or done.problems:
        raise ProvisioningError("; ".join([*left, *done.problems]))
