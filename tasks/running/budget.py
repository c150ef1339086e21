"""A run's spending, from the ledger, held against its caps while it trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from heterps_core.cluster import Cluster
from heterps_core.errors import BudgetExceededError
from heterps_core.training.outcome import Complete, Failed, MachinesLost, TrainingOutcome
from infra.billing.budget import BudgetWatch, Spending, spent_usd, start_of_month, watched
from infra.billing.spending import SpendingMeter
from infra.ledger.ledger import Ledger
from infra.providers import get_provider
from infra.workspace import Workspace, run_of_launch
from tasks.clusters import end_machines_of
from tasks.running.fleet import FleetRun

logger = logging.getLogger(__name__)


def spending_of(workspace: Workspace, provider: str, run_id: str, *, now: datetime) -> Spending:
    """Return the cost of a run, and of all runs with machines of the same provider in this month."""
    entries = [entry for entry in Ledger(workspace.ledger_path).entries() if entry.provider == provider]
    of_run = [entry for entry in entries if run_of_launch(entry.run_id) == run_id]
    return Spending(
        run_usd=spent_usd(of_run, get_provider(provider), now=now),
        month_usd=spent_usd(entries, get_provider(provider), now=now, since=start_of_month(now)),
    )


def spent_this_month_usd(workspace: Workspace, provider: str) -> float:
    """Return the cost of a provider's machines in this calendar month, at list prices for dry runs."""
    return spending_of(workspace, provider, run_id="", now=datetime.now(UTC)).month_usd


@contextmanager
def within_budget(run: FleetRun, cluster: Cluster, *, bucket_usd: float) -> Iterator[BudgetWatch]:
    """Hold the spending of a run against its caps while the block trains; see `infra.billing.spending`.

    Raises:
        BudgetExceededError: The cap was reached and the machines were ended before a checkpoint was written.
    """
    workspace, run_id, provider = run.workspace, run.run_id, run.provider

    def end_machines() -> None:
        # First by the tags of its machines: the ledger may be what is wrong.
        provider.terminate(cluster.run_id)
        end_machines_of(workspace, run_id)

    watch = BudgetWatch(
        caps=run.caps,
        spending=SpendingMeter(
            provider,
            entries=lambda: Ledger(workspace.ledger_path).entries(),
            belongs=lambda launch_id: run_of_launch(launch_id) == run_id,
            bucket_usd=bucket_usd,
        ),
        price_usd_per_hour=cluster.price_usd_per_hour
        + sum(node.disk_usd_per_hour + provider.services_usd_per_machine_hour() for node in cluster.nodes),
        on_warning=lambda text: logger.warning("%s", text),
        on_stop=run.directory.request_stop,
        on_end=end_machines,
    )
    try:
        with watched(watch):
            yield watch
    except Exception as error:
        if not watch.has_ended_machines:
            raise
        raise BudgetExceededError(
            f"a run must stay within its caps, and {watch.stopped_by}: its machines were ended before they had "
            f"written a checkpoint; raise the cap and set resume_run_id={run_id} to go on from the one before"
        ) from error


def check_not_stopped(watch: BudgetWatch, outcome: TrainingOutcome, *, run_id: str) -> None:
    """Check that no cap stopped a training that came to no end of its own.

    Raises:
        BudgetExceededError: One did.
    """
    if watch.stopped_by is None or isinstance(outcome, Complete | Failed):
        return
    way_out = f"raise the cap and set resume_run_id={run_id} to go on"
    if isinstance(outcome, MachinesLost):
        raise BudgetExceededError(
            f"a run must stay within its caps, and {watch.stopped_by}: it ended before another checkpoint was "
            f"written; {way_out} from the one before: {outcome.message}"
        )
    steps = outcome.training.steps
    raise BudgetExceededError(
        f"a run must stay within its caps, and {watch.stopped_by}: it wrote a checkpoint at step "
        f"{steps[-1].step if steps else 0:,} and stopped; {way_out} from there"
    )
