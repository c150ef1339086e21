"""What the plan costs where the profiled times are off by their spread, and whether another one would win then.

Times of one device type are taken to be off together, since a wrong figure of a device or a busy machine moves
all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.placement import Move, layer_runs, moves_between
from heterps_core.planning.explain.variants import cheapest_plan, with_compute_factors
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.plans.scheduling_plan import Stage

LEAST_FACTOR = 0.1
"""On a time at the low end of a spread that is wider than the time itself."""

_SAME_COST = 1e-6
"""Costs that differ by less than this share are equal: no reason to place anything elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRange:
    """Cost of the plan as it is, replica counts included, over the spread of all times at once."""

    low_usd: float
    high_usd: float
    misses_floor: bool
    """At the slow end the plan is slower than the throughput floor."""

    lowest_throughput_samples_per_s: float
    """At the slow end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """The times of some device types at one end of their spread, where another placement would win."""

    slow_types: tuple[str, ...]
    fast_types: tuple[str, ...]
    stages: tuple[Stage, ...]
    """The cheapest plan then."""

    moves: tuple[Move, ...]
    """What it places elsewhere."""

    regret_usd: float | None
    """What the placement at hand costs more then, with the replica counts that are best then; None where it
    breaks a constraint. Measuring these times before the run is worth this much at most."""


def find_cost_range(problem: SchedulingProblem, stages: Sequence[Stage]) -> CostRange | None:
    """Return the least and most the plan costs within the spread; None where no time has one."""
    if not types_with_spread(problem):
        return None
    types = set(problem.device_types)
    fast = evaluate(_shifted(problem, fast_types=types), stages)
    slow = evaluate(_shifted(problem, slow_types=types), stages)
    return CostRange(
        low_usd=fast.cost_usd,
        high_usd=slow.cost_usd,
        misses_floor=any(violation.constraint == "throughput floor" for violation in slow.violations),
        lowest_throughput_samples_per_s=slow.throughput_samples_per_s,
    )


def find_doubts(problem: SchedulingProblem, stages: Sequence[Stage]) -> tuple[Doubt, ...]:
    """Return where within the spread another placement than the plan's is cheapest, the worst first.

    Asked are: all types slow, all fast, those of the plan slow and the others fast, and each type alone at
    either end. One search for each.
    """
    uncertain = types_with_spread(problem)
    used = {stage.device_type for stage in stages}
    cases = dict.fromkeys(
        (frozenset(slow), frozenset(fast))
        for slow, fast in (
            (uncertain, ()),
            ((), uncertain),
            (uncertain & used, uncertain - used),
            *(((name,), ()) for name in sorted(uncertain)),
            *(((), (name,)) for name in sorted(uncertain)),
        )
        if slow or fast
    )
    doubts = [
        doubt
        for slow, fast in cases
        if (doubt := _doubt(problem, stages, slow_types=slow, fast_types=fast)) is not None
    ]
    return tuple(sorted(doubts, key=lambda doubt: (doubt.regret_usd is not None, -(doubt.regret_usd or 0))))


def types_with_spread(problem: SchedulingProblem) -> frozenset[str]:
    """Return the device types with at least one time that may be off."""
    return frozenset(
        name
        for layer in problem.layers
        for name, spread in layer.compute_relative_spread.items()
        if spread > 0
    )


def _doubt(
    problem: SchedulingProblem,
    stages: Sequence[Stage],
    *,
    slow_types: frozenset[str],
    fast_types: frozenset[str],
) -> Doubt | None:
    shifted = _shifted(problem, slow_types=slow_types, fast_types=fast_types)
    cheapest = cheapest_plan(shifted)
    if cheapest is None:
        return None
    moves = moves_between(stages, cheapest.stages)
    kept_usd = cost_of_placement(shifted, stages)
    if not moves or (kept_usd is not None and kept_usd <= cheapest.cost_usd * (1 + _SAME_COST)):
        return None
    return Doubt(
        slow_types=tuple(sorted(slow_types)),
        fast_types=tuple(sorted(fast_types)),
        stages=cheapest.stages,
        moves=moves,
        regret_usd=None if kept_usd is None else kept_usd - cheapest.cost_usd,
    )


def cost_of_placement(problem: SchedulingProblem, stages: Sequence[Stage]) -> float | None:
    """Return what a placement costs with its best replica counts; None where it breaks a constraint."""
    try:
        return evaluate(problem, balance_replicas(problem, layer_runs(stages))).cost_usd
    except InfeasiblePlanError:
        return None


def _shifted(
    problem: SchedulingProblem,
    *,
    slow_types: Collection[str] = (),
    fast_types: Collection[str] = (),
) -> SchedulingProblem:
    """Return the problem with times at an end of their spread: times (1 + spread) or (1 - spread)."""

    def factor_of(layer: LayerCosts, device_type: str) -> float:
        spread = layer.compute_relative_spread.get(device_type, 0.0)
        if device_type in slow_types:
            return 1 + spread
        return max(LEAST_FACTOR, 1 - spread) if device_type in fast_types else 1.0

    return with_compute_factors(problem, factor_of)
