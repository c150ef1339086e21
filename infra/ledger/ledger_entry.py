"""A machine as its provider knows it when all else is lost, and its line of the ledger, with its frozen price."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from heterps_core.hardware import Market, Price
from heterps_core.json_codec import from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTerms(Price):
    """What a machine was launched for and at which price, as it stands on the machine itself."""

    attempt: int
    """Which attempt of its run launched it, counted from 1."""

    stage: int
    device_type: str
    market: Market
    region: str
    intended_at: datetime
    disk_usd_per_hour: float = 0.0
    """Price of the disk space for rows of tables, in addition to the machine's own price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """A machine that exists, or existed a short while ago, as found from the provider alone."""

    provider_instance_id: str
    run_id: str
    """Empty where the machine has lost its tags and was found by its id."""

    node_id: str | None = None
    """None where only the ledger and cluster.json know: the machines of one fleet request are alike."""

    instance_type: str
    launched_at: datetime
    is_ended: bool = False
    ended_at: datetime | None = None
    """None while it exists, and where the provider does not tell."""

    lease_until: datetime | None
    """None where the lease cannot be read; it counts as expired once the machine is old enough to show it."""

    is_owner_dead: bool = False
    """Known to be so; a provider that cannot see the owner says False and trusts the lease."""

    terms: LaunchTerms | None = None
    """None where the provider keeps none."""

    ended_because: str = ""
    """In the provider's words; empty while it exists, and where the provider gives none."""

    is_preempted: bool = False
    """The cloud ended it, neither we nor the machine itself."""

    @property
    def end_reason(self) -> EndReason:
        """The reason of an end that this program did not ask for."""
        return EndReason.PREEMPTED if self.is_preempted else EndReason.GONE


def moment_or_none(text: str) -> datetime | None:
    """Read a time with a zone; None where the text is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None


class EntryState(StrEnum):
    """Where a machine stands; the picture in infra/ledger/ledger.py shows the ways between them."""

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
    GONE = "found gone"
    PREEMPTED = "preempted by the cloud"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry(LaunchTerms):
    """One machine of one run, at the price that was frozen when its launch was intended."""

    run_id: str
    node_id: str
    """The machine's own id where it was written down from its tags alone."""

    provider: str
    instance_type: str
    state: EntryState
    launched_at: datetime | None = None
    ended_at: datetime | None = None
    provider_instance_id: str | None = None
    reason: str | None = None
    """An `EndReason`, or the provider's answer to a failed launch."""

    @property
    def is_open(self) -> bool:
        """Not known to be over."""
        return self.state in (EntryState.INTENDED, EntryState.LAUNCHED)

    def end_at(self, at: datetime) -> datetime:
        """Return when a launched machine ended that is no more since `at` by this machine's clock.

        The launch has the provider's time. If the end is before it by this machine's clock, the two clocks differ,
        and the machine lived at most as long as this clock counted since the intent.
        """
        if self.launched_at is None or at >= self.launched_at:
            return at
        return self.launched_at + max(at - self.intended_at, timedelta())


_FIELDS = tuple(LedgerEntry.__dataclass_fields__)


def entry_of_row(row: tuple[object, ...]) -> LedgerEntry:
    """Return the entry of a row that holds the fields in their order, times as text."""
    return from_json(LedgerEntry, dict(zip(_FIELDS, row, strict=True)))
