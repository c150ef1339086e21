"""Approximate cost of many plans at once, by looking stages up in a table over a grid of stage times.

A search rates hundreds of thousands of plans; most are far from the best and need no exact replica counts. On
the grid a plan's cost is the least over the grid's stage times, so it is a cost that some replica counts reach, and
at most one grid step above the plan's best.

Shape legend: G = runs of layers, T = device types, J = stage times of the grid, P = plans, L = layers,
S = stages of all plans together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.objective import Objective
from heterps_core.planning.cost_model.stage_table import StageTable

_MOST_POINTS = 128
_FEWEST_POINTS = 32
_EXTRA_POINTS = 16
"""Grid points beyond the limit, to tell how far a plan misses it."""

_TABLE_BYTES = 100_000_000

_ROWS_PER_PASS = 2_000
"""Rows that are looked up in one pass; more would leave the cache."""

_MISFIT_SHORTFALL = 20.0
"""Shortfall of a plan that no stage time makes feasible; above the log of any ratio of stage times met."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRating:
    """Ratings of P plans."""

    products: Floats
    """As the objective has it (seconds times USD per hour); where the limit is missed, of the nearest stage time
    within reach; infinite where none is. Shape (P,)."""

    lower_bounds: Floats
    """No replica counts of the plan give less than this product within the limit. Shape (P,)."""

    shortfalls: Floats
    """0 where feasible, else the log of stage time over limit, or more where memory or caps never allow the
    plan. Shape (P,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStages:
    """The stages of P plans, one after the other."""

    rows: Ints
    """Flat indices run * T + type, shape (S,)."""

    starts: Ints
    """Position of each plan's first stage, shape (P,)."""

    def of_plan(self, index: int) -> Ints:
        """Return the rows of one plan, in order."""
        end = self.starts[index + 1] if index + 1 < self.starts.size else self.rows.size
        return self.rows[self.starts[index] : end]

    def of_plans(self, plans: Ints) -> PlanStages:
        """Return the stages of some of the plans, given by ascending indices."""
        counts = np.diff(self.starts, append=self.rows.size)
        is_chosen = np.zeros(self.starts.size, dtype=bool)
        is_chosen[plans] = True
        chosen_counts = counts[is_chosen]
        return PlanStages(
            rows=self.rows[np.repeat(is_chosen, counts)],
            starts=np.cumsum(chosen_counts) - chosen_counts,
        )


def stages_of(assignments: Ints, num_types: int) -> PlanStages:
    """Return the stages of plans given as `Assignments` of `plan_rater.py`, shape (P, L)."""
    num_plans, num_layers = assignments.shape
    is_last = np.ones((num_plans, num_layers), dtype=bool)
    is_last[:, :-1] = assignments[:, 1:] != assignments[:, :-1]
    plan, last = np.nonzero(is_last)
    starts = np.searchsorted(plan, np.arange(num_plans))
    first = np.empty_like(last)
    first[1:] = last[:-1] + 1
    first[starts] = 0
    rows = (last * (last + 1) // 2 + first) * num_types + assignments[plan, last] % num_types
    return PlanStages(rows=rows, starts=starts)


class GridRater:
    """Rates plans on a fixed grid of stage times.

    Args:
        low_seconds: No plan's longest stage is shorter; positive.
        limit_seconds: The longest stage time that is allowed, finite.
        high_seconds: With more time than this nothing becomes feasible any more.
    """

    def __init__(
        self,
        table: StageTable,
        objective: Objective,
        *,
        low_seconds: float,
        limit_seconds: float,
        high_seconds: float,
    ) -> None:
        num_rows = table.compute_seconds.size
        num_points = int(np.clip(_TABLE_BYTES // (12 * num_rows), _FEWEST_POINTS, _MOST_POINTS))
        within = np.geomspace(min(low_seconds, limit_seconds), limit_seconds, num_points)
        within[-1] = limit_seconds
        # Closest just beyond the limit: a search that misses it a little learns whether it comes nearer.
        shares = (np.arange(1, _EXTRA_POINTS + 1) / _EXTRA_POINTS) ** 2
        beyond = limit_seconds * (max(high_seconds, limit_seconds) / limit_seconds) ** shares
        self.table = table
        self.objective = objective
        self.num_types = table.max_units.size
        self.num_within = num_points
        self.grid_seconds = np.concatenate([within, beyond])
        self.step_ratio = within[1] / within[0]
        shape = (num_rows, self.grid_seconds.size)
        self.rates, self.seconds, self.units = (np.empty(shape, dtype=np.float32) for _ in range(3))
        # What a machine on-demand adds, where types are on spot.
        self.on_demand = np.empty(shape, dtype=np.float32) if table.on_demand_usd.by_type else None
        self._is_filled = np.zeros(num_rows, dtype=bool)

    def _fill(self, rows: Ints) -> None:
        """Look up what is asked for the first time: the first plans of a search have few of all runs."""
        missing = np.unique(rows[~self._is_filled[rows]])
        self._is_filled[missing] = True
        for part in np.split(missing, np.arange(_ROWS_PER_PASS, missing.size, _ROWS_PER_PASS)):
            table = self.table.take(part)
            replicas = table.cheapest_replicas(self.grid_seconds)  # (J, rows)
            self.rates[part] = table.usd_per_hour(replicas).T
            if self.on_demand is not None:
                self.on_demand[part] = table.on_demand_usd_per_hour(replicas).T
            self.units[part] = np.where(np.isfinite(replicas), replicas, 0.0).T
            self.seconds[part] = _in_single_precision(table.seconds(replicas)).T

    def rate(self, stages: PlanStages) -> BatchRating:
        """Return approximate costs and bounds of P plans."""
        self._fill(stages.rows)
        charges = self._charges(stages)  # (P, J)
        point, feasible = self._best_points(charges)
        plans = np.arange(point.size)
        over = np.flatnonzero(np.isfinite(charges[plans, point]) & ~self._keeps_caps(stages, point))
        if over.size:
            first_point = self._first_point_within_caps(stages.of_plans(over))
            charges[over] = np.where(
                np.arange(charges.shape[1]) >= first_point[:, None], charges[over], np.inf
            )
            point[over], feasible[over] = self._best_points(charges[over])
        at_point = self._per_stage(stages, point)
        reached = np.maximum.reduceat(self.seconds[stages.rows, at_point], stages.starts).astype(np.float64)
        price = np.add.reduceat(self.rates[stages.rows, at_point].astype(np.float64), stages.starts)
        if self.on_demand is not None:
            price += np.minimum.reduceat(self.on_demand[stages.rows, at_point], stages.starts)
        interruptions = np.add.reduceat(
            self.units[stages.rows, at_point]
            * self.objective.interruptions_per_hour[stages.rows % self.num_types],
            stages.starts,
        )
        price[~np.isfinite(charges[plans, point])] = np.inf
        products = self.objective.product(reached, price, interruptions)
        # Single precision costs 1e-7 a stage; the bound gives that away.
        bounds = self.grid_seconds[point] * charges[plans, point] / self.step_ratio * (1 - 1e-5)
        return BatchRating(
            products=products,
            lower_bounds=np.where(feasible, bounds, np.inf),
            shortfalls=self._shortfalls(stages, point, feasible, np.isfinite(price)),
        )

    def _charges(self, stages: PlanStages) -> NDArray[np.float32]:
        """Return product over grid seconds of each plan at each grid point, infinite out of reach; shape (P, J)."""
        rates = np.add.reduceat(self.rates[stages.rows], stages.starts, axis=0)
        if self.on_demand is not None:
            rates += np.minimum.reduceat(self.on_demand[stages.rows], stages.starts, axis=0)
        if self.objective.is_plain:
            return rates
        interruptions = np.zeros_like(rates)
        if self.objective.has_interruptions:
            of_unit = self.objective.interruptions_per_hour.astype(np.float32)[stages.rows % self.num_types]
            np.add.reduceat(
                self.units[stages.rows] * of_unit[:, None], stages.starts, axis=0, out=interruptions
            )
        products = self.objective.product(self.grid_seconds, rates, interruptions)
        return _in_single_precision(products / self.grid_seconds)

    def _best_points(self, charges: NDArray[np.float32]) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the grid point of least cost within the limit, or the first one within reach beyond it."""
        grid_seconds = _in_single_precision(self.grid_seconds[: self.num_within])
        with np.errstate(over="ignore"):
            within = (charges[:, : self.num_within] * grid_seconds).argmin(axis=1)
        feasible = np.isfinite(charges[:, self.num_within - 1])
        beyond = self.num_within + np.isfinite(charges[:, self.num_within :]).argmax(axis=1)
        return np.where(feasible, within, beyond), feasible

    def _per_stage(self, stages: PlanStages, of_plan: Ints) -> Ints:
        return np.repeat(of_plan, np.diff(stages.starts, append=stages.rows.size))

    def _keeps_caps(self, stages: PlanStages, point: Ints) -> NDArray[np.bool_]:
        types = stages.rows % self.num_types
        where = stages.rows, self._per_stage(stages, point)
        units = np.where(np.isfinite(self.rates[where]), self.units[where], np.inf)
        if (of_machine := self.table.machine_units) is not None:
            units = np.ceil(units / of_machine[types]) * of_machine[types]
        plan = self._per_stage(stages, np.arange(point.size))
        used = np.bincount(
            plan * self.num_types + types, weights=units, minlength=point.size * self.num_types
        ).reshape(-1, self.num_types)
        return np.asarray((used <= self.table.max_units * (1 + 1e-5)).all(axis=1))

    def _first_point_within_caps(self, stages: PlanStages) -> Ints:
        """Return the first grid point at which each plan keeps the caps, or the number of points.

        More time never takes more units, so bisection over the grid finds it.
        """
        low = np.zeros(stages.starts.size, dtype=np.int64)
        high = np.full(stages.starts.size, self.grid_seconds.size)
        while (low < high).any():
            middle = (low + high) // 2
            # Where the search has ended, middle may be one past the grid; it is not used there.
            keeps = self._keeps_caps(stages, np.minimum(middle, self.grid_seconds.size - 1))
            is_open = low < high
            high = np.where(is_open & keeps, middle, high)
            low = np.where(is_open & ~keeps, middle + 1, low)
        return low

    def _shortfalls(
        self, stages: PlanStages, point: Ints, feasible: NDArray[np.bool_], reachable: NDArray[np.bool_]
    ) -> Floats:
        limit_seconds = self.grid_seconds[self.num_within - 1]
        late = np.log(self.grid_seconds[point] / limit_seconds)
        shortfalls = np.where(feasible, 0.0, np.maximum(late, 1e-3))
        if not reachable.all():
            does_not_fit = ~np.isfinite(self.rates[stages.rows, -1])
            misfits = np.add.reduceat(does_not_fit.astype(np.float64), stages.starts)
            shortfalls = np.where(reachable, shortfalls, _MISFIT_SHORTFALL + misfits)
        return shortfalls


def _in_single_precision(values: Floats) -> NDArray[np.float32]:
    """Return the values, finite ones beyond the range of single precision at its end."""
    largest = float(np.finfo(np.float32).max)
    return np.where(np.isfinite(values), np.minimum(values, largest), values).astype(np.float32)
