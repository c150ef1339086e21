"""Holds our bill against what the cloud charged, instance by instance.

Ours is known the minute a run ends; a cloud's comes a day later. Where the two differ by more than rounding, the
price that was frozen was wrong, an instance lived longer than the ledger knows, or someone has a discount.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from heterps_core.text_table import Table
from heterps_core.units import SECONDS_PER_HOUR
from infra.billing.bill import charged_seconds
from infra.billing.cost_export import ChargedItem
from infra.ledger.ledger import LedgerEntry
from infra.providers import get_provider

INSTANCE_USAGE = ("BoxUsage", "SpotUsage")
"""Parts of the usage types of an instance's time; a region's prefix may stand before them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReconciledInstance:
    """One instance in both bills."""

    provider_instance_id: str
    run_id: str
    instance_type: str
    ours_usd: float
    """Seconds by the ledger times the frozen price."""

    charged_usd: float | None
    """By the cloud; None where the export has no line of it, which a young export may not have yet."""

    ours_hours: float
    charged_hours: float | None

    @property
    def difference_usd(self) -> float | None:
        """What the cloud charged beyond our bill."""
        return None if self.charged_usd is None else self.charged_usd - self.ours_usd


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciliation:
    """Both bills side by side."""

    instances: tuple[ReconciledInstance, ...]
    unknown: tuple[ChargedItem, ...]
    """Charged time of instances that carry our tag and are in no ledger: recover the ledger from the tags."""

    other_usd: dict[str, float]
    """Charged under our tag besides instances (disks, addresses, transfer), by usage type."""

    @property
    def ours_usd(self) -> float:
        """Of the instances that the export knows."""
        return sum(i.ours_usd for i in self.instances if i.charged_usd is not None)

    @property
    def charged_usd(self) -> float:
        """Of the same instances."""
        return sum(i.charged_usd for i in self.instances if i.charged_usd is not None)

    @property
    def missing(self) -> tuple[ReconciledInstance, ...]:
        """Instances that we bill and the export does not know."""
        return tuple(i for i in self.instances if i.charged_usd is None and i.ours_usd > 0)


def reconcile(
    entries: Iterable[LedgerEntry],
    charged: Sequence[ChargedItem],
    *,
    now: datetime,
) -> Reconciliation:
    """Join the ledger with an export by instance id.

    Args:
        entries: Of the runs in question; those that never had an instance are left out.
        charged: Lines of the export.
        now: Until when machines that still live are charged.
    """
    hours: dict[str, float] = defaultdict(float)
    cost_usd: dict[str, float] = defaultdict(float)
    other_usd: dict[str, float] = defaultdict(float)
    for item in charged:
        if _is_instance_time(item):
            hours[item.resource_id] += item.usage_amount
            cost_usd[item.resource_id] += item.cost_usd
        elif item.run_id is not None:
            other_usd[item.usage_type] += item.cost_usd
    instances = tuple(
        _reconciled(entry, hours, cost_usd, now=now) for entry in entries if entry.launched_at is not None
    )
    known = {instance.provider_instance_id for instance in instances}
    unknown = tuple(
        item
        for item in charged
        if _is_instance_time(item) and item.run_id is not None and item.resource_id not in known
    )
    return Reconciliation(instances=instances, unknown=unknown, other_usd=dict(other_usd))


def reconciliation_as_text(found: Reconciliation) -> str:
    """Return a reconciliation as a table for people, the largest differences first."""
    table = Table(
        columns={
            **dict.fromkeys(("instance", "run", "type"), ""),
            **dict.fromkeys(("hours ours", "hours charged"), ".4f"),
            **dict.fromkeys(("USD ours", "USD charged"), ".6f"),
            "USD more": "+.6f",
        },
        rows=[
            (
                instance.provider_instance_id,
                instance.run_id,
                instance.instance_type,
                instance.ours_hours,
                instance.charged_hours,
                instance.ours_usd,
                instance.charged_usd,
                instance.difference_usd,
            )
            for instance in sorted(found.instances, key=lambda i: -abs(i.difference_usd or 0.0))
        ],
    )
    lines = [
        *table.lines(indent=""),
        f"in both bills: {found.ours_usd:.6f} USD ours, {found.charged_usd:.6f} USD charged"
        + (f" ({found.charged_usd / found.ours_usd - 1:+.2%})" if found.ours_usd else ""),
    ]
    if found.missing:
        usd = sum(instance.ours_usd for instance in found.missing)
        lines.append(
            f"not in the export: {len(found.missing)} instances, {usd:.6f} USD; exports lag up to a day"
        )
    if found.unknown:
        ids = sorted({item.resource_id for item in found.unknown})
        usd = sum(item.cost_usd for item in found.unknown)
        lines.append(f"charged, but in no ledger: {', '.join(ids)}, {usd:.6f} USD")
    lines += [f"besides instances: {name} {usd:.6f} USD" for name, usd in sorted(found.other_usd.items())]
    return "\n".join(lines)


def _reconciled(
    entry: LedgerEntry, hours: dict[str, float], cost_usd: dict[str, float], *, now: datetime
) -> ReconciledInstance:
    instance_id = entry.provider_instance_id or ""
    ours_hours = charged_seconds(entry, get_provider(entry.provider), now=now) / SECONDS_PER_HOUR
    return ReconciledInstance(
        provider_instance_id=instance_id,
        run_id=entry.run_id,
        instance_type=entry.instance_type,
        ours_usd=ours_hours * entry.price_usd_per_hour,
        charged_usd=cost_usd.get(instance_id),
        ours_hours=ours_hours,
        charged_hours=hours.get(instance_id),
    )


def _is_instance_time(item: ChargedItem) -> bool:
    return any(part in item.usage_type for part in INSTANCE_USAGE)
