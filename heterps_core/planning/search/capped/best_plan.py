"""The cheapest plan that a search has met."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterps_core.planning.cost_model.arrays import Ints
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import rows_of_stages, stages_of_rows
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import FixedStages, fixed_stages, with_replicas
from heterps_core.planning.search.capped.stage_columns import StageColumns
from heterps_core.plans.scheduling_plan import Stage

MOST_FLOORS = 4
"""Floors that are asked for one after the other where a plan misses the problem's own when simulated."""

ABOVE_FLOOR = 1e-4
"""Relative distance of what is asked for from what would be enough."""

_WORTH_WHILE = 1e-6
"""Relative gain for which a replica more or fewer is taken."""


class BestPlan:
    """Takes partitions, gives them their best replicas within the caps and keeps the cheapest.

    Plans whose steps drain are simulated, as the formula counts only a part of the time for which stages wait.
    """

    def __init__(self, problem: SchedulingProblem) -> None:
        self.problem, self.columns = problem, StageColumns.of(problem)
        self.objective = objective_of(problem)
        self.product = np.inf
        """In the unit of `Objective`; infinite before any plan was met."""

        self.stages: tuple[Stage, ...] | None = None
        self.rows = np.empty(0, dtype=np.int64)
        """Flat indices of its stages in a table of `StageColumns`, in order."""

        self._tried: set[bytes] = set()

    def offer_rows(self, rows: Ints) -> None:
        """Try the partition of these rows, first stage first."""
        key = rows.tobytes()
        if key not in self._tried:
            self._tried.add(key)
            runs, columns = np.divmod(rows, self.columns.num_columns)
            types = self.columns.types[columns]
            self.offer(stages_of_rows(self.problem, runs * self.columns.num_types + types))

    def offer(self, stages: Sequence[Stage]) -> None:
        """Try the partition of a plan, first stage first."""
        fixed = fixed_stages(self.problem, stages)
        if self.problem.drains:
            replicas, product = self._cheapest_simulated(fixed, stages)
        else:
            replicas, product = self._cheapest_by_formula(fixed, self.problem.stage_seconds_limit)
        if replicas is None or product >= self.product:
            return
        self.product, self.stages = product, with_replicas(stages, replicas)
        runs, columns = np.divmod(rows_of_stages(self.problem, stages), self.columns.num_types)
        steady = int(fixed.table.on_demand_usd_per_hour(replicas.astype(np.float64)).argmin())
        columns[steady] = self.columns.with_on_demand(columns[steady])
        self.rows = runs * self.columns.num_columns + columns

    def _cheapest_by_formula(self, fixed: FixedStages, limit_seconds: float) -> tuple[Ints | None, float]:
        return fixed.cheapest_replicas(limit_seconds=limit_seconds, below_product=self.product)

    def _cheapest_simulated(self, fixed: FixedStages, stages: Sequence[Stage]) -> tuple[Ints | None, float]:
        """Return the cheapest replicas by the formula, with one more or fewer in a stage while that costs less.

        Where they miss the floor when simulated, a higher one is asked of the formula.
        """
        limit_seconds = self.problem.stage_seconds_limit
        for _ in range(MOST_FLOORS):
            replicas, _ = self._cheapest_by_formula(fixed, limit_seconds)
            if replicas is None:
                return None, np.inf
            found = evaluate(self.problem, with_replicas(stages, replicas))
            if not found.violations:
                break
            seconds = self.problem.batch_size / found.throughput_samples_per_s
            limit_seconds *= self.problem.stage_seconds_limit / seconds * (1 - ABOVE_FLOOR)
        else:
            return None, np.inf
        cost_usd = found.cost_usd
        one_more = np.eye(replicas.size, dtype=np.int64)
        changes = [*one_more, *-one_more]
        num_failed = 0
        while num_failed < len(changes):
            tried = replicas + changes[num_failed]
            found = evaluate(self.problem, with_replicas(stages, np.maximum(tried, 1)))
            if not found.violations and found.cost_usd < cost_usd * (1 - _WORTH_WHILE):
                replicas, cost_usd, num_failed = tried, found.cost_usd, 0
            else:
                num_failed += 1
        return replicas, self.objective.product_of(cost_usd)
