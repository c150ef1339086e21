"""What else may be bought for a group of instances where the planned type cannot be had: override lists.

An alternative does the same work at the same speed, so that the plan, its stages and its batches stay as they
are. Only its price differs, and what is really had is what the bill is frozen at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from heterps_core.device_types import get_device_type
from heterps_core.hardware import InstanceOffer
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan

MAX_DEARER = 0.5
"""An alternative may cost at most half as much again: beyond that another plan is likely cheaper."""

MAX_ALTERNATIVES = 9
"""Ten pools to choose from with the planned one; AWS advises to name that many for spot."""


def equal_offers(
    offer: InstanceOffer,
    offers: Iterable[InstanceOffer],
    *,
    device_type: str,
    units: int,
) -> tuple[InstanceOffer, ...]:
    """Return the offers that do the work of another one, the cheapest first.

    The same number of units with the same processor or card, sold in the same place and market, with no less memory
    and no less network, at no more than `1 + MAX_DEARER` times the price.

    Raises:
        UnknownNameError: The device type is in no table.
    """
    hardware = get_device_type(device_type)
    planned = offer.instance_type
    equal = [
        other
        for other in offers
        if other.instance_type.name != planned.name
        and (other.cloud, other.region, other.zone, other.market)
        == (offer.cloud, offer.region, offer.zone, offer.market)
        and hardware.equal_units_of(other.instance_type) == units
        and other.instance_type.memory_bytes >= planned.memory_bytes
        and other.instance_type.network_bandwidth_bytes_per_s >= planned.network_bandwidth_bytes_per_s
        and other.price_usd_per_hour <= offer.price_usd_per_hour * (1 + MAX_DEARER)
    ]
    equal.sort(key=lambda other: (other.price_usd_per_hour, other.instance_type.name))
    return tuple(equal[:MAX_ALTERNATIVES])


def with_alternatives(group: InstanceGroup, offers: Iterable[InstanceOffer]) -> InstanceGroup:
    """Return a group with all that may stand in for its offer."""
    equal = equal_offers(group.offer, offers, device_type=group.device_type, units=group.units_per_instance)
    return replace(group, alternatives=equal)


def within_price(plan: ProvisioningPlan, max_usd_per_hour: float | None) -> ProvisioningPlan:
    """Return a plan without the alternatives that could bring it above a price, the most expensive left out first.

    What is left holds even where every group is had as its most expensive alternative.
    """
    if max_usd_per_hour is None:
        return plan
    groups = list(plan.groups)
    while sum(group.highest_price_usd_per_hour for group in groups) > max_usd_per_hour:
        worst = max(range(len(groups)), key=lambda index: groups[index].possible_increase_usd_per_hour)
        if not groups[worst].alternatives:
            break
        groups[worst] = replace(groups[worst], alternatives=groups[worst].alternatives[:-1])
    return replace(plan, groups=tuple(groups))
