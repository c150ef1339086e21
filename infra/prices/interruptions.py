"""Interruptions of spot pools: what was counted in them, and what is assumed where nothing is known.

The bundled rates are counted in traces of instances that ran on spot (skypilot-org/spot-traces, preemption/, 2023;
from "Can't Be Late", NSDI 2024): V100 and large CPU instances on AWS, C3 on Google. They were measured in contended
pools: AWS' Spot Instance Advisor shows most types below 5 % a month, which is a thousand times less.
So they err on the side of on-demand; whoever knows a pool better plans with more spot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import AWS, DeviceKind, InstanceOffer, Market
from heterps_core.json_codec import to_json
from heterps_core.json_file import replace_json
from heterps_core.planning.provisioning.interruption_rate import (
    InterruptionRate,
    interruption_rate,
    pooled_rate,
)

FILE_NAME = "interruptions.json"

TRACES = "skypilot-org/spot-traces, preemption/, 2023"

# Falls in the number of running instances, and hours of all of them together.
COUNTED: Mapping[tuple[str, DeviceKind], InterruptionRate] = {
    (AWS, DeviceKind.CPU): interruption_rate(221, 369.3),
    (AWS, DeviceKind.GPU): interruption_rate(415, 1_971.3),
    ("gcp", DeviceKind.CPU): interruption_rate(3, 180.4),
}
"""By cloud and kind of instance; what is not here is taken from all of them together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedRate:
    """What was counted in a pool; an interruption-free pool has 0."""

    num_interruptions: int
    instance_hours: float
    source: str


NOTHING_COUNTED: Mapping[str, CountedRate] = {}


def with_interruptions(
    offers: Iterable[InstanceOffer], counted: Mapping[str, CountedRate] = NOTHING_COUNTED
) -> list[InstanceOffer]:
    """Return offers with the rate that was counted for their pool, else their own, else an assumed one.

    Args:
        offers: On-demand ones stay as they are.
        counted: Pool -> rate; a pool is cloud/type/zone, cloud/type or cloud/family, and the narrowest one counts.
    """
    return [_with_rate(offer, counted) for offer in offers]


def read_counted(folder: Path) -> dict[str, CountedRate]:
    """Return what `keep_counted` has written into a folder.

    Raises:
        ConfigurationError: The file is damaged.
    """
    path = folder / FILE_NAME
    try:
        return {pool: CountedRate(**values) for pool, values in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        raise ConfigurationError(
            f"the rates of spot pools in {path} cannot be read: {problem}; remove the file to plan with assumed ones"
        ) from problem


def keep_counted(folder: Path, pool: str, rate: InterruptionRate, *, source: str) -> Path:
    """Write down what was counted for a pool, in place of what was known of it; return the file.

    Raises:
        ConfigurationError: The pool has another form than cloud/type or cloud/type/zone, or the file is damaged.
    """
    if not 2 <= len(list(filter(None, pool.split("/")))) == pool.count("/") + 1 <= 3:
        raise ConfigurationError(
            f"a pool must be written as cloud/type/zone, cloud/type or cloud/family, for instance "
            f"aws/g4dn.xlarge/us-east-1a, got {pool!r}"
        )
    kept = read_counted(folder)
    kept[pool] = CountedRate(
        num_interruptions=rate.num_interruptions, instance_hours=rate.instance_hours, source=source
    )
    path = folder / FILE_NAME
    replace_json(path, to_json(dict(sorted(kept.items()))))
    return path


@cache
def default_rate(cloud: str, kind: DeviceKind) -> tuple[InterruptionRate, str]:
    """Return the assumed rate of a pool and its source, which says that it is assumed."""
    known = COUNTED.get((cloud, kind))
    pool = f"{kind} instances of {cloud}" if known else "all of them, as none is of this kind"
    return known or pooled_rate(COUNTED.values()), f"assumed, counted in {TRACES}: {pool}"


def _with_rate(offer: InstanceOffer, counted: Mapping[str, CountedRate]) -> InstanceOffer:
    if offer.market is not Market.SPOT:
        return offer
    names = (f"{offer.instance_type.name}/{offer.zone}", offer.instance_type.name, offer.instance_type.family)
    for pool in (f"{offer.cloud}/{name}" for name in names):
        if pool in counted:
            seen = counted[pool]
            per_hour = seen.num_interruptions / seen.instance_hours
            return replace(offer, interruptions_per_hour=per_hour, interruptions_source=seen.source)
    if offer.interruptions_source:
        return offer
    kind = DeviceKind.GPU if offer.instance_type.accelerator_count else DeviceKind.CPU
    rate, source = default_rate(offer.cloud, kind)
    return replace(offer, interruptions_per_hour=rate.per_hour, interruptions_source=source)
