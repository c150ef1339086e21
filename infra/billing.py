"""What a run cost: instance-seconds times the price that was frozen at launch.

Computed from the ledger alone, so that a bill can be made again at any later time and comes out the same; disks and
addresses follow from the instances, and what was asked of the bucket is told by the run (`infra/service_charges.py`).
What was paid for nothing has lines of its own. A rehearsal's bill shows list prices that nobody charges.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from heterps_core.training.storage_usage import StorageUsage
from heterps_core.units import SECONDS_PER_HOUR
from infra.ledger import EndReason, EntryState, Ledger, LedgerEntry
from infra.providers.base import Provider
from infra.service_charges import ServiceLine, service_lines

SCHEMA_VERSION = 2

STILL_RUNNING = "still running"
NOT_LAUNCHED = "not launched yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """Machines of one stage, instance type and price that ended for the same reason."""

    stage: int
    device_type: str
    instance_type: str
    market: str
    count: int
    instance_seconds: float
    """Charged seconds of all machines of the line together."""

    price_usd_per_hour: float
    """Of one instance."""

    price_as_of: str
    price_source: str
    usd: float
    ended_because: str
    is_waste: bool
    """Paid, or tried, for nothing: the launch failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """All machines of one run."""

    run_id: str
    provider: str
    lines: tuple[BillLine, ...]
    services: tuple[ServiceLine, ...]
    """Besides instances; none for a rehearsal, which has no disks of its own."""

    is_rehearsal: bool
    """List prices for processes of this machine; nothing is charged."""

    computed_at: str

    @property
    def total_usd(self) -> float:
        """Of all lines, waste and services included."""
        return sum(line.usd for line in self.lines) + sum(line.usd for line in self.services)

    @property
    def failed_launches_usd(self) -> float:
        """Of the lines that bought nothing; what was wasted besides is in `infra/waste.py`."""
        return sum(line.usd for line in self.lines if line.is_waste)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, with the sums for readers."""
        sums = {"total_usd": self.total_usd, "failed_launches_usd": self.failed_launches_usd}
        return {"schema_version": SCHEMA_VERSION, **asdict(self), **sums}


def bill_for_run(
    provider: Provider,
    run_id: str,
    *,
    ledger: Ledger,
    now: datetime,
    storage: StorageUsage | None = None,
) -> Bill:
    """Add up what a run cost until `now`.

    Each machine is charged from its launch to its end, or to `now` while it lives, but at least the
    provider's shortest charged time: usd = seconds / 3600 * price_usd_per_hour.
    """
    entries = sorted(ledger.entries(run_id=run_id), key=_line_key)
    lines = tuple(
        _line_of(list(group), now=now, minimum_billed_s=provider.minimum_billed_s)
        for _, group in groupby(entries, key=_line_key)
    )
    services: tuple[ServiceLine, ...] = ()
    if provider.charges_money:
        services = service_lines(
            instance_seconds=sum(line.instance_seconds for line in lines),
            disk_gb_each=provider.disk_gb_each,
            storage=storage,
        )
    return Bill(
        run_id=run_id,
        provider=provider.name,
        lines=lines,
        services=services,
        is_rehearsal=not provider.charges_money,
        computed_at=now.isoformat(),
    )


def bill_as_text(bill: Bill) -> str:
    """Return a bill as a table for people."""
    heading = "list prices of a rehearsal: nothing is charged" if bill.is_rehearsal else "charged"
    rows = [
        f"{line.stage:>5}  {line.instance_type:<16} {line.market:<10} {line.count:>5}  "
        f"{line.instance_seconds:>12.1f}  {line.price_usd_per_hour:>9.4f}  {line.usd:>10.6f}  "
        f"{line.ended_because}{' (waste)' if line.is_waste else ''}"
        for line in bill.lines
    ]
    services = [
        f"{'':>5}  {line.service:<44} {line.quantity:>12.4f}  {line.usd_per_unit:>9.4f}  {line.usd:>10.6f}  "
        f"by {line.unit}"
        for line in bill.services
    ]
    priced: list[BillLine | ServiceLine] = [*bill.lines, *bill.services]
    dates = sorted({f"{line.price_as_of} ({line.price_source})" for line in priced})
    return "\n".join(
        [
            f"Bill of run {bill.run_id}, provider {bill.provider}: {heading}",
            f"{'stage':>5}  {'instance':<16} {'market':<10} {'count':>5}  {'inst.-seconds':>12}  "
            f"{'USD/hour':>9}  {'USD':>10}  ended because",
            *rows,
            *services,
            f"total {bill.total_usd:.6f} USD"
            + (
                f", of it {bill.failed_launches_usd:.6f} USD for launches that failed"
                if bill.failed_launches_usd > 0
                else ""
            ),
            *(f"prices as of {date}" for date in dates),
        ]
    )


def charged_seconds(entry: LedgerEntry, *, now: datetime, minimum_billed_s: float) -> float:
    """Return the seconds that one machine is charged for; 0 for one that was never had."""
    if entry.launched_at is None:
        return 0.0
    lived_s = ((entry.ended_at or now) - entry.launched_at).total_seconds()
    return max(lived_s, minimum_billed_s)


def _line_of(entries: list[LedgerEntry], *, now: datetime, minimum_billed_s: float) -> BillLine:
    first = entries[0]
    seconds = sum(charged_seconds(e, now=now, minimum_billed_s=minimum_billed_s) for e in entries)
    return BillLine(
        stage=first.stage,
        device_type=first.device_type,
        instance_type=first.instance_type,
        market=first.market,
        count=len(entries),
        instance_seconds=seconds,
        price_usd_per_hour=first.price_usd_per_hour,
        price_as_of=first.price_as_of,
        price_source=first.price_source,
        usd=seconds / SECONDS_PER_HOUR * first.price_usd_per_hour,
        ended_because=_ended_because(first),
        is_waste=first.state is EntryState.FAILED or first.reason == EndReason.LAUNCH_FAILED,
    )


def _line_key(entry: LedgerEntry) -> tuple[object, ...]:
    return (
        entry.stage,
        entry.instance_type,
        entry.market,
        entry.price_usd_per_hour,
        entry.price_as_of,
        entry.state,
        _ended_because(entry),
    )


def _ended_because(entry: LedgerEntry) -> str:
    if entry.state is EntryState.INTENDED:
        return NOT_LAUNCHED
    return entry.reason or STILL_RUNNING
