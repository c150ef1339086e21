"""Interruptions of spot pools: what was counted in them, and what is assumed where nothing is known.

The bundled rates are counted in traces of instances that ran on spot (skypilot-org/spot-traces, preemption/, 2023;
from "Can't Be Late", NSDI 2024): V100 and large CPU instances on AWS, C3 on Google. They were measured in contended
pools: AWS' Spot Instance Advisor shows most types below 5 % a month, which is a thousand times less.
So they err on the side of on-demand; whoever knows a pool better plans with more spot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from heterps_core.hardware import AWS, DeviceKind, InstanceOffer, Market
from heterps_core.units import SECONDS_PER_HOUR

TRACES = "skypilot-org/spot-traces, preemption/, 2023"


@dataclass(frozen=True, slots=True)
class InterruptionRate:
    """Interruptions that were counted in a pool, and the hours of all its instances together."""

    num_interruptions: int
    instance_hours: float

    @property
    def per_hour(self) -> float:
        """Of one instance."""
        return self.num_interruptions / self.instance_hours

    def __str__(self) -> str:
        return (
            f"{self.per_hour:.3g} per instance-hour ({self.num_interruptions} in {self.instance_hours:,.0f} "
            "instance-hours)"
        )


COUNTED: Mapping[tuple[str, DeviceKind], InterruptionRate] = {
    (AWS, DeviceKind.CPU): InterruptionRate(221, 369.3),
    (AWS, DeviceKind.GPU): InterruptionRate(415, 1_971.3),
    ("gcp", DeviceKind.CPU): InterruptionRate(3, 180.4),
}
"""By cloud and kind of instance; what is not here is taken from all of them together."""


def rate_of_counts(times_s: Sequence[float], counts: Sequence[int]) -> InterruptionRate:
    """Return the rate from how many instances ran, or could be had, at each time: a step curve.

    Each instance that a step falls by is one interruption. What an owner gave back by himself is counted too, and
    one that was replaced between two readings is not.

    Args:
        times_s: Rising; shape (N,), at least 2.
        counts: From its time on until the next, shape (N,). The last one ends the curve.
    """
    steps = zip(itertools.pairwise(times_s), counts, strict=False)
    instance_seconds = sum((end - start) * count for (start, end), count in steps)
    falls = sum(max(0, before - after) for before, after in itertools.pairwise(counts))
    return InterruptionRate(falls, instance_seconds / SECONDS_PER_HOUR)


def pooled_rate(rates: Iterable[InterruptionRate]) -> InterruptionRate:
    """Return the rate of several pools taken for one."""
    rates = tuple(rates)
    return InterruptionRate(
        sum(rate.num_interruptions for rate in rates), sum(rate.instance_hours for rate in rates)
    )


def with_interruptions(offers: Iterable[InstanceOffer]) -> list[InstanceOffer]:
    """Return offers with their own rate, else an assumed one; on-demand ones stay as they are."""
    return [_with_rate(offer) for offer in offers]


@cache
def default_rate(cloud: str, kind: DeviceKind) -> tuple[InterruptionRate, str]:
    """Return the assumed rate of a pool and its source, which says that it is assumed."""
    known = COUNTED.get((cloud, kind))
    pool = f"{kind} instances of {cloud}" if known else "all of them, as none is of this kind"
    return known or pooled_rate(COUNTED.values()), f"assumed, counted in {TRACES}: {pool}"


def _with_rate(offer: InstanceOffer) -> InstanceOffer:
    if offer.market is not Market.SPOT or offer.interruptions_source:
        return offer
    kind = DeviceKind.GPU if offer.instance_type.accelerator_count else DeviceKind.CPU
    rate, source = default_rate(offer.cloud, kind)
    return replace(offer, interruptions_per_hour=rate.per_hour, interruptions_source=source)
