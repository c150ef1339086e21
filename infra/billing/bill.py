"""What a run cost: instance-seconds times the price that was frozen at launch, on spot that of each hour.

Computed from what was written down alone, the ledger and the prices of spot machines as they were when these had
ended, so that a bill can be made again at any later time and comes out the same; disks and addresses follow from the
instances, and what was asked of the bucket is told by the run (`infra/prices/service_charges.py`). What was paid for
nothing has lines of its own. A dry run's bill shows list prices; nothing is charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from heterps_core.hardware import Price
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.training.storage.store import StorageUsage
from heterps_core.units import SECONDS_PER_HOUR
from infra.ledger.ledger import EndReason, EntryState, Ledger, LedgerEntry
from infra.prices.service_charges import ServiceLine, service_lines
from infra.prices.spot_charges import SpotRecord, is_free, spot_usd
from infra.providers.base import Provider

STILL_RUNNING = "still running"
NOT_LAUNCHED = "not launched yet"
PREEMPTED = "preempted by the cloud"
FREE = "preempted by the cloud within its first hour: not charged"

NO_RECORDS: Mapping[str, SpotRecord] = {}


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
    """Charged seconds of all machines of the line together."""

    usd: float
    ended_because: str
    is_waste: bool
    """Paid, or tried, for nothing: the launch failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill(JsonDocument):
    """All machines of one run."""

    json_form = JsonForm(
        version=2,
        sums=("total_usd", "failed_launches_usd"),
        earlier_names=(("is_rehearsal", "is_dry_run"),),
    )

    run_id: str
    provider: str
    lines: tuple[BillLine, ...]
    services: tuple[ServiceLine, ...]
    """Besides instances; none for a dry run, which has no disks of its own."""

    is_dry_run: bool
    """List prices for processes of this machine; nothing is charged."""

    computed_at: str

    @property
    def total_usd(self) -> float:
        """Of all lines, waste and services included."""
        return sum(line.usd for line in self.lines) + sum(line.usd for line in self.services)

    @property
    def failed_launches_usd(self) -> float:
        """Of the lines that bought nothing; what was wasted besides is in `infra/billing/waste.py`."""
        return sum(line.usd for line in self.lines if line.is_waste)


def bill_for_run(
    provider: Provider,
    run_id: str,
    *,
    ledger: Ledger,
    now: datetime,
    storage: StorageUsage | None = None,
    spot_records: Mapping[str, SpotRecord] = NO_RECORDS,
) -> Bill:
    """Add up what a run cost until `now`.

    Each machine is charged from its launch to its end, or to `now` while it lives, but at least the
    provider's shortest charged time: usd = seconds / 3600 * price_usd_per_hour. A spot machine of which there is a
    record is charged by `infra/prices/spot_charges.py`; without one, at the price that was planned with.
    """
    charges = sorted(
        (
            _charge_of(entry, spot_records.get(entry.provider_instance_id or ""), provider, now=now)
            for entry in ledger.entries(run_id=run_id)
        ),
        key=_line_key,
    )
    lines = tuple(_line_of(list(group)) for _, group in groupby(charges, key=_line_key))
    services: tuple[ServiceLine, ...] = ()
    if not provider.runs_here:
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
        is_dry_run=not provider.charges_money,
        computed_at=now.isoformat(),
    )


def charged_seconds(entry: LedgerEntry, provider: type[Provider] | Provider, *, now: datetime) -> float:
    """Return the seconds that one machine is charged for; 0 for one that was never had."""
    if entry.launched_at is None:
        return 0.0
    lived_s = ((entry.ended_at or now) - entry.launched_at).total_seconds()
    return max(lived_s, provider.minimum_billed_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Charge:
    """What one machine is charged."""

    entry: LedgerEntry
    seconds: float
    usd: float
    price_source: str
    ended_because: str


def _charge_of(
    entry: LedgerEntry, record: SpotRecord | None, provider: Provider, *, now: datetime
) -> _Charge:
    if record is None or entry.launched_at is None:
        seconds = charged_seconds(entry, provider, now=now)
        return _Charge(
            entry=entry,
            seconds=seconds,
            usd=seconds / SECONDS_PER_HOUR * entry.price_usd_per_hour,
            price_source=entry.price_source,
            ended_because=_ended_because(entry),
        )
    # The ledger may have noted the end late; the cloud charges by its own.
    ended_at = min(filter(None, (record.ended_at, entry.ended_at)), default=now)
    own = replace(entry, ended_at=ended_at)
    is_not_charged = is_free(record, launched_at=entry.launched_at, ended_at=ended_at)
    seconds = 0.0 if is_not_charged else charged_seconds(own, provider, now=now)
    why = FREE if is_not_charged else PREEMPTED if record.is_preempted else _ended_because(entry)
    return _Charge(
        entry=entry,
        seconds=seconds,
        usd=spot_usd(record, launched_at=entry.launched_at, seconds=seconds),
        price_source=record.source,
        ended_because=why,
    )


def _line_of(charges: list[_Charge]) -> BillLine:
    first = charges[0].entry
    seconds = sum(charge.seconds for charge in charges)
    usd = sum(charge.usd for charge in charges)
    is_by_launch_price = charges[0].price_source == first.price_source or not seconds
    return BillLine(
        stage=first.stage,
        device_type=first.device_type,
        instance_type=first.instance_type,
        market=first.market,
        count=len(charges),
        instance_seconds=seconds,
        price_usd_per_hour=(
            first.price_usd_per_hour if is_by_launch_price else usd / seconds * SECONDS_PER_HOUR
        ),
        price_as_of=first.price_as_of,
        price_source=charges[0].price_source,
        usd=usd,
        ended_because=charges[0].ended_because,
        is_waste=first.state is EntryState.FAILED or first.reason == EndReason.LAUNCH_FAILED,
    )


def _line_key(charge: _Charge) -> tuple[object, ...]:
    entry = charge.entry
    return (
        entry.stage,
        entry.instance_type,
        entry.market,
        entry.price_usd_per_hour,
        entry.price_as_of,
        entry.state,
        charge.ended_because,
        charge.price_source,
    )


def _ended_because(entry: LedgerEntry) -> str:
    if entry.state is EntryState.INTENDED:
        return NOT_LAUNCHED
    return entry.reason or STILL_RUNNING
