"""Which instances to buy so that every stage has its units, at the least price.

Units are what a plan counts, instances are what is sold, in sizes of several units: a small covering problem for each
stage, solved exactly. The planner solves the same one inside its objective, so a plan costs what is then bought, and
its lower bound holds for the purchase.

A plan stands in one zone, as what crosses between two is charged by the byte; each is solved. A plan that is all on
spot buys one machine on-demand: it keeps the rendezvous store, and losing that one ends the run. The planner charges
that machine too (`UnitType.on_demand_instances`).

Where the name of a device type is in no table, functions raise UnknownNameError; where no offer carries it,
ProvisioningError, whose message lists those that are carried.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.device_types import DEVICE_TYPES, OWN_DEVICE_TYPES, get_device_type
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import DeviceKind, DeviceType, InstanceOffer, Market
from heterps_core.planning.cost_model.instance_cover import InstanceCover
from heterps_core.planning.cost_model.reserved_machines import allotted
from heterps_core.planning.problem.extra_costs import InstanceSize, Reserved
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage

USUAL_UNITS = 8
"""Assumed units of a stage, for figures that depend on the sizes of instances."""

MAX_DEARER = 0.5
"""An alternative may cost at most half as much again: beyond that another plan is likely cheaper."""

MAX_ALTERNATIVES = 9
"""Ten pools to choose from with the planned one; AWS advises to name that many for spot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _CoverOption:
    """An offer that could serve a stage, with the units that one instance brings."""

    offer: InstanceOffer
    units: int


def unit_prices(offers: Iterable[InstanceOffer]) -> dict[str, float]:
    """Return, per device type that the offers carry, the least price of one unit in USD per hour.

    Where a stage needs fewer units than the instance with the best unit price carries, or a number that no sizes
    add up to, it is charged more: one A100 is sold only in eights. `ProvisioningPlan.rounding_usd_per_hour`
    says by how much.
    """
    carried: defaultdict[str, list[DeviceType]] = defaultdict(list)
    for device_type in (*DEVICE_TYPES.values(), *OWN_DEVICE_TYPES.values()):
        for family in device_type.instance_families:
            carried[family].append(device_type)
    best: dict[str, float] = {}
    for offer in (each for each in offers if not each.is_reserved):
        for hardware in carried[offer.instance_type.family]:
            units = hardware.units_of(offer.instance_type)
            if units > 0:
                name, price = hardware.in_market(offer.market).name, offer.price_usd_per_hour / units
                best[name] = min(price, best.get(name, price))
    return best


def by_family(offers: Iterable[InstanceOffer]) -> defaultdict[str, list[InstanceOffer]]:
    """Return the offers of each instance family, none of an unknown one."""
    found: defaultdict[str, list[InstanceOffer]] = defaultdict(list)
    for offer in offers:
        found[offer.instance_type.family].append(offer)
    return found


def instance_sizes(device_type: str, offers: Iterable[InstanceOffer]) -> tuple[InstanceSize, ...]:
    """Return the sizes in which the units of a device type are sold, as the planner charges them."""
    return _sizes(_options_for(device_type, tuple(offers)))


def on_demand_sizes(device_type: str, offers: Iterable[InstanceOffer]) -> tuple[InstanceSize, ...] | None:
    """Return the sizes in which one machine of a type on spot may be bought on-demand; None for one that is not."""
    steady = _on_demand_options(device_type, tuple(offers))
    return None if steady is None else _sizes(steady)


def _sizes(options: Sequence[_CoverOption]) -> tuple[InstanceSize, ...]:
    return tuple(
        InstanceSize(
            name=option.offer.instance_type.name,
            units=option.units,
            price_usd_per_hour=option.offer.price_usd_per_hour,
        )
        for option in options
    )


def most_units(device_type: str, offers: Iterable[InstanceOffer]) -> float:
    """Return the units of a device type that there are; infinite where offers have no count."""
    counts = [
        (math.inf if option.offer.count is None else option.offer.count, option.units)
        for option in _options_for(device_type, tuple(offers))
    ]
    return sum(count * units for count, units in counts)


def interruptions_per_unit(device_type: str, offers: Iterable[InstanceOffer]) -> float:
    """Return the interruptions per hour that one unit of a device type brings to a plan.

    An instance is lost with all its units, so units in larger instances bring fewer. The planner counts in
    units and needs one figure: that of the instances that are bought for `USUAL_UNITS` of them.
    """
    bought = _cheapest_cover(USUAL_UNITS, _options_for(device_type, tuple(offers)))
    return sum(option.offer.interruptions_per_hour * count for option, count in bought) / USUAL_UNITS


def disk_bytes_per_s(device_type: str, offers: Iterable[InstanceOffer]) -> float:
    """Return a unit's share of what its instance moves to network disks, the least over sizes; 0 where unknown."""
    options = _options_for(device_type, tuple(offers))
    return min(option.offer.instance_type.disk_bandwidth_bytes_per_s / option.units for option in options)


def zones_of(offers: Iterable[InstanceOffer]) -> tuple[str | None, ...]:
    """Return the zones in which a plan could stand; (None,) where no price is of one zone alone."""
    return tuple(sorted({offer.zone for offer in offers if offer.zone is not None})) or (None,)


def offers_in_zone(offers: Iterable[InstanceOffer], zone: str | None) -> tuple[InstanceOffer, ...]:
    """Return what is sold in a zone: the offers of the zone, and those of all zones, bound to it."""
    return tuple(replace(offer, zone=zone) for offer in offers if offer.zone in (None, zone))


def offers_that_hold_workers(
    device_types: Iterable[str], offers: Iterable[InstanceOffer], *, host_bytes_of_worker: float
) -> tuple[InstanceOffer, ...]:
    """Return the offers without the hosts of cards that have too little memory for a worker of each card.

    Raises:
        UnknownNameError: A device type is in no table.
        ProvisioningError: No host of a card has enough; names what the largest has for each card.
    """
    offers = tuple(offers)
    too_small: set[InstanceOffer] = set()
    for name in device_types:
        hardware = get_device_type(name)
        if hardware.kind is DeviceKind.CPU:
            continue
        shares = {
            offer: offer.instance_type.memory_bytes / units
            for offer in offers
            if (units := hardware.equal_units_of(offer.instance_type)) > 0
        }
        small = {offer for offer, share in shares.items() if share < host_bytes_of_worker}
        if shares and len(small) == len(shares):
            raise ProvisioningError(
                f"a host of {name} must have {host_bytes_of_worker:.6g} bytes of memory for each card's worker, but "
                f"the largest offer has {max(shares.values()):.6g}; plan for fewer training rows or leave {name} out"
            )
        too_small |= small
    return tuple(offer for offer in offers if offer not in too_small)


def choose_instances(stages: Sequence[Stage], offers: Iterable[InstanceOffer]) -> ProvisioningPlan:
    """Return the cheapest instances that give each stage one unit per replica, all in one zone.

    Exact over zones and sizes. Sizes may be mixed within a stage; their units are taken as equally fast.
    Stages do not share instances, even where they could: each has its own machines, so that one can be
    replaced alone. Each group has what else may be bought for it. Raises as `instances_by_zone`.
    """
    return instances_by_zone(stages, offers)[0]


def instances_by_zone(
    stages: Sequence[Stage], offers: Iterable[InstanceOffer]
) -> tuple[ProvisioningPlan, ...]:
    """Return the cheapest instances of each zone that has all that is needed, the cheapest zone first.

    Raises:
        UnknownNameError: A stage names a device type that is in no table.
        ProvisioningError: No zone's offers carry all device types; the message lists those that are carried.
    """
    offers = tuple(offers)
    plans, refusals = [], []
    for zone in zones_of(offers):
        try:
            plans.append(_choose_in_zone(stages, offers_in_zone(offers, zone)))
        except ProvisioningError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return tuple(sorted(plans, key=lambda plan: plan.price_usd_per_hour))


def _equal_offers(
    offer: InstanceOffer, offers: Iterable[InstanceOffer], *, device_type: str, units: int
) -> tuple[InstanceOffer, ...]:
    """Return the offers that may stand in for another one that is not available, the cheapest first.

    The same number of units with the same processor or card, sold in the same place and market, with no less memory
    and no less network, at no more than `1 + MAX_DEARER` times the price: the plan stays as it is.
    """
    hardware = get_device_type(device_type)
    planned = offer.instance_type
    equal = [
        other
        for other in offers
        if other.instance_type.name != planned.name
        and not other.is_reserved
        and (other.cloud, other.region, other.zone, other.market)
        == (offer.cloud, offer.region, offer.zone, offer.market)
        and hardware.equal_units_of(other.instance_type) == units
        and other.instance_type.memory_bytes >= planned.memory_bytes
        and other.instance_type.network_bandwidth_bytes_per_s >= planned.network_bandwidth_bytes_per_s
        and other.price_usd_per_hour <= offer.price_usd_per_hour * (1 + MAX_DEARER)
    ]
    equal.sort(key=lambda other: (other.price_usd_per_hour, other.instance_type.name))
    return tuple(equal[:MAX_ALTERNATIVES])


def _choose_in_zone(stages: Sequence[Stage], offers: Sequence[InstanceOffer]) -> ProvisioningPlan:
    prices = unit_prices(offers)
    # A stage of two device types has two parts, which are bought like stages.
    parts = [(index, part) for index, stage in enumerate(stages) for part in stage.parts]
    covers = _with_reserved([_StageCover.of(part, offers) for _, part in parts], offers)
    added = [cover.on_demand_usd_per_hour for cover in covers]
    steady = added.index(min(added))
    if math.isinf(added[steady]):
        names = ", ".join(
            sorted({each.offer.instance_type.name for cover in covers for each in cover.options})
        )
        raise ProvisioningError(
            f"one machine must be on-demand, as losing the rendezvous store ends a run, but nothing with the "
            f"hardware of {names} has an on-demand price; use prices of both markets"
        )
    groups = tuple(
        InstanceGroup(
            stage=parts[index][0],
            device_type=cover.stage.device_type,
            offer=option.offer,
            count=count,
            units_per_instance=option.units,
            alternatives=_equal_offers(
                option.offer, offers, device_type=cover.stage.device_type, units=option.units
            ),
        )
        for index, cover in enumerate(covers)
        for option, count in cover.bought(must_be_steady=index == steady)
    )
    return ProvisioningPlan(
        replicas=tuple(stage.num_replicas for stage in stages),
        second_replicas=tuple(stage.second_replicas for stage in stages),
        groups=groups,
        planned_price_usd_per_hour=sum(part.num_replicas * prices[part.device_type] for _, part in parts),
        rendezvous_usd_per_hour=added[steady],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageCover:
    """What may be bought for a stage, and its price."""

    stage: Stage
    options: Sequence[_CoverOption]
    on_demand: Sequence[_CoverOption] | None
    """In which one of its machines may be bought; None where all are on-demand."""

    cover: InstanceCover
    reserved: tuple[_CoverOption, int] | None = None
    """Reserved instances, and how many of them are this stage's; None where there are none for its type."""

    @classmethod
    def of(cls, stage: Stage, offers: Sequence[InstanceOffer]) -> _StageCover:
        options = _options_for(stage.device_type, offers)
        on_demand = _on_demand_options(stage.device_type, offers)
        cover = _cover(options, stage.num_replicas, on_demand or ())
        return cls(stage=stage, options=options, on_demand=on_demand, cover=cover)

    def price_usd_per_hour(self, carried: int) -> float:
        """Return the price of what is bought where so many units have machines."""
        left = max(0, self.stage.num_replicas - carried)
        return self.cover.price_usd_per_hour(left) if left else 0.0

    @property
    def on_demand_usd_per_hour(self) -> float:
        """What it adds that one machine is on-demand; infinite where none is sold so."""
        if self.on_demand is None or self.reserved is not None:
            return 0.0
        num_units = self.stage.num_replicas
        return self.cover.steady_usd_per_hour(num_units) - self.cover.price_usd_per_hour(num_units)

    def bought(self, *, must_be_steady: bool) -> list[tuple[_CoverOption, int]]:
        """Return what is bought, that on-demand first, or what is reserved."""
        num_units = self.stage.num_replicas
        if self.reserved is not None:
            option, share = self.reserved
            used = min(share, math.ceil(num_units / option.units))
            left = num_units - used * option.units
            taken = [(option, used)] if used else []
            if left <= 0:
                return taken
            rest = replace(self, stage=replace(self.stage, num_replicas=left), reserved=None)
            return [*taken, *rest.bought(must_be_steady=False)]
        size = self.cover.steady_size(num_units)
        if size is None or self.on_demand is None or (self.on_demand_usd_per_hour > 0 and not must_be_steady):
            return _cheapest_cover(num_units, self.options)
        steady = self.on_demand[size]
        left = num_units - steady.units
        return [(steady, 1), *(_cheapest_cover(left, self.options) if left > 0 else ())]


def _with_reserved(covers: list[_StageCover], offers: Sequence[InstanceOffer]) -> list[_StageCover]:
    """Return the covers with reserved instances, which stages share where that saves most."""
    options = [_reserved_option(each.stage.device_type, offers) for each in covers]
    for option in dict.fromkeys(filter(None, options)):
        members = [index for index, each in enumerate(options) if each == option]
        prices = [
            np.array(
                [
                    [covers[index].price_usd_per_hour(machines * option.units)]
                    for machines in range((option.offer.count or 0) + 1)
                ]
            )
            for index in members
        ]
        for index, share in zip(members, allotted(prices)[:, 0].tolist(), strict=True):
            covers[index] = replace(covers[index], reserved=(option, share))
    return covers


def _cheapest_cover(num_units: int, options: Sequence[_CoverOption]) -> list[tuple[_CoverOption, int]]:
    """Return counts of options that together carry at least `num_units`, at the least price, the largest first.

    Raises:
        ConfigurationError: No units or no options.
    """
    counts = [
        (options[index], count) for index, count in _cover(options, num_units).counts(num_units).items()
    ]
    return sorted(counts, key=lambda pair: (-pair[0].units, pair[0].offer.instance_type.name))


def _cover(
    options: Sequence[_CoverOption], num_units: int, on_demand: Sequence[_CoverOption] = ()
) -> InstanceCover:
    return InstanceCover.of(_sizes(options), most_units=num_units, on_demand=_sizes(on_demand))


def _on_demand_options(name: str, offers: Sequence[InstanceOffer]) -> list[_CoverOption] | None:
    """Return the offers on-demand with the hardware of a type on spot; None for a type that is on-demand."""
    device_type = get_device_type(name)
    if device_type.market is not Market.SPOT:
        return None
    return _carriers(device_type.in_market(Market.ON_DEMAND), offers)


def _carriers(device_type: DeviceType, offers: Sequence[InstanceOffer]) -> list[_CoverOption]:
    return [
        _CoverOption(offer=offer, units=units)
        for offer in offers
        if not offer.is_reserved and (units := device_type.units_in(offer)) > 0
    ]


def _reserved_option(name: str, offers: Iterable[InstanceOffer]) -> _CoverOption | None:
    """Return the reserved instances that serve a device type, whatever its market; of several the most units."""
    device_type = get_device_type(name).in_market(Market.ON_DEMAND)
    options = [
        _CoverOption(offer=offer, units=device_type.units_in(offer)) for offer in offers if offer.is_reserved
    ]
    carrying = (option for option in options if option.units > 0)
    return max(carrying, key=lambda option: option.units * (option.offer.count or 0), default=None)


def reserved_of(device_type: str, offers: Iterable[InstanceOffer]) -> Reserved | None:
    """Return the reserved instances that plans take for a device type before they buy others."""
    option = _reserved_option(device_type, offers)
    if option is None:
        return None
    return Reserved(name=option.offer.instance_type.name, units=option.units, count=option.offer.count or 0)


def _options_for(name: str, offers: Sequence[InstanceOffer]) -> list[_CoverOption]:
    device_type = get_device_type(name)
    options = _carriers(device_type, offers)
    if not options:
        raise ProvisioningError(
            f"no offer carries device type {name} (families {', '.join(device_type.instance_families)}); "
            f"the {len(offers)} offers carry: {', '.join(sorted(unit_prices(offers))) or 'no known device type'}; "
            f"plan with those, or choose another region, market or price snapshot"
        )
    return options
