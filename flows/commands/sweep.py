"""End machines whose lease is over or whose owner is dead, and bring the ledger up to date.

The served deployment sweep-orphans does the same every five minutes. This needs no Prefect, so that machines end also
where that is down. It trusts what the provider lists and the machines' own tags: with --provider aws it works where
the ledger was lost.

examples:
  heterps sweep
  heterps sweep --provider aws --provider local --json
  */5 * * * * cd /srv/heterps && HETERPS_HOME=/var/lib/heterps .venv/bin/heterps sweep --provider aws --provider local

Looks in every region that runs rent in or that the ledger names, whatever AWS_DEFAULT_REGION says; --region adds one.
What must end is ended first and written down afterwards; a damaged ledger is set aside and rebuilt from the tags.

exit status: 0, also when there was nothing to do; 5 where a provider could not be asked, a machine not be ended, or
its end not be written down.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from infra.machines.sweeper import sweep_workspace
from infra.providers import PROVIDERS
from infra.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--provider",
        action="append",
        choices=sorted(PROVIDERS),
        help="may be given again (default: local, those with open entries in the ledger, and those set up here)",
    )
    parser.add_argument(
        "--region", help="of a cloud, besides those that runs rent in and that the ledger names"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Sweep providers."""
    done = sweep_workspace(Workspace.locate(), options.provider, region=options.region)
    if options.json:
        print(json.dumps([asdict(machine) for machine in done.machines], indent=2))
    else:
        places = f"swept {', '.join(done.places) or 'nothing'}"
        print("\n".join([*map(str, done.machines), *done.notes, places]), flush=True)
    done.check_clean()
