"""Whether one place can be left out of a search, as another one offers the same for no more.

Claim: where `costs_no_less(problem, other)`, each plan of the problem is a plan of the other one, and costs no less.
Proof: but for prices, interruptions, extra costs and the floor both are equal, so a plan takes the same time, needs
the same memory and is within the same caps; the other floor is no higher. Units and their disks are sold in the same
sizes for no more, so the cheapest ones for any number of units, with one machine on-demand or without, cost no more.
The cost (x h + x0) (R + r0) + fixed of `cost_model/objective.py` does not fall with the price R of the
instances, with the interruptions in h, or with any of the extra costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace

from heterps_core.planning.problem.extra_costs import NO_EXTRA_COSTS, InstanceSize
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, UnitType


def costs_no_less(problem: SchedulingProblem, other: SchedulingProblem) -> bool:
    """Tell whether no plan of a problem costs less than the same plan of another problem."""
    if not problem.device_types.keys() <= other.device_types.keys():
        return False
    other = other.of_types(problem.device_types)
    return _without_charges(problem) == _without_charges(other) and all(
        own >= least for own, least in zip(_charges(problem), _charges(other), strict=True)
    )


def _without_charges(problem: SchedulingProblem) -> SchedulingProblem:
    units = {name: _free(unit) for name, unit in problem.device_types.items()}
    return replace(
        problem, device_types=units, extra_costs=NO_EXTRA_COSTS, throughput_floor_samples_per_s=0.0
    )


def _free(unit: UnitType) -> UnitType:
    def free(sizes: tuple[InstanceSize, ...]) -> tuple[InstanceSize, ...]:
        return tuple(replace(size, price_usd_per_hour=0.0) for size in sizes)

    return replace(
        unit,
        price_usd_per_hour=0.0,
        instances=free(unit.instances),
        on_demand_instances=unit.on_demand_instances and free(unit.on_demand_instances),
        interruptions_per_hour=0.0,
        disk_usd_per_hour=0.0,
        disk_usd_per_gb_hour=0.0,
    )


def _charges(problem: SchedulingProblem) -> Iterator[float]:
    """Yield the floor and all that a cost rises with, in the order of the device types' names."""
    yield problem.throughput_floor_samples_per_s
    yield from astuple(problem.extra_costs)
    for _, unit in sorted(problem.device_types.items()):
        yield from (unit.price_usd_per_hour, unit.interruptions_per_hour)
        yield from (unit.disk_usd_per_hour, unit.disk_usd_per_gb_hour)
        yield from (size.price_usd_per_hour for size in (*unit.instances, *(unit.on_demand_instances or ())))
