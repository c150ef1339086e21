r"""What the plan costs where times are off by their spread, and what knowing one of them better is worth.

The true times are the estimated ones times a factor that is taken to be anything within the spread alike. For each
factor the regret is what the plan, with its replica counts, costs more than the one that is cheapest then. Measuring
saves the regret, so it is worth its mean: the expected value of perfect information (Raiffa and Schlaifer, Applied
Statistical Decision Theory, 1961), with all other times as they are estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heterps_core.hardware import hardware_name
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.placement import Move, moves_between
from heterps_core.planning.explain.variants import SAME_COST, cheapest_plan
from heterps_core.planning.problem.estimates import Estimate, Quantity, estimates_of, with_errors
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.robust_choice import cost_or_infinite
from heterps_core.plans.scheduling_plan import Stage

LEAST_SAVING = 0.01
"""Of a measurement, as a share of the plan's cost: less is not told."""

POSITIONS = {-1.0: 0.125, -0.5: 0.25, 0.0: 0.25, 0.5: 0.25, 1.0: 0.125}
"""Where the factor stands within the spread -> weight by the trapezoid rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRange:
    """Cost of the plan as it is, replica counts included, over the spread of all times at once."""

    low_usd: float
    high_usd: float
    misses_floor: bool
    """At the slow end, like the next one."""

    lowest_throughput_samples_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementWorth:
    """What knowing the times of one quantity on one kind of hardware would save in one run."""

    device_type: str
    quantity: Quantity
    largest_spread: float
    expected_usd: float
    most_usd: float
    """Where it is largest, of `POSITIONS` at which the plan at hand keeps all constraints."""

    may_break: bool
    """Within the spread the plan at hand breaks a constraint, and another one would not."""

    is_slow_end: bool = False
    """Where it breaks a constraint or else costs most too much: at the slow end of the spread or at the fast one."""

    moves: tuple[Move, ...] = ()
    """What the cheapest plan places elsewhere then; empty where it has other replica counts alone."""

    @property
    def can_change_choice(self) -> bool:
        """Somewhere within the spread another plan is better."""
        return self.may_break or self.most_usd > 0

    @property
    def estimate(self) -> Estimate:
        """What would be known."""
        return Estimate(device_type=self.device_type, quantity=self.quantity)


def find_cost_range(problem: SchedulingProblem, stages: Sequence[Stage]) -> CostRange | None:
    """Return the least and most the plan costs within the spread; None where no time has one."""
    estimates = estimates_of(problem)
    if not estimates:
        return None
    fast = evaluate(with_errors(problem, dict.fromkeys(estimates, -1.0)), stages)
    slow = evaluate(with_errors(problem, dict.fromkeys(estimates, 1.0)), stages)
    return CostRange(
        low_usd=fast.cost_usd,
        high_usd=slow.cost_usd,
        misses_floor=any(violation.constraint == "throughput floor" for violation in slow.violations),
        lowest_throughput_samples_per_s=slow.throughput_samples_per_s,
    )


def find_measurements(problem: SchedulingProblem, stages: Sequence[Stage]) -> tuple[MeasurementWorth, ...]:
    """Return the estimates that could change the plan by at least `LEAST_SAVING` of its cost, the worst first.

    Those come first that could break it. As no other type helps where all of them together do not, the types that the
    plan does not use take one search in most cases.
    """
    least_usd = LEAST_SAVING * evaluate(problem, stages).cost_usd
    asked = estimates_of(problem)
    unused = [estimate for estimate in asked if not _is_used(estimate, stages)]
    if _regret(with_errors(problem, dict.fromkeys(unused, -1.0)), stages, least_usd=least_usd) is None:
        asked = {estimate: spread for estimate, spread in asked.items() if estimate not in unused}
    worths = [worth_of_measuring(problem, stages, estimate, least_usd=least_usd) for estimate in asked]
    worths = [worth for worth in worths if worth.can_change_choice]
    return tuple(sorted(worths, key=lambda worth: (not worth.may_break, -worth.most_usd)))


def worth_of_measuring(
    problem: SchedulingProblem, stages: Sequence[Stage], estimate: Estimate, *, least_usd: float = 0.0
) -> MeasurementWorth:
    r"""Return what knowing the times of one estimate is worth in one run.

    The cost of a plan is close to linear in the factor f, and the plan at hand is cheapest at f = 1, so its regret
    grows towards the ends: where it is 0 at an end it is 0 on the way there, and the trapezoid rule over
    :math:`f = 1 + u s` with :math:`u \in \{-1, -1/2, 0, 1/2, 1\}` errs on the high side. At most one search for each
    u but 0; none where only a type that the plan does not use becomes slower.

    The plan at hand is cheapest at the estimated times; regrets below `least_usd` at an end are not looked at.
    """
    spread = estimates_of(problem).get(estimate, 0.0)
    found: dict[float, tuple[float, tuple[Stage, ...]]] = {}
    for end in (-1.0, 1.0)[: 1 + _is_used(estimate, stages)] if spread else ():
        for position, least in ((end, least_usd), (end / 2, 0.0)):
            regret = _regret(with_errors(problem, {estimate: position}), stages, least_usd=least)
            if regret is None:
                break
            found[position] = regret
    finite = {position: usd for position, (usd, _) in found.items() if usd < math.inf}
    worst = max(found, key=lambda position: found[position][0], default=0.0)
    return MeasurementWorth(
        device_type=estimate.device_type,
        quantity=estimate.quantity,
        largest_spread=spread,
        expected_usd=sum(POSITIONS[position] * usd for position, usd in finite.items()),
        most_usd=max(finite.values(), default=0.0),
        may_break=len(finite) < len(found),
        is_slow_end=worst > 0,
        moves=moves_between(stages, found[worst][1]) if found else (),
    )


def _is_used(estimate: Estimate, stages: Sequence[Stage]) -> bool:
    return estimate.device_type in {hardware_name(stage.device_type) for stage in stages}


def _regret(
    problem: SchedulingProblem, stages: Sequence[Stage], *, least_usd: float
) -> tuple[float, tuple[Stage, ...]] | None:
    """Return what a plan costs more than the cheapest, and that plan; None where that is less than `least_usd`.

    It is infinite where the plan breaks a constraint that the cheapest keeps.
    """
    kept_usd = cost_or_infinite(problem, stages)
    cheapest = cheapest_plan(problem)
    if cheapest is None or kept_usd - cheapest.cost_usd < max(least_usd, SAME_COST * cheapest.cost_usd):
        return None
    return kept_usd - cheapest.cost_usd, cheapest.stages
