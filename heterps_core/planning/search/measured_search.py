"""A search driven by measured step times instead of the cost model.

The schedulers that propose plans and learn from ratings do not ask where ratings come from. Here each plan is run
on the engine, its step time becomes the bill of a run on these devices, and the scheduler learns from the bill.
A measurement takes seconds: none is spent on a plan that is known to fail, and plans that need no search come first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from heterps_core.errors import HeterpsError
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.plan_rater import Ratings
from heterps_core.planning.search.schedulers.base import ProposingScheduler, check_budget
from heterps_core.planning.search.schedulers.genetic import GeneticScheduler, GeneticSettings
from heterps_core.planning.search.schedulers.reinforce import ReinforceScheduler, ReinforceSettings
from heterps_core.planning.search.schedulers.tapp import TappScheduler, TappSettings, root_cost_rewards
from heterps_core.units import SECONDS_PER_HOUR

Assignment: TypeAlias = tuple[int, ...]
"""Index of the device of each layer; neighbouring equal ones make one stage."""

MeasureStep: TypeAlias = Callable[[Assignment], float]
"""Runs a few steps under a plan and returns the seconds of one; raises HeterpsError where the plan fails."""

RunsAs: TypeAlias = Callable[[Assignment], Hashable | None]
"""What a plan comes to when it is run, the same for plans that differ in names only; None where it breaks a limit
that is known before, such as memory."""

MEASURED_METHODS: Mapping[str, Callable[[], ProposingScheduler]] = {
    "genetic": lambda: GeneticScheduler(GeneticSettings(num_parents=8, children_per_generation=8)),
    "reinforce": lambda: ReinforceScheduler(
        ReinforceSettings(plans_per_round=8, elite_fraction=0.3, flattening=(1.0, 6.0))
    ),
    "tapp": lambda: TappScheduler(
        TappSettings(most_groups=8, neighbour_bias=2.0, groupings_per_round=4, placements_per_grouping=2),
        rewards=root_cost_rewards,
    ),
}
"""Methods that learn from so few plans as can be measured: they rate eight a round in place of hundreds, and begin
with plans of few stages; `reinforce` with the likeliest plan of the shipped policy, from which it goes farther where
it starts again, as measured times may contradict the profiles that the policy sees."""

MOST_REPEATS = 10
"""Plans that may be proposed for each one measured: a policy that has settled draws the same ones for ever."""


class MeasuredPlan(NamedTuple):
    """One plan that a search tried."""

    assignment: Assignment
    step_seconds: float
    has_failed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSearch:
    """What a search by measurements tried, in that order."""

    plans: tuple[MeasuredPlan, ...]
    num_proposed: int
    """Plans that the scheduler drew, repeated and refused ones included."""

    num_refused: int
    """Plans among them beyond a known limit, which were not run."""

    search_seconds: float

    def fastest(self, count: int) -> list[MeasuredPlan]:
        """Return the fastest plans that ran, best first, so that they can be measured again: the best of many
        noisy measurements is too good to be true."""
        ran = [plan for plan in self.plans if not plan.has_failed]
        return sorted(ran, key=attrgetter("step_seconds"))[:count]


def search_by_measuring(
    scheduler: ProposingScheduler,
    problem: SchedulingProblem,
    measure: MeasureStep,
    *,
    budget_measurements: int,
    penalty_seconds: float,
    seed: int,
    runs_as: RunsAs = tuple,
    first_plans: Sequence[Assignment] = (),
) -> MeasuredSearch:
    """Let a scheduler propose plans and learn from how long their steps take.

    Args:
        problem: Layers and device types; every unit of every type is one device here.
        budget_measurements: Most plans to measure, first and failed ones included; at least 1.
        penalty_seconds: Stands for the step time of a plan that fails or is refused; above that of any plan worth
            having.
        runs_as: Which plans are the same, and which are refused; every plan is itself by default.
        first_plans: Measured before the scheduler is asked, as they need no search; it does not learn of them.

    Raises:
        ConfigurationError: The budget is below 1.
    """
    check_budget(budget_measurements)
    started = time.perf_counter()
    known: dict[Hashable, MeasuredPlan] = {}
    num_proposed = num_refused = 0

    def is_within_budget(ran: Hashable | None) -> bool:
        return ran is None or ran in known or len(known) < budget_measurements

    def step_seconds_of(assignment: Assignment, ran: Hashable | None) -> float:
        if ran is None:
            return penalty_seconds
        if ran not in known:
            known[ran] = _tried(assignment, measure, penalty_seconds)
        return known[ran].step_seconds

    for assignment in first_plans:
        if is_within_budget(ran := runs_as(assignment)):
            step_seconds_of(assignment, ran)
    proposals = scheduler.propose(problem, budget_evaluations=budget_measurements, seed=seed)
    try:
        batch = next(proposals)
        while len(known) < budget_measurements and num_proposed < MOST_REPEATS * budget_measurements:
            step_seconds = []
            for assignment in map(tuple, batch.tolist()):
                if not is_within_budget(ran := runs_as(assignment)):
                    break
                num_refused += ran is None
                step_seconds.append(step_seconds_of(assignment, ran))
            num_proposed += len(step_seconds)
            batch = proposals.send(
                Ratings(cost_usd=run_cost_usd(problem, step_seconds), shortfalls=np.zeros(len(step_seconds)))
            )
    except StopIteration:
        pass
    finally:
        proposals.close()
    return MeasuredSearch(
        plans=tuple(known.values()),
        num_proposed=num_proposed,
        num_refused=num_refused,
        search_seconds=time.perf_counter() - started,
    )


def _tried(assignment: Assignment, measure: MeasureStep, penalty_seconds: float) -> MeasuredPlan:
    try:
        return MeasuredPlan(assignment, measure(assignment), has_failed=False)
    except HeterpsError:
        return MeasuredPlan(assignment, penalty_seconds, has_failed=True)


def run_cost_usd(problem: SchedulingProblem, step_seconds: Sequence[float]) -> Floats:
    """Return the cost of all epochs where every unit is held from the first step to the last, used or not.

    cost = steps * seconds / 3600 * sum over types of price * units, so the cheapest plan is the fastest one.
    """
    price_usd_per_hour = sum(
        unit.price_usd_per_hour * unit.max_units for unit in problem.device_types.values()
    )
    return np.asarray(step_seconds) * problem.num_steps / SECONDS_PER_HOUR * price_usd_per_hour
