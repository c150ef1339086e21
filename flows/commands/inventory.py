"""Write the machines that you have into machines.toml of the workspace, from what a home shows: here, ray or slurm.

Kinds of other homes and reserved instances that the file has stay in it; those of this home are replaced, at the
price that is given. A person then edits prices, and what the home does not show. docs/HOMES.md has each field.

examples:
  heterps inventory
  heterps inventory --provider slurm --usd-per-hour 1.2
  heterps inventory --print

exit status: 0; 2 where the file or an argument cannot be used; 5 where the home does not answer or has no machine.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from heterps_core.errors import ProvisioningError
from infra.inventory import HERE, MachineKind, inventory_path, inventory_text, read_inventory, read_reserved
from infra.providers import PROVIDERS, get_provider
from infra.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    homes = sorted(name for name, each in PROVIDERS.items() if each.has_inventory)
    parser.add_argument("--provider", choices=homes, default=HERE, help="the home (default: %(default)s)")
    parser.add_argument(
        "--usd-per-hour", type=float, default=0.0, metavar="USD", help="price of each machine (default: 0)"
    )
    parser.add_argument("--print", action="store_true", help="print the file, and write nothing")


def run(options: argparse.Namespace) -> None:
    """Look for machines, and write them beside those of other homes."""
    workspace = Workspace.locate()
    kept = [kind for kind in read_inventory(workspace) if kind.home != options.provider]
    found = get_provider(options.provider).found_machines(workspace)
    if not found:
        raise ProvisioningError(
            f"no machines were found in the home {options.provider}; heterps doctor --provider {options.provider} "
            f"says what is missing"
        )
    priced = [replace(kind, price_usd_per_hour=options.usd_per_hour) for kind in found]
    text = inventory_text([*kept, *priced], read_reserved(workspace))
    if options.print:
        print(text)
        return
    path = inventory_path(workspace.create())
    path.write_text(text, encoding="utf-8")
    print("\n".join(f"{kind.count} x {kind.kind}: {_shown(kind)}" for kind in priced))
    print(f"written to {path}")


def _shown(kind: MachineKind) -> str:
    cards = f", {kind.cards} x {kind.card}" if kind.cards else ""
    return (
        f"{kind.cores} cores, {kind.memory_gb:,.0f} GB{cards}, at {kind.price_usd_per_hour:g} USD/hour; plans name "
        f"{' and '.join(each.name for each in kind.device_types())}"
    )
