r"""What the plan costs where the profiled times are off by their spread, and what knowing them better is worth.

Times of one device type are taken to be off together, since a wrong figure of a device or a busy machine moves
all of them. The true times are the estimated ones times a factor that is taken to be anything within the spread
alike. For each factor the regret is what the placement at hand costs more than the one that is cheapest then.
Measuring saves the regret, so it is worth its mean: the expected value of perfect information (Raiffa and Schlaifer,
Applied Statistical Decision Theory, 1961), with all other device types as they are estimated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.placement import Move, moves_between
from heterps_core.planning.explain.variants import SAME_COST, cheapest_plan, within_limits
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import LayerRun, balance_replicas
from heterps_core.plans.scheduling_plan import Stage

LEAST_FACTOR = 0.1
"""On a time at the low end of a spread that is wider than the time itself."""

_NO_DOUBT = 1e-6
"""Costs that differ by less than this share are equal: no reason to place anything elsewhere."""

POSITIONS = {-1.0: 0.125, -0.5: 0.25, 0.0: 0.25, 0.5: 0.25, 1.0: 0.125}
"""Where the factor stands within the spread -> weight by the trapezoid rule."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementWorth:
    """What knowing the times of a device type would save in one run."""

    device_type: str
    largest_spread: float
    """Of its layers' times; 0 where all are known."""

    expected_usd: float
    """Mean saving."""

    most_usd: float
    """At the factor where it is largest."""

    may_break: bool
    """Within the spread the placement at hand breaks a constraint, and another one would not."""

    @property
    def can_change_choice(self) -> bool:
        """Somewhere within the spread another placement is better."""
        return self.may_break or self.most_usd > 0


def find_cost_range(problem: SchedulingProblem, stages: Sequence[Stage]) -> CostRange | None:
    """Return the least and most the plan costs within the spread; None where no time has one."""
    types = _types_with_spread(problem)
    if not types:
        return None
    fast = evaluate(_shifted(problem, dict.fromkeys(types, -1.0)), stages)
    slow = evaluate(_shifted(problem, dict.fromkeys(types, 1.0)), stages)
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
    uncertain = _types_with_spread(problem)
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
    doubts = [doubt for slow, fast in cases if (doubt := _doubt(problem, stages, slow, fast)) is not None]
    return tuple(sorted(doubts, key=lambda doubt: (doubt.regret_usd is not None, -(doubt.regret_usd or 0))))


def worth_of_measuring(
    problem: SchedulingProblem, stages: Sequence[Stage], device_type: str, *, names: Collection[str]
) -> MeasurementWorth:
    r"""Return what knowing the times of one device type is worth in one run.

    The cost of a plan is close to linear in the factor f, and the placement at hand is cheapest at f = 1, so its
    regret grows towards the ends: where it is 0 at both it is 0 between them, and the trapezoid rule over
    :math:`f = 1 + u s` with :math:`u \in \{-1, -1/2, 0, 1/2, 1\}` errs on the high side. One search for each u but 0.

    Args:
        problem: With the spread s of each time.
        stages: The placement at hand, cheapest at the estimated times.
        device_type: What is asked about.
        names: Its names in the problem; hardware that is bought in two markets has two.
    """
    spreads = [layer.compute_relative_spread.get(name, 0.0) for layer in problem.layers for name in names]
    regrets: dict[float, float] = {}
    may_break = False
    for position in POSITIONS if any(spreads) else ():
        regret_usd = _regret_usd(problem, stages, names=names, position=position) if position else 0.0
        may_break = may_break or regret_usd is None
        regrets[position] = regret_usd or 0.0
    return MeasurementWorth(
        device_type=device_type,
        largest_spread=max(spreads, default=0.0),
        expected_usd=sum(POSITIONS[position] * usd for position, usd in regrets.items()),
        most_usd=max(regrets.values(), default=0.0),
        may_break=may_break,
    )


def _types_with_spread(problem: SchedulingProblem) -> frozenset[str]:
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
    slow_types: frozenset[str],
    fast_types: frozenset[str],
) -> Doubt | None:
    shifted = _shifted(problem, dict.fromkeys(slow_types, 1.0) | dict.fromkeys(fast_types, -1.0))
    cheapest = cheapest_plan(shifted)
    if cheapest is None:
        return None
    moves = moves_between(stages, cheapest.stages)
    kept_usd = _cost_of_placement(shifted, stages)
    if not moves or (kept_usd is not None and kept_usd <= cheapest.cost_usd * (1 + _NO_DOUBT)):
        return None
    return Doubt(
        slow_types=tuple(sorted(slow_types)),
        fast_types=tuple(sorted(fast_types)),
        stages=cheapest.stages,
        moves=moves,
        regret_usd=None if kept_usd is None else kept_usd - cheapest.cost_usd,
    )


def _cost_of_placement(problem: SchedulingProblem, stages: Sequence[Stage]) -> float | None:
    """Return what a placement costs with its best replica counts; None where it breaks a constraint."""
    runs = [LayerRun(stage.first_layer, stage.last_layer, stage.device_type) for stage in stages]
    try:
        return evaluate(problem, balance_replicas(problem, runs)).cost_usd
    except InfeasiblePlanError:
        return None


def _regret_usd(
    problem: SchedulingProblem, stages: Sequence[Stage], *, names: Collection[str], position: float
) -> float | None:
    """Return what the placement costs more than the cheapest; None where it breaks a constraint and that does not."""
    shifted = _shifted(problem, dict.fromkeys(names, position))
    cheapest = cheapest_plan(shifted)
    if cheapest is None:
        return 0.0
    kept_usd = _cost_of_placement(shifted, stages)
    if kept_usd is None:
        return None
    return kept_usd - cheapest.cost_usd if kept_usd > cheapest.cost_usd * (1 + SAME_COST) else 0.0


def _shifted(problem: SchedulingProblem, positions: Mapping[str, float]) -> SchedulingProblem:
    """Return the problem with times within their spread: times 1 + position * spread of their device type."""

    def scaled(layer: LayerCosts) -> dict[str, float]:
        factors = {
            name: max(LEAST_FACTOR, 1 + position * layer.compute_relative_spread.get(name, 0.0))
            for name, position in positions.items()
        }
        return {
            name: within_limits(seconds * factors.get(name, 1.0)) if seconds else 0.0
            for name, seconds in layer.compute_seconds.items()
        }

    return replace(
        problem, layers=tuple(replace(layer, compute_seconds=scaled(layer)) for layer in problem.layers)
    )
