"""The cheapest plan that a search has met."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterps_core.planning.cost_model.arrays import Ints
from heterps_core.planning.cost_model.run_tables import rows_of_stages, stages_of_rows
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import fixed_stages, with_replicas
from heterps_core.planning.search.capped.stage_columns import StageColumns
from heterps_core.plans.scheduling_plan import Stage


class BestPlan:
    """Takes partitions, gives them their best replicas within the caps and keeps the cheapest."""

    def __init__(self, problem: SchedulingProblem) -> None:
        self.problem, self.columns = problem, StageColumns.of(problem)
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
        replicas, product = fixed.cheapest_replicas(
            limit_seconds=self.problem.stage_seconds_limit, below_product=self.product
        )
        if replicas is None:
            return
        self.product, self.stages = product, with_replicas(stages, replicas)
        runs, columns = np.divmod(rows_of_stages(self.problem, stages), self.columns.num_types)
        steady = int(fixed.table.on_demand_usd_per_hour(replicas.astype(np.float64)).argmin())
        columns[steady] = self.columns.with_on_demand(columns[steady])
        self.rows = runs * self.columns.num_columns + columns
