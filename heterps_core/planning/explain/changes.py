"""What would change the plan: the next price at which another placement is cheapest, another floor, more throughput.

The cost of a fixed plan is linear in the price of one device type, so the least cost of all plans is a concave
chain of lines over that price. Its corners are found by walking from line to line: the line of the plan at
hand is cut with that of a cheaper plan, and the cut is asked again until no plan is cheaper there (Eisner and
Severance 1976). So a flip is exact and the first one, where no search runs out of time (`variants.py`); else a nearer
one may be missed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.placement import Move, device_type_of_layers, moves_between
from heterps_core.planning.explain.variants import (
    SAME_COST,
    SECONDS_OF_A_SEARCH,
    cheapest_plan,
    with_floor,
    with_price_factor,
)
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import highest_throughput
from heterps_core.plans.scheduling_plan import Stage

MOST_FACTOR = 10.0
"""Prices of device types in use are raised less than so many times, those of others lowered."""

_MAX_PLANS = 60
"""Plans asked for one device type before the walk ends without an answer; a few are enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceFlip:
    """Beyond which price of a device type another placement is the cheapest."""

    device_type: str
    is_used: bool
    """In the plan: its price rises. Otherwise it falls."""

    offer: str
    """Size whose price is meant, the cheapest for each unit; empty where the price is that of a unit."""

    price_usd_per_hour: float
    """Today's, of the offer or of one unit."""

    flip_usd_per_hour: float
    stages: tuple[Stage, ...]
    """The cheapest plan just beyond the flip."""

    moves: tuple[Move, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FloorPrice:
    """What the throughput floor costs."""

    floor_samples_per_s: float
    saving_usd: float
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceOfThroughput:
    """The cheapest plan for a higher floor."""

    floor_samples_per_s: float
    extra_usd: float | None
    """Over the cheapest plan; None where no plan reaches the floor."""

    stages: tuple[Stage, ...]
    """Empty where no plan reaches the floor."""

    highest_samples_per_s: float | None
    """Highest throughput of all plans within memory and caps; only known where the floor is out of reach."""


def next_price_flip(problem: SchedulingProblem, stages: Sequence[Stage]) -> PriceFlip | None:
    """Return the flip by the least relative change of one device type's price; None where none is near enough."""
    used = dict.fromkeys(name for stage in stages for name in stage.replicas_by_type)
    waiting, others = list(used), [name for name in problem.device_types if name not in used]
    nearest = MOST_FACTOR
    found = None
    while waiting:
        name = waiting.pop(0)
        offer, price = _quoted_price(problem, name)
        farthest = nearest if name in used else 1 / nearest
        # No factor changes a price of nothing.
        factor, beyond = _first_flip(problem, name, tuple(stages), farthest) if price else (None, ())
        if factor is not None and max(factor, 1 / factor) < nearest:
            nearest = max(factor, 1 / factor)
            found = PriceFlip(
                device_type=name,
                is_used=name in used,
                offer=offer,
                price_usd_per_hour=price,
                flip_usd_per_hour=price * factor,
                stages=beyond,
                moves=moves_between(stages, beyond),
            )
        if not waiting:
            waiting = _that_may_flip(problem, stages, others, 1 / nearest)
            others = [name for name in others if name not in waiting]
    return found


def _that_may_flip(
    problem: SchedulingProblem, stages: Sequence[Stage], others: Sequence[str], factor: float
) -> list[str]:
    """Return some of the types that a plan does not have, empty where none flips at a factor on its price.

    No plan costs more where all these prices fall than where one does. So where none is cheaper then, no price flips
    alone; else those in the cheaper plan are asked one by one.
    """
    changed = problem
    for name in others:
        changed = with_price_factor(changed, name, factor)
    found = cheapest_plan(changed) if others else None
    if found is None or found.cost_usd >= evaluate(problem, stages).cost_usd * (1 - SAME_COST):
        return []
    return [name for name in others if any(name in stage.replicas_by_type for stage in found.stages)]


def price_of_floor(problem: SchedulingProblem, cost_usd: float) -> FloorPrice | None:
    """Return what the floor costs of the cheapest plan's `cost_usd`; None where that is nothing."""
    cheapest = cheapest_plan(with_floor(problem, 0.0))
    if cheapest is None or cheapest.cost_usd >= cost_usd * (1 - SAME_COST):
        return None
    return FloorPrice(
        floor_samples_per_s=problem.throughput_floor_samples_per_s,
        saving_usd=cost_usd - cheapest.cost_usd,
        stages=cheapest.stages,
    )


def price_of_throughput(
    problem: SchedulingProblem, floor_samples_per_s: float, cost_usd: float
) -> PriceOfThroughput:
    """Return what another throughput floor costs more than the cheapest plan's `cost_usd`."""
    found = cheapest_plan(with_floor(problem, floor_samples_per_s))
    if found is None:
        deadline = time.process_time() + SECONDS_OF_A_SEARCH
        highest = highest_throughput(problem, deadline=deadline)
        return out_of_reach(floor_samples_per_s, highest_samples_per_s=highest)
    return PriceOfThroughput(
        floor_samples_per_s=floor_samples_per_s,
        # The same plan may come out with another last digit.
        extra_usd=max(0.0, found.cost_usd - cost_usd),
        stages=found.stages,
        highest_samples_per_s=None,
    )


def out_of_reach(floor_samples_per_s: float, *, highest_samples_per_s: float) -> PriceOfThroughput:
    """Return the answer for a floor that no plan reaches."""
    return PriceOfThroughput(
        floor_samples_per_s=floor_samples_per_s,
        extra_usd=None,
        stages=(),
        highest_samples_per_s=highest_samples_per_s,
    )


def _first_flip(
    problem: SchedulingProblem, device_type: str, stages: tuple[Stage, ...], farthest: float
) -> tuple[float | None, tuple[Stage, ...]]:
    """Return the factor on the price from which on another placement is cheapest, and that plan."""
    placement = device_type_of_layers(stages)
    near, asked = stages, farthest
    far: tuple[Stage, ...] = ()
    for _ in range(_MAX_PLANS):
        changed = with_price_factor(problem, device_type, asked)
        found = cheapest_plan(changed)
        if found is None or found.cost_usd >= evaluate(changed, near).cost_usd * (1 - SAME_COST):
            # No plan is cheaper here: the near plan is the cheapest up to this price.
            if not far:
                return None, ()
            if device_type_of_layers(far) != placement:
                return asked, far
            near, far, asked = far, (), farthest
            continue
        far = found.stages
        cut = _equal_cost_factor(problem, device_type, near, far)
        # Cuts only move towards today's price; one that does not is a tie within rounding.
        if abs(cut - 1) >= abs(asked - 1):
            return asked, far
        asked = cut
    return None, ()


def _equal_cost_factor(
    problem: SchedulingProblem, device_type: str, near: Sequence[Stage], far: Sequence[Stage]
) -> float:
    """Return the factor on the price at which two plans cost the same."""
    doubled = with_price_factor(problem, device_type, 2.0)
    near_usd, far_usd = (evaluate(problem, stages).cost_usd for stages in (near, far))
    near_slope, far_slope = (
        evaluate(doubled, stages).cost_usd - usd for stages, usd in ((near, near_usd), (far, far_usd))
    )
    gained_usd = near_slope - far_slope
    return 1.0 + (far_usd - near_usd) / gained_usd if gained_usd else math.inf


def _quoted_price(problem: SchedulingProblem, device_type: str) -> tuple[str, float]:
    """Return the size with the least price of a unit and its price; without sizes, the price of a unit."""
    unit = problem.device_types[device_type]
    if not unit.instances:
        return "", unit.price_usd_per_hour
    cheapest = min(unit.instances, key=lambda size: size.price_usd_per_hour / size.units)
    return cheapest.name, cheapest.price_usd_per_hour
