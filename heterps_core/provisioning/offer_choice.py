"""Which instances to buy so that every stage has its units, at the least price.

Units are what a plan counts, instances are what is sold, in sizes of several units. Per stage this is a
small covering problem, solved exactly. Unit prices for the planner come from here too, so that plan and
purchase count with the same offers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.hardware import DEVICE_TYPES, InstanceOffer, get_device_type
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage

NANO_USD_PER_USD = 1_000_000_000
"""Prices are added up as integers, so that equal sums compare equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPrice:
    """The cheapest way to have one unit of a device type."""

    device_type: str
    usd_per_hour: float
    """Price of the instance over the units that it carries."""

    offer: InstanceOffer


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverOption:
    """An offer that could serve a stage, with the units that one instance brings."""

    offer: InstanceOffer
    units: int


def unit_prices(offers: Iterable[InstanceOffer]) -> dict[str, UnitPrice]:
    """Return, per device type that the offers carry, the least price of one unit.

    The planner counts with these. Where a stage needs fewer units than the instance with the best unit
    price carries, or a number that no sizes add up to, the bill is dearer than the plan: one A100 is
    sold only in eights. `ProvisioningPlan.rounding_usd_per_hour` says by how much.
    """
    best: dict[str, UnitPrice] = {}
    for offer in offers:
        for device_type in DEVICE_TYPES.values():
            units = device_type.units_of(offer.instance_type)
            if units == 0:
                continue
            price = offer.price_usd_per_hour / units
            known = best.get(device_type.name)
            if known is None or price < known.usd_per_hour:
                best[device_type.name] = UnitPrice(
                    device_type=device_type.name, usd_per_hour=price, offer=offer
                )
    return best


def choose_instances(stages: Sequence[Stage], offers: Iterable[InstanceOffer]) -> ProvisioningPlan:
    """Return the cheapest instances that give each stage one unit per replica.

    Sizes may be mixed within a stage; their units are taken as equally fast. Stages do not share
    instances, even where they could: each has its own machines, so that one can be replaced alone.

    Args:
        stages: Of a scheduling plan, or of its rehearsal.
        offers: What may be bought.

    Raises:
        UnknownNameError: A stage names a device type that is in no table.
        ProvisioningError: No offer carries a device type; the message lists those that are carried.
    """
    offers = tuple(offers)
    prices = unit_prices(offers)
    groups: list[InstanceGroup] = []
    planned_usd_per_hour = 0.0
    for index, stage in enumerate(stages):
        options = _options_for(stage.device_type, offers, carried=prices)
        planned_usd_per_hour += stage.num_replicas * prices[stage.device_type].usd_per_hour
        for option, count in cheapest_cover(stage.num_replicas, options):
            groups.append(
                InstanceGroup(
                    stage=index,
                    device_type=stage.device_type,
                    offer=option.offer,
                    count=count,
                    units_per_instance=option.units,
                )
            )
    return ProvisioningPlan(
        replicas=tuple(stage.num_replicas for stage in stages),
        groups=tuple(groups),
        planned_price_usd_per_hour=planned_usd_per_hour,
    )


def cheapest_cover(num_units: int, options: Sequence[CoverOption]) -> list[tuple[CoverOption, int]]:
    r"""Return counts of options that together carry at least `num_units`, at the least price.

    With price p_i and units u_i of option i, the least price f of covering n units is
    f(0) = 0, f(n) = min_i (p_i + f(max(0, n - u_i))). Among equal prices the fewest instances win,
    since each one is one more thing that can fail, then the first in the order given.

    Args:
        num_units: At least 1.
        options: At least one, each with at least 1 unit.

    Returns:
        The options used, with their counts, the largest first.
    """
    if num_units < 1 or not options:
        raise ConfigurationError(
            f"a cover needs at least 1 unit and 1 option, got {num_units} and {len(options)}"
        )
    # best[n] is (price in nano-USD, instances, option taken last)
    best: list[tuple[int, int, int]] = [(0, 0, -1)]
    prices = [round(option.offer.price_usd_per_hour * NANO_USD_PER_USD) for option in options]
    for needed in range(1, num_units + 1):
        candidates = []
        for index, option in enumerate(options):
            price, instances, _ = best[max(0, needed - option.units)]
            candidates.append((price + prices[index], instances + 1, index))
        best.append(min(candidates))
    taken: Counter[int] = Counter()
    left = num_units
    while left > 0:
        index = best[left][2]
        taken[index] += 1
        left = max(0, left - options[index].units)
    counts = [(options[index], count) for index, count in taken.items()]
    return sorted(counts, key=lambda pair: (-pair[0].units, pair[0].offer.instance_type.name))


def _options_for(name: str, offers: Sequence[InstanceOffer], *, carried: Iterable[str]) -> list[CoverOption]:
    device_type = get_device_type(name)
    options = [
        CoverOption(offer=offer, units=units)
        for offer in offers
        if (units := device_type.units_of(offer.instance_type)) > 0
    ]
    if not options:
        raise ProvisioningError(
            f"no offer carries device type {name} (families {', '.join(device_type.instance_families)}); "
            f"the {len(offers)} offers carry: {', '.join(sorted(carried)) or 'no known device type'}; "
            f"plan with those, or choose another region, market or price snapshot"
        )
    return options
