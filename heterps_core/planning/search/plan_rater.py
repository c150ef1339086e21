"""Rates the plans that a search proposes, counts them against its budget, and remembers the best.

Every proposal is rated on a grid; those whose bound is below the best so far get exact replica counts, so the
best plan of a search is never an approximation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.cost_model.batch_rating import BatchRating, GridRater, PlanStages, stages_of
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import segment_table, stages_of_rows
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.step_model import num_microbatches_of
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.provisioning.replica_balance import FixedStages, with_replicas
from heterps_core.planning.search.capped.feasibility import stage_time_range
from heterps_core.planning.search.search_result import HistoryPoint
from heterps_core.plans.scheduling_plan import Stage

Assignments = NDArray[np.int64]
"""Plans as a number per layer, shape (P, L): its device type is the number modulo T, and neighbouring layers of equal
numbers are one stage. So t and t + T are two stages on type t."""

_EXACT_BATCH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratings:
    """The ratings of P plans; all arrays have shape (P,)."""

    cost_usd: Floats
    """At the least replica counts; where a constraint is missed, the cost at the nearest stage time within
    reach, or infinite."""

    shortfalls: Floats
    """0 where feasible; else how far the constraints are missed, growing with the distance."""


MISS_OFFSET = 1.0
"""Reward taken off, in nats of cost, for missing a constraint at all."""

MISS_PENALTY = 5.0
"""Reward taken off per unit of shortfall: a plan twice too slow ranks below feasible ones 80 times more expensive."""

_UNREACHABLE_LOG_COST = 50.0
"""Stands for the log cost of a plan that no stage time makes feasible; above that of any bill in USD."""


def log_cost_rewards(ratings: Ratings) -> Floats:
    """Return -log(cost) of each plan, less a penalty that grows with the distance to feasibility."""
    with np.errstate(divide="ignore"):
        log_cost = np.minimum(np.log(ratings.cost_usd), _UNREACHABLE_LOG_COST)
    misses = ratings.shortfalls > 0
    return np.asarray(-log_cost - misses * MISS_OFFSET - MISS_PENALTY * ratings.shortfalls)


class PlanRater:
    """Rates plans of one problem against a budget."""

    def __init__(self, problem: SchedulingProblem, *, budget_evaluations: int) -> None:
        self.problem = problem
        self._objective = objective_of(problem)
        self.num_types = len(problem.device_types)
        self._microbatches_of = np.array(
            [num_microbatches_of(problem, num_stages) for num_stages in range(1, problem.num_layers + 1)]
        )
        self._grids: dict[int, GridRater] = {}
        self._budget_evaluations = budget_evaluations
        self._started = time.perf_counter()
        self._exactly_rated: dict[bytes, float] = {}
        self._best_product = np.inf
        """By the formula; only plans below are simulated, where they are."""

        self._best_simulated = np.inf
        self.best_stages: tuple[Stage, ...] | None = None
        """The cheapest feasible plan so far."""

        self.num_evaluations = 0
        self.history: list[HistoryPoint] = []

    @property
    def num_evaluations_left(self) -> int:
        """Plans that may still be rated."""
        return self._budget_evaluations - self.num_evaluations

    def rate(self, assignments: Assignments) -> Ratings:
        """Return the ratings of plans, of only the first ones where the budget ends; shape (P, L) -> (P,)."""
        assignments = np.ascontiguousarray(assignments[: self.num_evaluations_left], dtype=np.int64)
        self.num_evaluations += len(assignments)
        stages = stages_of(assignments, self.num_types)
        rating = self._rate_on_grids(stages)
        products = rating.products
        is_small = len(assignments) <= _EXACT_BATCH
        for plan in np.argsort(rating.lower_bounds, kind="stable").tolist():
            below_product = np.inf if is_small else self._best_product
            if rating.lower_bounds[plan] >= below_product:
                break
            products[plan] = min(products[plan], self._rate_exactly(stages, plan, below_product))
        return Ratings(cost_usd=self._objective.cost_usd(products), shortfalls=rating.shortfalls)

    def grid(self, num_microbatches: int) -> GridRater:
        """Return the rater of plans with so many micro-batches, which the trainer's step counts."""
        if num_microbatches not in self._grids:
            table = segment_table(self.problem, num_microbatches=num_microbatches)
            low_seconds, high_seconds = stage_time_range(self.problem, table)
            limit_seconds = min(self.problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE), high_seconds)
            if limit_seconds == 0:  # nothing fits into memory: any grid shows that
                limit_seconds = high_seconds = low_seconds
            self._grids[num_microbatches] = GridRater(
                table,
                self._objective,
                low_seconds=low_seconds,
                limit_seconds=limit_seconds,
                high_seconds=high_seconds,
            )
        return self._grids[num_microbatches]

    def _rate_on_grids(self, stages: PlanStages) -> BatchRating:
        counts = self._microbatches_of[np.diff(stages.starts, append=stages.rows.size) - 1]
        parts = {count: np.flatnonzero(counts == count) for count in sorted(set(counts.tolist()))}
        if len(parts) == 1:
            return self.grid(next(iter(parts))).rate(stages)
        arrays = {field.name: np.empty(counts.size) for field in fields(BatchRating)}
        for count, plans in parts.items():
            rating = self.grid(count).rate(stages.of_plans(plans))
            for name, values in arrays.items():
                values[plans] = getattr(rating, name)
        return BatchRating(**arrays)

    def _rate_exactly(self, stages: PlanStages, plan: int, below_product: float) -> float:
        """Return the plan's least product, or infinity where it is not below the given one."""
        rows = stages.of_plan(plan)
        key = rows.tobytes()
        if key not in self._exactly_rated:
            grid = self.grid(int(self._microbatches_of[rows.size - 1]))
            fixed = FixedStages(table=grid.table.take(rows), objective=self._objective)
            limit_seconds = float(grid.grid_seconds[grid.num_within - 1])
            replicas, product = fixed.cheapest_replicas(
                limit_seconds=limit_seconds, below_product=below_product
            )
            self._exactly_rated[key] = product
            if replicas is not None and product < self._best_product:
                met = with_replicas(stages_of_rows(self.problem, rows), replicas)
                simulated = self._simulated_product(met, product)
                if math.isfinite(simulated):
                    self._best_product = product
                if simulated < self._best_simulated:
                    self._remember(met, simulated)
        return self._exactly_rated[key]

    def _simulated_product(self, stages: tuple[Stage, ...], product: float) -> float:
        """Return the product with which stages wait for one another; infinite where that misses the floor."""
        if self.problem.step_model is StepModel.PAPERS:
            return product
        evaluation = evaluate(self.problem, stages)
        if evaluation.violations:
            return math.inf
        return max(product, self._objective.product_of(evaluation.cost_usd))

    def _remember(self, stages: tuple[Stage, ...], product: float) -> None:
        self._best_simulated, self.best_stages = product, stages
        self.history.append(
            HistoryPoint(
                num_evaluations=self.num_evaluations,
                seconds=time.perf_counter() - self._started,
                best_cost_usd=self._objective.cost_usd(product),
            )
        )
