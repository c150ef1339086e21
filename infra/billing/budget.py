"""Compares the spending of a living run with its caps: warns, asks for a checkpoint and a stop, ends the machines.

    within --80 %--> warned --cap less a reserve--> stopping --cap--> ended

The reserve pays for the last checkpoint and the teardown, so that a run that obeys stays within its cap; one that
does not (a worker that hangs) loses its machines at the cap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from heterps_core.training.node.node_life import repeated
from heterps_core.units import SECONDS_PER_HOUR
from infra.billing.bill import charged_seconds
from infra.billing.caps import Caps
from infra.ledger.ledger import LedgerEntry
from infra.providers.base import Provider

logger = logging.getLogger(__name__)

_WARNING_SHARE = 0.8

_RESERVE_S = 60.0
"""The fleet's time for the last checkpoint and the teardown."""

_LARGEST_RESERVE_SHARE = 0.05
"""Limits the reserve of a small cap."""

LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """USD so far."""

    run_usd: float
    month_usd: float
    """By all runs of the calendar month, this one included."""


def spent_usd(
    entries: Iterable[LedgerEntry],
    provider: type[Provider] | Provider,
    *,
    now: datetime,
    since: datetime | None = None,
) -> float:
    """Return the cost of machines of a provider until `now`, from `since` on where that is given.

    With disks and addresses, as the bill has it; what a run asks of its bucket is known when it has ended.
    """
    total = 0.0
    for entry in entries:
        if entry.launched_at is None:
            continue
        seconds = charged_seconds(entry, provider, now=now)
        if since is not None and entry.launched_at < since:
            seconds -= (since - entry.launched_at).total_seconds()
        usd_per_hour = (
            entry.price_usd_per_hour + entry.disk_usd_per_hour + provider.services_usd_per_machine_hour()
        )
        total += max(seconds, 0.0) / SECONDS_PER_HOUR * usd_per_hour
    return total


def start_of_month(now: datetime) -> datetime:
    """Return the first instant of the calendar month in UTC.

    Example:
        >>> start_of_month(datetime(2026, 11, 21, 4, 30, tzinfo=UTC)).isoformat()
        '2026-11-01T00:00:00+00:00'
    """
    return now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


@dataclass(kw_only=True)
class BudgetWatch:
    """Compares the spending of a run with its caps again and again, and acts once at each threshold."""

    caps: Caps
    spending: Callable[[], Spending]
    price_usd_per_hour: float
    """Price of all machines of the run, with their disks and addresses."""

    on_warning: Callable[[str], None]
    on_stop: Callable[[], None]
    on_end: Callable[[], None]
    has_ended_machines: bool = field(default=False, init=False)
    stopped_by: str | None = field(default=None, init=False)
    """Why a stop was asked for, with the figures; None while none was."""

    _warned: set[str] = field(default_factory=set, init=False)

    def look(self) -> None:
        """Compare the spending with the caps."""
        spending = self.spending()
        self._hold("USD per run", spending.run_usd, self.caps.max_usd_per_run)
        self._hold("USD per month", spending.month_usd, self.caps.max_usd_per_month)

    def _stop(self, why: str) -> None:
        """Ask for a stop, once; where it cannot be asked for, the next look tries again."""
        if self.stopped_by is not None:
            return
        logger.warning("%s: asking for a checkpoint and a stop", why)
        try:
            self.on_stop()
        except Exception:
            logger.exception("the stop could not be asked for, trying again")
        else:
            self.stopped_by = why

    def _hold(self, unit: str, spent: float, cap: float | None) -> None:
        if cap is None:
            return
        text = f"{spent:.4g} of the {cap:.4g} {unit} are spent"
        if spent >= _WARNING_SHARE * cap and unit not in self._warned:
            self._warned.add(unit)
            self.on_warning(f"{text} ({spent / cap:.0%}); at the cap the run writes a checkpoint and stops")
        reserve = min(self.price_usd_per_hour * _RESERVE_S / SECONDS_PER_HOUR, _LARGEST_RESERVE_SHARE * cap)
        if spent + reserve >= cap:
            self._stop(text)
        if spent >= cap and not self.has_ended_machines:
            logger.error("%s: ending the machines", text)
            self.on_end()
            self.has_ended_machines = True
            self.stopped_by = self.stopped_by or text


@contextmanager
def watched(watch: BudgetWatch, *, interval_s: float = LOOK_INTERVAL_S) -> Iterator[BudgetWatch]:
    """Let a thread look at the budget while the block runs."""

    def look() -> None:
        try:
            watch.look()
        except Exception:
            # Whatever is wrong now (a cloud that does not answer), the next look may do.
            logger.exception("the budget could not be held, trying again")

    with repeated(look, interval_s=interval_s, name="budget"):
        yield watch
