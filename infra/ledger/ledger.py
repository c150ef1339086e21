"""The write-ahead launch ledger: intended, launched and ended machines, with their prices.

Each launch is written down before the call that makes it, so that a process killed in between leaves an
entry to look for, not an unknown instance. The price is copied in and never looked up again.

                      the call answered,
                      or the machine was found                 ended by us, or found gone
    (none) --intend--> INTENDED ------------------> LAUNCHED ------------------> ENDED
       |                   `--> FAILED                 ^ ^                         |
       |                        nothing was had        | '---- recover: seen ------'
       `-----------------------------------------------'       alive after all
         recover: a machine without an entry, written down from its tags alone

An entry that was closed though its machine lives is LAUNCHED again, since the time when it was launched: the bill
counts on without a gap.

A launch whose later parts fail is ended and may be tried again elsewhere under the same run id: that is the next
attempt, with entries of its own, so that each machine has one entry and all of them are in the bill.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from heterps_core.errors import ConfigurationError, LedgerError
from heterps_core.hardware import InstanceOffer
from heterps_core.plans.provisioning_plan import NodeRequest
from infra.ledger.ledger_entry import EndReason, EntryState, Instance, LedgerEntry, entry_of_row
from infra.ledger.ledger_file import COLUMNS, SELECT, check_version, make_ledger_file, transaction

__all__ = ["EndReason", "EntryState", "Ledger", "LedgerEntry"]

logger = logging.getLogger(__name__)

NO_MACHINE = "no machine was found"
"""Why a launch whose end was not seen counts as failed."""


class Ledger:
    """Entries in a SQLite file that several processes may use at once.

    Every method may be called again with the same arguments: what is written already stays as it is.
    Times carry a time zone.

    The file and its folder are made where they are missing. On a read-only file system entries are read as they are.

    Raises:
        LedgerError: From every method: the file is damaged, its disk is full, or another process holds it too long.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_intent: Callable[[], None] = lambda: None
        make_ledger_file(path)
        with self._transaction() as database:
            check_version(database, path)

    def checked(self, check: Callable[[], None]) -> Ledger:
        """Return the same ledger, which calls `check` before each intent; its error prevents the launch."""
        checked = copy(self)
        checked._check_intent = check
        return checked

    def last_attempt(self, run_id: str) -> int:
        """Return the number of the run's newest attempt, 1 where it has none."""
        return max((entry.attempt for entry in self.entries(run_id=run_id)), default=1)

    def intend(
        self, run_id: str, provider: str, request: NodeRequest, *, at: datetime, attempt: int = 1
    ) -> None:
        """Write down that a machine is about to be launched, at the price of its first offer.

        Raises:
            ConfigurationError: The attempt has had such a node, and it is over or of another plan.
            BudgetExceededError: By the check of `checked`.
        """
        self._check_intent()
        offer = request.offer
        possible = {each.instance_type.name for each in (offer, *request.alternatives)}
        entry = LedgerEntry(
            run_id=run_id,
            attempt=attempt,
            node_id=request.node_id,
            provider=provider,
            stage=request.stage,
            device_type=request.device_type,
            instance_type=offer.instance_type.name,
            market=offer.market,
            region=offer.region,
            **offer.price,
            state=EntryState.INTENDED,
            intended_at=at,
            disk_usd_per_hour=request.disk_usd_per_hour,
        )
        with self._transaction() as database:
            _insert(database, entry)
            had, state = database.execute(
                "SELECT instance_type, state FROM machines WHERE run_id = ? AND attempt = ? AND node_id = ?",
                (run_id, attempt, request.node_id),
            ).fetchone()
        if had not in possible:
            raise ConfigurationError(
                f"a run id stands for one plan, but {request.node_id} of run {run_id} was launched as {had} and "
                f"is now asked for as {offer.instance_type.name}; use a new run id"
            )
        if state not in (EntryState.INTENDED, EntryState.LAUNCHED):
            raise ConfigurationError(
                f"a run id stands for one launch, but {request.node_id} of run {run_id} is {state} already and "
                f"could not be billed a second time; use a new run id"
            )

    def launched(
        self,
        run_id: str,
        node_id: str,
        *,
        provider_instance_id: str,
        at: datetime,
        offer: InstanceOffer | None = None,
    ) -> None:
        """Write down that the machine exists since `at`.

        An offer is the one that was had, where it may be another than the first; its price is frozen.
        """
        had = {"instance_type": offer.instance_type.name, **offer.price} if offer is not None else {}
        self._move(
            run_id,
            node_id,
            came_from=EntryState.INTENDED,
            state=EntryState.LAUNCHED,
            provider_instance_id=provider_instance_id,
            launched_at=at.isoformat(),
            **had,
        )

    def recover(self, provider: str, instance: Instance) -> LedgerEntry | None:
        """Write down a machine that exists or existed, and return its entry; one that has an entry keeps it.

        It takes the intent that it was launched for, or gets an entry from its tags alone. None where it has
        neither: a machine without a price cannot be charged. An entry that is over, of a machine that exists, is
        launched again.
        """
        with self._transaction() as database:
            database.execute("BEGIN IMMEDIATE")
            if entry := _find(database, "provider_instance_id = ?", instance.provider_instance_id):
                if instance.is_ended or entry.state is not EntryState.ENDED:
                    return entry
                logger.warning(
                    "%s of run %s was closed at %s (%s) and is alive: its bill counts on",
                    *(instance.provider_instance_id, entry.run_id, entry.ended_at, entry.reason),
                )
                _update(database, entry, {"state": EntryState.LAUNCHED, "ended_at": None, "reason": None})
                return replace(entry, state=EntryState.LAUNCHED, ended_at=None, reason=None)
            values: dict[str, object] = {
                "state": EntryState.LAUNCHED,
                "provider_instance_id": instance.provider_instance_id,
                "launched_at": instance.launched_at.isoformat(),
                "instance_type": instance.instance_type,
            }
            if terms := instance.terms:
                values |= terms.price
            intent = _find_intent(database, instance)
            if intent is not None:
                _update(database, intent, values)
                return _find(database, "provider_instance_id = ?", instance.provider_instance_id)
            if terms is None:
                return None
            entry = LedgerEntry(
                **asdict(terms),
                run_id=instance.run_id,
                node_id=instance.provider_instance_id,
                provider=provider,
                instance_type=instance.instance_type,
                state=EntryState.LAUNCHED,
                launched_at=instance.launched_at,
                provider_instance_id=instance.provider_instance_id,
            )
            _insert(database, entry)
            return entry

    def failed(self, run_id: str, node_id: str, *, reason: str, at: datetime) -> None:
        """Write down that the launch brought no machine."""
        self._move(
            run_id,
            node_id,
            came_from=EntryState.INTENDED,
            state=EntryState.FAILED,
            ended_at=at.isoformat(),
            reason=reason,
        )

    def ended(self, run_id: str, node_id: str, *, reason: EndReason, at: datetime) -> None:
        """Write down that the machine is no more since `at`; see `LedgerEntry.end_at` for clocks that differ."""
        launched = [e for e in self.entries(run_id=run_id) if e.node_id == node_id and e.launched_at]
        self._move(
            run_id,
            node_id,
            came_from=EntryState.LAUNCHED,
            state=EntryState.ENDED,
            ended_at=(launched[-1].end_at(at) if launched else at).isoformat(),
            reason=reason,
        )

    def close_run(self, run_id: str, *, reason: EndReason, at: datetime, problem: str = NO_MACHINE) -> None:
        """Write down that all machines of a run are ended; intents without a machine failed by `problem`."""
        for entry in self.entries(run_id=run_id):
            self.ended(run_id, entry.node_id, reason=reason, at=at)
            self.failed(run_id, entry.node_id, reason=problem, at=at)

    def restore(self, entries: Iterable[LedgerEntry]) -> None:
        """Write down entries of another file as they are; a node that has an entry here keeps it."""
        with self._transaction() as database:
            for entry in entries:
                _insert(database, entry)

    def entries(self, *, run_id: str | None = None) -> tuple[LedgerEntry, ...]:
        """Return the entries of one run, or of all, by time and name."""
        condition, values = ("", ()) if run_id is None else ("WHERE run_id = ?", (run_id,))
        order = "ORDER BY intended_at, run_id, attempt, stage, node_id"
        with self._transaction() as database:
            rows = database.execute(f"{SELECT} {condition} {order}", values).fetchall()
        return tuple(entry_of_row(row) for row in rows)

    def _move(self, run_id: str, node_id: str, *, came_from: EntryState, **values: str | float) -> None:
        # At most one attempt of a run is in this state: the one before is closed first.
        assignments = ", ".join(f"{column} = ?" for column in values)
        with self._transaction() as database:
            moved = database.execute(
                f"UPDATE machines SET {assignments} WHERE run_id = ? AND node_id = ? AND state = ?",
                (*values.values(), run_id, node_id, came_from),
            )
            if moved.rowcount == 0 and not _find(database, "run_id = ? AND node_id = ?", run_id, node_id):
                raise LedgerError(
                    f"each machine must have been written down before it is moved, but {self.path} knows no "
                    f"{node_id} of run {run_id}: it was lost meanwhile; heterps sweep rebuilds it from the tags"
                )

    def _transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        return transaction(self.path)


def _insert(database: sqlite3.Connection, entry: LedgerEntry) -> None:
    """Add an entry, unless the attempt has the node already."""
    values = [getattr(entry, column) for column in COLUMNS]
    written = [value.isoformat() if isinstance(value, datetime) else value for value in values]
    places = ", ".join("?" * len(COLUMNS))
    database.execute(f"INSERT OR IGNORE INTO machines ({', '.join(COLUMNS)}) VALUES ({places})", written)


def _find(database: sqlite3.Connection, condition: str, *values: object) -> LedgerEntry | None:
    row = database.execute(f"{SELECT} WHERE {condition} ORDER BY node_id", values).fetchone()
    return None if row is None else entry_of_row(row)


def _find_intent(database: sqlite3.Connection, instance: Instance) -> LedgerEntry | None:
    """Return the open intent that a machine was launched for; intents of one stage are alike."""
    intents = "run_id = ? AND state = ?"
    keys: tuple[object, ...] = (instance.run_id, EntryState.INTENDED)
    if instance.node_id is not None:
        return _find(database, f"{intents} AND node_id = ?", *keys, instance.node_id)
    if instance.terms is None:
        return None
    intents_of_stage = f"{intents} AND attempt = ? AND stage = ?"
    keys = (*keys, instance.terms.attempt, instance.terms.stage)
    # An alternative may have been launched: any intent of the stage stands for it then.
    same_type = _find(database, f"{intents_of_stage} AND instance_type = ?", *keys, instance.instance_type)
    return same_type or _find(database, intents_of_stage, *keys)


def _update(database: sqlite3.Connection, entry: LedgerEntry, values: dict[str, object]) -> None:
    assignments = ", ".join(f"{column} = ?" for column in values)
    database.execute(
        f"UPDATE machines SET {assignments} WHERE run_id = ? AND attempt = ? AND node_id = ?",
        (*values.values(), entry.run_id, entry.attempt, entry.node_id),
    )
