"""The write-ahead launch ledger: what was asked for, had and ended, at which price.

Each launch is written down before the call that makes it, so that a process killed in between leaves an
entry to look for, not an instance that nobody knows of. The price is copied in and never looked up again.

    intended --> launched --> ended
        `------> failed              nothing was had; the reason says why
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import NodeRequest

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 30.0
"""How long a writer waits for another; a write takes milliseconds."""


class EntryState(StrEnum):
    """Where a machine stands; the module's picture shows the ways between them."""

    INTENDED = "intended"
    LAUNCHED = "launched"
    ENDED = "ended"
    FAILED = "failed"


class EndReason(StrEnum):
    """Why a machine was ended."""

    RUN_ENDED = "run ended"
    LAUNCH_FAILED = "the rest of the launch failed"
    LEASE_EXPIRED = "lease expired"
    LEASE_UNREADABLE = "lease unreadable"
    OWNER_DEAD = "owner process dead"
    GONE = "gone without our doing"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One machine of one run."""

    run_id: str
    node_id: str
    provider: str
    stage: int
    device_type: str
    instance_type: str
    market: Market
    region: str
    price_usd_per_hour: float
    """Frozen when the launch was intended."""

    price_as_of: str
    price_source: str
    state: EntryState
    intended_at: datetime
    launched_at: datetime | None
    ended_at: datetime | None
    provider_instance_id: str | None
    reason: str | None
    """An `EndReason`, or what the provider answered to a failed launch."""


_COLUMNS = tuple(LedgerEntry.__dataclass_fields__)
_TIMES = ("intended_at", "launched_at", "ended_at")

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS machines ({", ".join(_COLUMNS)}, PRIMARY KEY (run_id, node_id));
"""


class Ledger:
    """Entries in a SQLite file that several processes may use at once.

    Every method may be called again with the same arguments: what is written already stays as it is.
    Times carry a time zone.

    Args:
        path: The file; it and its folder are made where they are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._transaction() as database:
            database.executescript(_SCHEMA)

    def intend(self, run_id: str, provider: str, request: NodeRequest, *, at: datetime) -> None:
        """Write down that a machine is about to be launched.

        Raises:
            ConfigurationError: The run has had such a node, and it is over or another instance type.
        """
        offer = request.offer
        values = (
            run_id,
            request.node_id,
            provider,
            request.stage,
            request.device_type,
            offer.instance_type.name,
            offer.market,
            offer.region,
            offer.price_usd_per_hour,
            offer.price_as_of,
            offer.price_source,
            EntryState.INTENDED,
            at.isoformat(),
            None,
            None,
            None,
            None,
        )
        places = ", ".join("?" * len(_COLUMNS))
        with self._transaction() as database:
            database.execute(f"INSERT OR IGNORE INTO machines VALUES ({places})", values)
            had, state = database.execute(
                "SELECT instance_type, state FROM machines WHERE run_id = ? AND node_id = ?",
                (run_id, request.node_id),
            ).fetchone()
        if had != offer.instance_type.name:
            raise ConfigurationError(
                f"a run id stands for one plan, but {request.node_id} of run {run_id} was launched as {had} and "
                f"is now asked for as {offer.instance_type.name}; use a new run id"
            )
        if state not in (EntryState.INTENDED, EntryState.LAUNCHED):
            raise ConfigurationError(
                f"a run id stands for one launch, but {request.node_id} of run {run_id} is {state} already and "
                f"could not be billed a second time; use a new run id"
            )

    def launched(self, run_id: str, node_id: str, *, provider_instance_id: str, at: datetime) -> None:
        """Write down that the machine exists since `at`."""
        self._move(
            run_id,
            node_id,
            came_from=(EntryState.INTENDED,),
            state=EntryState.LAUNCHED,
            provider_instance_id=provider_instance_id,
            launched_at=at.isoformat(),
        )

    def failed(self, run_id: str, node_id: str, *, reason: str, at: datetime) -> None:
        """Write down that the launch brought no machine."""
        self._move(
            run_id,
            node_id,
            came_from=(EntryState.INTENDED,),
            state=EntryState.FAILED,
            ended_at=at.isoformat(),
            reason=reason,
        )

    def ended(self, run_id: str, node_id: str, *, reason: EndReason, at: datetime) -> None:
        """Write down that the machine is no more."""
        self._move(
            run_id,
            node_id,
            came_from=(EntryState.LAUNCHED,),
            state=EntryState.ENDED,
            ended_at=at.isoformat(),
            reason=reason,
        )

    def close_run(self, run_id: str, *, reason: EndReason, at: datetime) -> None:
        """Write down that all machines of a run are ended; intents without a machine are failures."""
        for entry in self.entries(run_id=run_id):
            self.ended(run_id, entry.node_id, reason=reason, at=at)
            self.failed(run_id, entry.node_id, reason=f"no machine was found: {reason}", at=at)

    def entries(self, *, run_id: str | None = None) -> tuple[LedgerEntry, ...]:
        """Return the entries of one run, or of all, by time and name."""
        condition, values = ("", ()) if run_id is None else ("WHERE run_id = ?", (run_id,))
        order = "ORDER BY intended_at, run_id, stage, node_id"
        with self._transaction() as database:
            rows = database.execute(f"SELECT * FROM machines {condition} {order}", values).fetchall()
        return tuple(_entry_of(row) for row in rows)

    def _move(self, run_id: str, node_id: str, *, came_from: tuple[EntryState, ...], **values: str) -> None:
        assignments = ", ".join(f"{column} = ?" for column in values)
        states = ", ".join("?" * len(came_from))
        with self._transaction() as database:
            database.execute(
                f"UPDATE machines SET {assignments} WHERE run_id = ? AND node_id = ? AND state IN ({states})",
                (*values.values(), run_id, node_id, *came_from),
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S)
        try:
            with database:
                yield database
        finally:
            database.close()


def _entry_of(row: tuple[object, ...]) -> LedgerEntry:
    values: dict[str, object] = dict(zip(_COLUMNS, row, strict=True))
    for name in _TIMES:
        text = values[name]
        values[name] = datetime.fromisoformat(text) if isinstance(text, str) else None
    values["market"] = Market(str(values["market"]))
    values["state"] = EntryState(str(values["state"]))
    return LedgerEntry(**values)  # type: ignore[arg-type]
