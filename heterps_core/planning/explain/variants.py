"""The same problem with one thing changed, and the cheapest plan then: what every explanation is made of.

Numbers are held within the limits of a problem file, so that asking "what if" never breaks the contract.
"""

from __future__ import annotations

from dataclasses import replace

from heterps_core.errors import InfeasiblePlanError
from heterps_core.field_rules import LARGEST_NUMBER, within_limits
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import Optimum, find_optimum

SAME_COST = 1e-9
"""Costs that differ by less than this share are equal."""


SECONDS_OF_A_SEARCH = 1.5
"""Processor time after which the best plan so far answers a question: an explanation asks dozens, and where caps bind
each of them may take as long as the plan itself. Over 90 device types a search takes 0.9 s."""


def cheapest_plan(problem: SchedulingProblem) -> Optimum | None:
    """Return the cheapest plan that a short search finds, or None where none keeps the constraints or none was met.

    A plan of a search that its time ended is a plan at its cost; a cheaper one may have been missed.
    """
    try:
        return find_optimum(problem, seconds=SECONDS_OF_A_SEARCH)
    except InfeasiblePlanError:
        return None


def with_price_factor(problem: SchedulingProblem, device_type: str, factor: float) -> SchedulingProblem:
    """Return the problem with all prices of a device type, of every size that is sold, times a factor."""
    unit = problem.device_types[device_type]
    instances = tuple(
        replace(size, price_usd_per_hour=within_limits(size.price_usd_per_hour * factor))
        for size in unit.instances
    )
    unit_prices = [size.price_usd_per_hour / size.units for size in instances]
    price = min(unit_prices, default=unit.price_usd_per_hour * factor)
    changed = replace(unit, price_usd_per_hour=within_limits(price), instances=instances)
    return replace(problem, device_types={**problem.device_types, device_type: changed})


def with_floor(problem: SchedulingProblem, floor_samples_per_s: float) -> SchedulingProblem:
    """Return the problem with another throughput floor; 0 for none."""
    return replace(problem, throughput_floor_samples_per_s=min(floor_samples_per_s, LARGEST_NUMBER))


def with_layer_seconds(
    problem: SchedulingProblem, layer: int, device_type: str, compute_seconds: float
) -> SchedulingProblem:
    """Return the problem with another compute time of one layer on one device type."""
    changed = replace(
        problem.layers[layer],
        compute_seconds={
            **problem.layers[layer].compute_seconds,
            device_type: min(compute_seconds, LARGEST_NUMBER),
        },
    )
    return replace(problem, layers=(*problem.layers[:layer], changed, *problem.layers[layer + 1 :]))
