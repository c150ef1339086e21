"""The charges of spot machines, and an assumed rate of interruptions.

Prices have one source, the cloud's price history (EC2 DescribeSpotPriceHistory): the cloud bills by it, it reaches
back 90 days, and one question answers for all machines of a type and zone. Ends of machines stand in the ledger, with
the cloud's own time and reason.

By AWS's words (EC2 user guide, "Billing for interrupted Spot Instances"; AWS news blog, November 2017, on the spot
pricing model) a Linux machine pays by the second the spot price in effect at the beginning of each instance-hour, and
nothing where EC2 interrupts it within its first hour; one that its owner ends then pays its seconds.

No cloud tells how often a pool preempts, and since 2017 prices do not either. The rates are counted in traces of
instances that ran on spot (skypilot-org/spot-traces, preemption/, 2023; from "Can't Be Late", NSDI 2024): V100 and
large CPU instances on AWS, C3 on Google. They were measured in contended pools: AWS' Spot Instance Advisor shows most
types below 5 % a month, which is a thousand times less. So they err on the side of on-demand.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from heterps_core.hardware import AWS, DeviceKind, InstanceOffer, Market
from heterps_core.units import SECONDS_PER_HOUR

_HOUR = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotHistory:
    """Price changes of one instance type in one zone, oldest first; they begin before the machines that it bills."""

    times: tuple[datetime, ...]
    prices_usd_per_hour: tuple[float, ...]
    source: str

    @property
    def last_usd_per_hour(self) -> float:
        """The price that holds now."""
        return self.prices_usd_per_hour[-1]

    def usd(self, *, launched_at: datetime, seconds: float) -> float:
        """Return the charge of a machine for some seconds from its launch, hour by hour.

        usd = sum over hours h of min(3600, seconds - 3600 h) / 3600 * price in effect at launched_at + h hours
        """
        return sum(
            min(SECONDS_PER_HOUR, seconds - hour * SECONDS_PER_HOUR)
            / SECONDS_PER_HOUR
            * self.prices_usd_per_hour[max(bisect_right(self.times, launched_at + hour * _HOUR) - 1, 0)]
            for hour in range(math.ceil(seconds / SECONDS_PER_HOUR))
        )


def is_free(*, is_preempted: bool, launched_at: datetime, ended_at: datetime) -> bool:
    """Return whether a machine is not charged, as the cloud preempted it within its first hour."""
    return is_preempted and ended_at - launched_at < _HOUR


_TRACES = "skypilot-org/spot-traces, preemption/, 2023"

COUNTED: Mapping[tuple[str, DeviceKind], tuple[int, float]] = {
    (AWS, DeviceKind.CPU): (221, 369.3),
    (AWS, DeviceKind.GPU): (415, 1_971.3),
    ("gcp", DeviceKind.CPU): (3, 180.4),
}
"""Falls in the number of running instances, and hours of all of them together, by cloud and kind of instance; what is
not here is taken from all of them together."""


def with_interruptions(offers: Iterable[InstanceOffer]) -> list[InstanceOffer]:
    """Return offers with their own rate, else an assumed one; on-demand ones stay as they are."""
    return [_with_rate(offer) for offer in offers]


def _with_rate(offer: InstanceOffer) -> InstanceOffer:
    if offer.market is not Market.SPOT or offer.interruptions_source:
        return offer
    kind = DeviceKind.GPU if offer.instance_type.accelerator_count else DeviceKind.CPU
    known = COUNTED.get((offer.cloud, kind))
    num_interruptions, instance_hours = known or map(sum, zip(*COUNTED.values(), strict=True))
    pool = f"{kind} instances of {offer.cloud}" if known else "all of them, as none is of this kind"
    return replace(
        offer,
        interruptions_per_hour=num_interruptions / instance_hours,
        interruptions_source=f"assumed, counted in {_TRACES}: {pool}",
    )
