"""What more throughput costs: the cheapest plan for each floor, up to the highest throughput there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.stage_table import segment_table
from heterps_core.planning.explain.placement import device_type_of_layers
from heterps_core.planning.explain.variants import SAME_COST, cheapest_plan, with_floor
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import highest_throughput, stage_time_range
from heterps_core.plans.scheduling_plan import Stage

NUM_FLOORS = 24

MOST_COST_FACTOR = 3.0
"""Of the cheapest plan's cost. Near the highest throughput all units of all types are in use, at tens of times the
cost, and one search over caps takes up to 7 s there (32 layers x 4 types, 2 cores, 2026-11-21)."""

MORE_THROUGHPUT = 1.1
"""The step whose price is told: ten percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPoint:
    """A plan that no other one beats in both cost and throughput, as far as the sweep goes."""

    throughput_samples_per_s: float
    cost_usd: float
    is_proven: bool
    """Whether no plan with this throughput is cheaper; False where the search over caps gave up."""

    stages: tuple[Stage, ...]
    usd_per_hour_of_types: dict[str, float]
    """Device type -> price of its units in the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceOfThroughput:
    """The cheapest plan for a higher floor."""

    floor_samples_per_s: float
    extra_usd: float | None
    """Over the cheapest plan; None where no plan reaches the floor."""

    stages: tuple[Stage, ...]
    """Empty where no plan reaches the floor."""

    highest_samples_per_s: float | None
    """Of all plans within memory and caps; only known where the floor is out of reach."""


def price_of_throughput(
    problem: SchedulingProblem, floor_samples_per_s: float, cost_usd: float
) -> PriceOfThroughput:
    """Return what another throughput floor costs more than the cheapest plan's `cost_usd`."""
    found = cheapest_plan(with_floor(problem, floor_samples_per_s))
    if found is None:
        return PriceOfThroughput(
            floor_samples_per_s=floor_samples_per_s,
            extra_usd=None,
            stages=(),
            highest_samples_per_s=highest_throughput(problem),
        )
    return PriceOfThroughput(
        floor_samples_per_s=floor_samples_per_s,
        # The same plan may come out with another last digit.
        extra_usd=max(0.0, found.cost_usd - cost_usd),
        stages=found.stages,
        highest_samples_per_s=None,
    )


def sweep_front(problem: SchedulingProblem, stages: Sequence[Stage]) -> tuple[FrontPoint, ...]:
    """Return the cheapest plan for each of a row of floors, from the cheapest plan of all upwards.

    The problem's own floor is left out, so the front also shows what it costs. Floors lie at equal ratios, up to a
    throughput that no plan exceeds; between two of them there may be more plans. The sweep ends with the first plan
    that costs `MOST_COST_FACTOR` times the cheapest, or before the first floor that no plan reaches.

    Args:
        problem: What is planned.
        stages: The cheapest plan above the problem's own floor, which becomes a point too.
    """
    slowest = _cheapest_point(problem, 0.0)
    if slowest is None:
        return ()
    shortest_seconds, _ = stage_time_range(problem, segment_table(problem))
    highest = problem.batch_size / shortest_seconds
    points = _sweep(problem, slowest, highest)
    fastest = points[-1].throughput_samples_per_s
    if fastest < math.sqrt(slowest.throughput_samples_per_s * highest):
        # The bound lay far above what plans reach, and half of the floors beyond: the same number, closer together.
        points += _sweep(problem, slowest, fastest)
    return _undominated([_point(problem, stages, is_proven=True), *points])


def _sweep(problem: SchedulingProblem, slowest: FrontPoint, highest_samples_per_s: float) -> list[FrontPoint]:
    points = [slowest]
    lowest = slowest.throughput_samples_per_s
    for floor in np.geomspace(lowest, max(highest_samples_per_s, lowest), NUM_FLOORS)[1:].tolist():
        # The last plan may reach this floor too; it is the cheapest one then as well.
        if points[-1].throughput_samples_per_s >= floor:
            continue
        point = _cheapest_point(problem, floor)
        if point is None:
            break
        points.append(point)
        if point.cost_usd > MOST_COST_FACTOR * slowest.cost_usd:
            break
    return points


def placement_changes(front: Sequence[FrontPoint], stages: Sequence[Stage]) -> tuple[FrontPoint, ...]:
    """Return the points at which the placement is another one than before, the ends and the given plan."""
    changes = [
        point
        for index, point in enumerate(front)
        if index in (0, len(front) - 1)
        or point.stages == tuple(stages)
        or device_type_of_layers(point.stages) != device_type_of_layers(front[index - 1].stages)
    ]
    return tuple(changes)


def _cheapest_point(problem: SchedulingProblem, floor_samples_per_s: float) -> FrontPoint | None:
    found = cheapest_plan(with_floor(problem, floor_samples_per_s))
    if found is None:
        return None
    return _point(problem, found.stages, is_proven=found.cost_lower_bound_usd >= found.cost_usd)


def _point(problem: SchedulingProblem, stages: Sequence[Stage], *, is_proven: bool) -> FrontPoint:
    evaluation = evaluate(problem, stages)
    prices: dict[str, float] = {}
    for part in evaluation.stages:
        name = part.stage.device_type
        prices[name] = prices.get(name, 0.0) + part.price_usd_per_hour
    return FrontPoint(
        throughput_samples_per_s=evaluation.throughput_samples_per_s,
        cost_usd=evaluation.cost_usd,
        is_proven=is_proven,
        stages=tuple(stages),
        usd_per_hour_of_types=prices,
    )


def _undominated(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Return the points that no other one beats or equals in both cost and throughput, by throughput."""
    kept: list[FrontPoint] = []
    for point in sorted(points, key=lambda point: (-point.throughput_samples_per_s, point.cost_usd)):
        if not kept or point.cost_usd < kept[-1].cost_usd * (1 - SAME_COST):
            kept.append(point)
    return tuple(reversed(kept))
