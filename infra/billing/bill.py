"""What a run cost: instance-seconds times the price that was frozen at launch, on spot that of each hour.

It is computed from the ledger, and from the price history of spot machines, which is kept once these have ended. So a
bill can be made again at any later time and comes out the same. Disks and addresses follow from the instances, and
the run reports its requests to the bucket (`infra/prices/service_charges.py`). Launches that failed have lines of
their own. A dry run's bill shows list prices; nothing is charged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from heterps_core.hardware import Market, Price
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.training.storage.store import StorageUsage
from heterps_core.units import SECONDS_PER_HOUR
from infra.ledger.ledger import EndReason, EntryState, Ledger, LedgerEntry
from infra.prices.service_charges import RATES, Rates, ServiceLine, service_lines
from infra.prices.spot_charges import SpotHistory, is_free
from infra.providers.base import Provider

_STILL_RUNNING = "still running"
_NOT_LAUNCHED = "not launched yet"
FREE = f"{EndReason.PREEMPTED} within its first hour: not charged"

_NO_HISTORIES: Mapping[str, SpotHistory] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine(Price):
    """Machines of one stage, instance type and price that ended for the same reason.

    The price is that of one instance; the mean of what was charged where the price of a spot machine moved.
    """

    stage: int
    device_type: str
    instance_type: str
    market: str
    count: int
    instance_seconds: float
    usd: float
    ended_because: str
    is_waste: bool
    """Paid, or tried, for nothing: the launch failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill(JsonDocument):
    """All machines of one run."""

    json_form = JsonForm(version=2, sums=("total_usd", "failed_launches_usd"))

    run_id: str
    provider: str
    lines: tuple[BillLine, ...]
    services: tuple[ServiceLine, ...]
    """Besides instances; none for a dry run, which has no disks of its own."""

    is_dry_run: bool
    computed_at: str

    @property
    def total_usd(self) -> float:
        """The sum of all lines, waste and services included."""
        return sum(line.usd for line in self.lines) + sum(line.usd for line in self.services)

    @property
    def failed_launches_usd(self) -> float:
        """The sum of the lines that bought nothing; other waste is in `waste_lines`."""
        return sum(line.usd for line in self.lines if line.is_waste)


def bill_for_run(
    provider: type[Provider] | Provider,
    run_id: str,
    *,
    ledger: Ledger,
    now: datetime,
    storage: StorageUsage | None = None,
    spot_prices: Mapping[str, SpotHistory] = _NO_HISTORIES,
    rates: Rates = RATES,
) -> Bill:
    """Add up the cost of a run until `now`.

    Each machine is charged from its launch to its end, or to `now` while it lives, but at least the
    provider's shortest charged time: usd = seconds / 3600 * price_usd_per_hour. A spot machine with a price history
    (by its id) is charged by `infra/prices/spot_charges.py`; one without, at the price that was planned with.
    """
    charges = sorted(
        (
            (entry, _charge_of(entry, spot_prices.get(entry.provider_instance_id or ""), provider, now=now))
            for entry in ledger.entries(run_id=run_id)
        ),
        key=_line_key,
    )
    lines = tuple(_line_of(list(group)) for _, group in groupby(charges, key=_line_key))
    services: tuple[ServiceLine, ...] = ()
    if provider.charges_services:
        services = service_lines(
            instance_seconds=sum(line.instance_seconds for line in lines),
            disk_gb_each=provider.disk_gb_each,
            storage=storage,
            table_disk_usd=sum(
                line.instance_seconds / SECONDS_PER_HOUR * entry.disk_usd_per_hour for entry, line in charges
            ),
            rates=rates,
        )
    return Bill(
        run_id=run_id,
        provider=provider.name,
        lines=lines,
        services=services,
        is_dry_run=provider.is_dry_run,
        computed_at=now.isoformat(),
    )


def charged_seconds(entry: LedgerEntry, provider: type[Provider] | Provider, *, now: datetime) -> float:
    """Return the seconds that one machine is charged for; 0 for one that was never had."""
    if entry.launched_at is None:
        return 0.0
    lived_s = ((entry.ended_at or now) - entry.launched_at).total_seconds()
    return max(lived_s, provider.minimum_billed_s)


def _charge_of(
    entry: LedgerEntry, history: SpotHistory | None, provider: type[Provider] | Provider, *, now: datetime
) -> BillLine:
    """Return the line of one machine, at the price of its launch."""
    seconds = charged_seconds(entry, provider, now=now)
    usd, source = seconds / SECONDS_PER_HOUR * entry.price_usd_per_hour, entry.price_source
    ended_because = _NOT_LAUNCHED if entry.state is EntryState.INTENDED else entry.reason
    if entry.launched_at is not None and entry.market is Market.SPOT:
        is_preempted = entry.reason == EndReason.PREEMPTED
        if is_free(is_preempted=is_preempted, launched_at=entry.launched_at, ended_at=entry.ended_at or now):
            seconds, usd, ended_because = 0.0, 0.0, FREE
        elif history is not None:
            usd, source = history.usd(launched_at=entry.launched_at, seconds=seconds), history.source
    return BillLine(
        stage=entry.stage,
        device_type=entry.device_type,
        instance_type=entry.instance_type,
        market=entry.market,
        count=1,
        instance_seconds=seconds,
        price_usd_per_hour=entry.price_usd_per_hour,
        price_as_of=entry.price_as_of,
        price_source=source,
        usd=usd,
        ended_because=ended_because or _STILL_RUNNING,
        is_waste=entry.state is EntryState.FAILED or entry.reason == EndReason.LAUNCH_FAILED,
    )


def _line_of(charges: list[tuple[LedgerEntry, BillLine]]) -> BillLine:
    """Return the line of several machines; its price is their mean where they were billed by a price history."""
    entry, first = charges[0]
    seconds, usd = sum(line.instance_seconds for _, line in charges), sum(line.usd for _, line in charges)
    is_by_launch_price = first.price_source == entry.price_source or not seconds
    price = first.price_usd_per_hour if is_by_launch_price else usd / seconds * SECONDS_PER_HOUR
    return replace(first, count=len(charges), instance_seconds=seconds, usd=usd, price_usd_per_hour=price)


def _line_key(charge: tuple[LedgerEntry, BillLine]) -> tuple[object, ...]:
    entry, line = charge
    return (
        entry.stage,
        entry.instance_type,
        entry.market,
        entry.price_usd_per_hour,
        entry.price_as_of,
        entry.state,
        line.ended_because,
        line.price_source,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WasteLine:
    """A part of a bill that bought nothing."""

    cause: str
    usd: float
    share: float
    """Part of the bill's total, in [0, 1]."""


def waste_lines(
    bills: Sequence[Bill],
    *,
    trained_seconds: float,
    repeated_seconds: float,
    idle_shares: Mapping[int, float],
) -> tuple[WasteLine, ...]:
    """Return the parts of a run's bills that bought no training; no part is in two lines.

    Machines cost the same whether they train, boot or wait.

    Args:
        bills: Of all its launches, which have ended.
        trained_seconds: In which its workers ran steps, by the clock.
        repeated_seconds: Of these, for steps that were done again.
        idle_shares: By stage, in [0, 1]: of the steps' time, in which its workers waited for other stages.

    Returns:
        Lines without those of 0 USD. They add up to no more than the total.
    """
    lived = [[line for line in bill.lines if not line.is_waste and line.count] for bill in bills]
    # Machines of a launch live equally long but for seconds; the longest stands for the launch.
    lived_s = sum(max((line.instance_seconds / line.count for line in lines), default=0.0) for lines in lived)
    machines = [line for lines in lived for line in lines]
    if not lived_s:
        return ()
    usd_per_s = sum(line.usd for line in machines) / lived_s
    idle_usd_per_s = sum(line.usd * idle_shares.get(line.stage, 0.0) for line in machines) / lived_s
    trained_s = min(trained_seconds, lived_s)
    repeated_s = min(repeated_seconds, trained_s)
    causes = {
        "launches that failed": sum(bill.failed_launches_usd for bill in bills),
        "start-up, evaluation and teardown": (lived_s - trained_s) * usd_per_s,
        "steps done again": repeated_s * usd_per_s,
        "workers that waited for others": (trained_s - repeated_s) * idle_usd_per_s,
    }
    total_usd = sum(bill.total_usd for bill in bills)
    return tuple(
        WasteLine(cause=cause, usd=usd, share=usd / total_usd) for cause, usd in causes.items() if usd > 0
    )
