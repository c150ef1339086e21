"""Whether some plan keeps memory and caps at a longest stage time, and which stage times make sense."""

from __future__ import annotations

import time

import numpy as np

from heterps_core.planning.cost_model.arrays import Ints
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.capped.capped_chain import CappedChain, prices_of_differing_neighbours
from heterps_core.planning.search.capped.partial_plans import MAX_PARTIAL_PLANS, cheapest_below
from heterps_core.planning.search.capped.scarcity_prices import ascend

_FIRST_PARTIAL_PLANS = 64
"""Kept in the first search; four times as many in each further one."""


class FeasibilitySearch:
    """Finds plans that keep memory and caps at given stage times, whatever they cost.

    Args:
        table: Candidate stages of the problem, shape (G, T).
        deadline: Of `time.process_time`, from which on no plan is met; infinite for none.
    """

    def __init__(
        self,
        problem: SchedulingProblem,
        table: StageTable,
        *,
        most_stages: int | None = None,
        deadline: float = np.inf,
    ) -> None:
        self.table, self.most_stages, self.deadline = table, most_stages, deadline
        self.num_layers = problem.num_layers
        self.change_prices = (
            prices_of_differing_neighbours(np.arange(len(problem.device_types)), problem.num_layers)
            if problem.neighbours_differ
            else None
        )

    def reached_within(self, x: float) -> float:
        """Return the longest stage time of a plan that was met within x, infinite where none was."""
        rows, reached = self.plan_within(x)
        return np.inf if rows is None or not rows.size else reached

    def plan_within(self, x: float) -> tuple[Ints | None, float]:
        """Return the rows of a plan and its longest stage time: none where there is none, None where it is open."""
        if time.process_time() >= self.deadline:
            return None, x
        replicas = self.table.least_replicas(np.array([x]))[0]
        flat = replicas.reshape(-1)
        rows = np.flatnonzero(np.isfinite(flat))
        types = rows % self.table.max_units.size
        units = self.table.taken_units(replicas).reshape(-1)[rows]
        chain = CappedChain(
            rows,
            prices=units / self.table.max_units[types],
            units=units,
            caps=self.table.max_units,
            num_layers=self.num_layers,
            change_prices=self.change_prices,
            further=None
            if self.most_stages is None
            else (np.ones((1, rows.size)), np.array([float(self.most_stages)])),
        )
        everything = chain.highest_price()
        ascent = ascend(chain, target=everything)
        if ascent.lower_bound >= everything:
            return np.empty(0, dtype=np.int64), x
        most_partial_plans = _FIRST_PARTIAL_PLANS
        found = None if ascent.best is None else chain.rows[ascent.best]
        while found is None and most_partial_plans <= MAX_PARTIAL_PLANS:
            if time.process_time() >= self.deadline:
                return None, x
            searched = cheapest_below(
                chain,
                ascent.scarcity,
                target=everything,
                most_partial_plans=most_partial_plans,
                is_over=lambda: time.process_time() >= self.deadline,
            )
            if searched.rows is None and searched.is_settled:
                return np.empty(0, dtype=np.int64), x
            found = searched.rows
            most_partial_plans *= 4
        if found is None:
            return None, x
        return found, float(self.table.take(found).seconds(flat[found]).max())


def stage_time_range(problem: SchedulingProblem, table: StageTable) -> tuple[float, float]:
    """Return the shortest longest-stage time that any plan could have, and the longest that makes sense.

    No plan beats its slowest layer, computed alone with all units of its best type. With more time than
    the slowest stage needs on the fewest replicas that hold it, nothing gets cheaper.
    """
    alone = np.arange(problem.num_layers)
    alone = alone * (alone + 1) // 2 + alone
    fastest = table.compute_seconds * (
        1 - table.compute_parallel_fraction + table.compute_parallel_fraction / table.max_units
    )
    low_seconds = float(fastest[alone].min(axis=1).max())
    fits = np.isfinite(table.fewest_replicas) & (table.fewest_replicas <= table.max_units)
    seconds = table.seconds(table.fewest_replicas)
    return low_seconds, float(seconds[fits].max(initial=0.0))
