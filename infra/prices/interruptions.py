"""How often spot pools preempt instances, which is assumed: no cloud tells it, and since 2017 prices do not either.

The rates are counted in traces of instances that ran on spot (skypilot-org/spot-traces, preemption/, 2023; from
"Can't Be Late", NSDI 2024): V100 and large CPU instances on AWS, C3 on Google. They were measured in contended
pools: AWS' Spot Instance Advisor shows most types below 5 % a month, which is a thousand times less.
So they err on the side of on-demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from heterps_core.hardware import AWS, DeviceKind, InstanceOffer, Market

TRACES = "skypilot-org/spot-traces, preemption/, 2023"

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
        interruptions_source=f"assumed, counted in {TRACES}: {pool}",
    )
