r"""What it is worth to know how fast a device type really is, before a plan is made with an estimate of it.

The true times are the estimated ones times a factor that is taken to be anything within the spread alike. For each
factor the regret is what the placement at hand costs more than the one that is cheapest then. Measuring saves the
regret, so it is worth its mean: the expected value of perfect information (Raiffa and Schlaifer, Applied Statistical
Decision Theory, 1961), with all other device types as they are estimated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from heterps_core.planning.explain.cost_range import LEAST_FACTOR, cost_of_placement
from heterps_core.planning.explain.variants import SAME_COST, cheapest_plan, with_compute_factors
from heterps_core.planning.problem.scheduling_problem import LayerCosts, SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage

POSITIONS = {-1.0: 0.125, -0.5: 0.25, 0.0: 0.25, 0.5: 0.25, 1.0: 0.125}
"""Where the factor stands within the spread -> weight by the trapezoid rule."""


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


def _regret_usd(
    problem: SchedulingProblem, stages: Sequence[Stage], *, names: Collection[str], position: float
) -> float | None:
    """Return what the placement costs more than the cheapest; None where it breaks a constraint and that does not."""

    def factor_of(layer: LayerCosts, device_type: str) -> float:
        if device_type not in names:
            return 1.0
        return max(LEAST_FACTOR, 1 + position * layer.compute_relative_spread.get(device_type, 0.0))

    shifted = with_compute_factors(problem, factor_of)
    cheapest = cheapest_plan(shifted)
    if cheapest is None:
        return 0.0
    kept_usd = cost_of_placement(shifted, stages)
    if kept_usd is None:
        return None
    return kept_usd - cheapest.cost_usd if kept_usd > cheapest.cost_usd * (1 + SAME_COST) else 0.0
