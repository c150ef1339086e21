"""One fleet at a time in a workspace, whatever starts it: a schedule, a shell, a back-fill or a measurement.

Two would cost twice, on one machine both would be measured wrong, and a day could be trained twice. A lock of this
machine keeps out who starts while a run is at work, from its plan to its record; the ledger and the leases keep out
what another process, now dead, left alive.

Prefect's own concurrency limits would not do: a run under one is ended when the server is away for seconds at the
moment at which it renews its lease of the place, or was started again since, as leases live in the server's memory.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO

from heterps_core.errors import LiveFleetError
from infra.bootstrap.node_start import DEFAULT_LIFETIME_S
from infra.ledger.ledger import LedgerEntry
from infra.ledger.ledger_entry import Instance
from infra.machines.sweeper import reason_to_end, sweep_workspace
from infra.providers import provider_of
from infra.workspace import Workspace, run_of_launch
from tasks.clusters import ledger_entries
from tasks.running.progress import log_step

POLL_INTERVAL_S = 5.0
"""Between two looks at whether the run that is waited for has ended; each may ask a cloud for its machines."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetHolder:
    """Who may have machines; both empty where no run ever had."""

    run_id: str
    flow_run_id: str


@contextmanager
def only_fleet(
    workspace: Workspace, run_id: str, *, flow_run_id: str = "", max_wait_s: float = 0.0
) -> Iterator[None]:
    """Keep every other run of the workspace out while the block runs, after the one that is at work has ended.

    Args:
        workspace: Whose machines are meant.
        run_id: Of the run that enters.
        flow_run_id: Of the flow run that answers for it; several may in turn, where it is resumed.
        max_wait_s: Longest wait for another run.

    Raises:
        LiveFleetError: Another run is at work or has machines, or another flow run is at work on this run; names
            them and the fix.
    """
    deadline_s = time.monotonic() + max_wait_s
    shown_holder: str | None = None
    with workspace.fleet_lock_path.open("a+") as lock:
        while True:
            try:
                _enter(workspace, run_id, lock)
                break
            except LiveFleetError as error:
                holder = last_fleet(workspace).run_id
                if holder == run_id or time.monotonic() >= deadline_s:
                    raise
                if holder != shown_holder:
                    log_step("waiting", f"for at most {max_wait_s / 60:.0f} min, as {error}")
                    shown_holder = holder
            time.sleep(POLL_INTERVAL_S)
        lock.truncate(0)
        lock.write(f"{run_id} {flow_run_id}")
        lock.flush()
        # Closing the file lets go of the lock, and so does the end of the process, however it ends.
        yield


def _enter(workspace: Workspace, run_id: str, lock: IO[str]) -> None:
    """Take the lock where no other run is at work or has machines.

    Raises:
        LiveFleetError: One is, or has.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as problem:
        check_no_other_fleet(workspace, run_id="")
        holder = last_fleet(workspace).run_id or "another run"
        raise LiveFleetError(
            f"one fleet at a time may be alive in a workspace, but {holder} is planning, launching or recording "
            f"right now and has no machines that heterps stop could end; wait for it, or cancel its flow run"
        ) from problem
    try:
        check_no_other_fleet(workspace, run_id)
    except BaseException:
        fcntl.flock(lock, fcntl.LOCK_UN)
        raise


def last_fleet(workspace: Workspace) -> FleetHolder:
    """Return who took the lock last, whether it still holds it or not; to try the lock could keep a run out."""
    path = workspace.fleet_lock_path
    run_id, _, flow_run_id = (path.read_text() if path.exists() else "").strip().partition(" ")
    return FleetHolder(run_id=run_id, flow_run_id=flow_run_id)


def check_no_other_fleet(workspace: Workspace, run_id: str) -> None:
    """Check that no other run has machines alive; orphaned ones are terminated first.

    Raises:
        LiveFleetError: One has; names it, the number of its machines, and the fix.
        ProvisioningError: A provider that may have some does not answer.
    """
    if not _young_open_entries(workspace):
        return
    for problem in sweep_workspace(workspace).problems:
        logger.warning("%s", problem)
    others = [entry for entry in _young_open_entries(workspace) if run_of_launch(entry.run_id) != run_id]
    for name, region in sorted({(entry.provider, entry.region) for entry in others}):
        provider = provider_of(workspace, name, region=region)
        live = [
            machine
            for machine in provider.list_instances()
            if run_of_launch(machine.run_id) != run_id
            and reason_to_end(machine, now=datetime.now(UTC), tags_grace_s=provider.tags_grace_s) is None
        ]
        if live:
            raise LiveFleetError(_refusal(live))


def _young_open_entries(workspace: Workspace) -> list[LedgerEntry]:
    """Return machines that the ledger does not know to be over; older ones have ended themselves."""
    now = datetime.now(UTC)
    return [
        entry
        for entry in ledger_entries(workspace)
        if entry.is_open and (now - entry.intended_at).total_seconds() < DEFAULT_LIFETIME_S
    ]


def _refusal(live: list[Instance]) -> str:
    run_id = run_of_launch(live[0].run_id)
    count = sum(run_of_launch(machine.run_id) == run_id for machine in live)
    machines = "1 machine" if count == 1 else f"{count} machines"
    return (
        f"one fleet at a time may be alive in a workspace, but run {run_id} has {machines}; wait until it has "
        f"ended, or end it: heterps stop {run_id}"
    )
