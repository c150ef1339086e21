"""Launches on clusters that people have, from an inventory with a kind for each selector."""

from datetime import UTC, datetime, timedelta

from infra.inventory import MachineKind, inventory_path, inventory_text
from tests.infra.builders import plan


def launch(provider, ledger, run_bootstrap, *, run_id="r1", lease_s=60.0, planned=None):
    """Launch a plan, by default of two machines, with a lease."""
    return provider.launch(
        planned or plan(),
        run_id=run_id,
        lease_until=datetime.now(UTC) + timedelta(seconds=lease_s),
        bootstrap=run_bootstrap,
        ledger=ledger,
    )


def listed(workspace, home, *selectors, cores=2):
    """Write an inventory of one kind for each selector; return a plan of one machine of each kind."""
    kinds = [
        MachineKind(
            kind=f"kind{number}",
            home=home,
            count=4,
            cores=cores,
            memory_gb=4.0,
            price_usd_per_hour=0.5,
            selector=selector,
        )
        for number, selector in enumerate(selectors)
    ]
    inventory_path(workspace).write_text(inventory_text(kinds))
    return plan(*[next(kind.offers()) for kind in kinds])
