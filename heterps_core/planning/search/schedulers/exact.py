"""The proven optimum, by dynamic programming over the chain and branch and bound over the stage time."""

from __future__ import annotations

import time

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import MAX_SECONDS, find_optimum
from heterps_core.planning.search.schedulers.base import Scheduler, check_budget, result_with_bound
from heterps_core.planning.search.search_result import HistoryPoint, SearchResult


class ExactScheduler(Scheduler):
    """Constructs the cheapest plan with its proof.

    It rates one plan, the one it returns, whatever the budget: its work is not counted in plans but
    shows in the seconds. The seed changes nothing. After a limit in seconds it returns the best plan so
    far with a bound that holds.
    """

    name = "exact"
    default_budget_evaluations = 1

    def search(
        self,
        problem: SchedulingProblem,
        *,
        budget_evaluations: int,
        seed: int,
        proven_usd: float | None = None,
        max_seconds: float | None = None,
    ) -> SearchResult:
        """Return the optimum, or the best plan after so many seconds, with its own proof; see `Scheduler.search`."""
        check_budget(budget_evaluations)
        started = time.perf_counter()
        optimum = find_optimum(problem, seconds=MAX_SECONDS if max_seconds is None else max_seconds)
        search_seconds = time.perf_counter() - started
        return result_with_bound(
            problem,
            optimum.cost_lower_bound_usd,
            scheduler=self.name,
            seed=seed,
            stages=optimum.stages,
            num_evaluations=1,
            history=[HistoryPoint(1, search_seconds, optimum.cost_usd)],
            search_seconds=search_seconds,
            certificate_seconds=0.0,
        )
