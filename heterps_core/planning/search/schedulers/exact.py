"""The proven optimum, by dynamic programming over the chain and branch and bound over the stage time."""

from __future__ import annotations

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers.base import FoundPlan, Proof, Scheduler
from heterps_core.planning.search.schedulers.genetic import GeneticScheduler
from heterps_core.plans.scheduling_plan import Stage

_PROPOSED_EVALUATIONS = 2_000
"""Plans that the genetic search rates where a proof takes many steps: a fifth of a second on one core."""


class ExactScheduler(Scheduler):
    """Constructs the cheapest plan with its proof.

    It rates one plan, the one it returns, whatever the budget: its work is not counted in plans but
    shows in the seconds. The seed changes nothing. After a limit in seconds it returns the best plan so
    far with a bound that holds.
    """

    name = "exact"
    default_budget_evaluations = 1

    def find(
        self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int, proof: Proof
    ) -> FoundPlan:
        """Return the optimum, or after the proof's seconds the best plan, with its own proof."""

        def propose() -> tuple[Stage, ...] | None:
            rater = GeneticScheduler().rated(problem, budget_evaluations=_PROPOSED_EVALUATIONS, seed=0)
            return rater.best_stages

        optimum = find_optimum(problem, seconds=proof.max_seconds, propose=propose)
        return FoundPlan(stages=optimum.stages, num_evaluations=1, proven_usd=optimum.cost_lower_bound_usd)
