"""The cheapest plan of a problem with its proof: the optimum, or a lower bound that no plan undercuts.

This is the certificate that every plan carries, whatever method found it. For a fixed longest stage time the
problem is a chain partition (`chain_partition.py`), with binding caps a capped one; over the stage time it is
branch and bound (`provisioning/stage_time_search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.cost_model.evaluation import evaluate
from heterps_core.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.cost_model.stage_table import (
    Floats,
    Ints,
    StageTable,
    segment_layers,
    segment_row,
    segment_table,
)
from heterps_core.errors import InfeasiblePlanError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.provisioning.replica_balance import floor_missed
from heterps_core.provisioning.stage_time_search import (
    RateSolutions,
    least_stage_seconds,
    minimise_stage_time_rate,
)
from heterps_core.scheduling.capped_partition import cheapest_capped_partition, used_units
from heterps_core.scheduling.chain_partition import cheapest_partitions
from heterps_core.scheduling.problem import LARGEST_NUMBER, SchedulingProblem

_POINTS_PER_ROUND = 32
"""Stage times per round of the branch and bound."""

_NUMBERS_PER_PASS = 400_000
"""Table entries times stage times per vectorised pass; beyond it the arrays leave the cache."""

_UNLIMITED = 1e12
"""Factor on the caps that stands for no caps."""

_CUTOFF_MARGIN = 1.03
"""How far above the best cost the capped search must look: showing a rate that is only just too dear would
rule out next to nothing below the stage time, one 3 % too dear rules out 3 %."""

_UNSETTLED_STEP = 1e-3
"""Where the capped search gave up at x, the bound is taken to hold down to x (1 - this); the proof then
has a gap instead of an end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The cheapest plan there is, with its proof."""

    stages: tuple[Stage, ...]
    cost_usd: float
    cost_lower_bound_usd: float
    """Equal to the cost where the optimum is proven, below it where the search over caps gave up."""

    num_stage_times: int
    """Longest stage times that were solved."""


def find_optimum(problem: SchedulingProblem) -> Optimum:
    """Return the cheapest plan and the proven lower bound on the cost of any plan.

    Raises:
        InfeasiblePlanError: No plan keeps all constraints; names the one that cannot be kept.
    """
    solver = ChainSolver(segment_table(problem))
    low_seconds, high_seconds = stage_time_range(problem, solver.table)
    found = minimise_stage_time_rate(
        solver,
        low_seconds=low_seconds,
        high_seconds=min(high_seconds, problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE)),
        batch_size=_POINTS_PER_ROUND,
    )
    if found.plan is None:
        raise explain_infeasibility(problem)
    stages = _as_stages(problem, found.plan)
    cost_usd = evaluate(problem, stages).cost_usd
    # A bound that misses the optimum by rounding alone is the optimum.
    is_proven = found.lower_bound >= found.product * (1 - COMPARISON_TOLERANCE)
    return Optimum(
        stages=stages,
        cost_usd=cost_usd,
        cost_lower_bound_usd=cost_usd if is_proven else cost_usd * found.lower_bound / found.product,
        num_stage_times=found.num_rates,
    )


def explain_infeasibility(problem: SchedulingProblem) -> InfeasiblePlanError:
    """Return the error that names the constraint that no plan keeps, and how far it is missed.

    Constraints are dropped one after the other, the floor first, then the caps: the first whose absence
    lets a plan exist is the one that is named.
    """
    table = segment_table(problem)
    if _has_plan(problem, table):
        return floor_missed(problem, _least_seconds(problem, table))
    if _has_plan(problem, _with_scaled_caps(table, _UNLIMITED)):
        factor = _least_factor(lambda scale: _has_plan(problem, _with_scaled_caps(table, scale)))
        return InfeasiblePlanError(
            "units cap",
            f"memory alone takes more units than max_units allows; {factor:.3g} times as many units of every "
            f"device type would be enough",
        )
    factor = _least_factor(lambda scale: _fits_into_memory(problem, scale))
    return InfeasiblePlanError(
        "memory",
        f"the state of the layers fits on no chain of device types; {factor:.3g} times the memory_bytes of "
        f"every device type would be enough{_largest_misfit(problem, table)}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReplicatedRows:
    """A plan as rows of the segment table with their replica counts, in any order."""

    rows: Ints
    num_replicas: Ints


class ChainSolver:
    """Cheapest rate over all plans for given stage times; a `RateSolver`.

    Where the caps on units do not bind, the partition of the chain is exact. Where they do, it is a lower
    bound; if that bound cannot rule the stage time out, the capped search settles it.
    """

    def __init__(self, table: StageTable) -> None:
        self.table = table
        self.num_types = table.price_usd_per_hour.size

    def solve(self, stage_seconds: Floats, best_product: float) -> RateSolutions[_ReplicatedRows]:
        """Return rates for X stage times, in passes that fit the cache."""
        size = max(1, _NUMBERS_PER_PASS // self.table.compute_seconds.size)
        parts = []
        # From long to short: long stage times are the feasible ones, and a best plan prunes the rest.
        for start in range(0, stage_seconds.size, size):
            part = self._solve_pass(stage_seconds[::-1][start : start + size], best_product)
            best_product = min(best_product, float(part.products.min()))
            parts.append(part)
        return RateSolutions(
            rates=np.concatenate([part.rates for part in parts])[::-1],
            reached_seconds=np.concatenate([part.reached_seconds for part in parts])[::-1],
            products=np.concatenate([part.products for part in parts])[::-1],
            plan_at=lambda index: _plan_in_parts(parts, stage_seconds.size - 1 - index),
        )

    def _solve_pass(self, stage_seconds: Floats, best_product: float) -> RateSolutions[_ReplicatedRows]:
        replicas = self.table.least_replicas(stage_seconds)  # (X, G, T)
        found = cheapest_partitions(replicas * self.table.price_usd_per_hour)
        rates, rows = found.prices, found.rows
        is_exact = (used_units(replicas, rows, self.num_types) <= self.table.max_units).all(axis=1)
        reached_seconds = np.where(is_exact, self._slowest(replicas, rows), stage_seconds)
        reached_seconds[~np.isfinite(rates)] = stage_seconds[~np.isfinite(rates)]
        products = np.where(is_exact, rates * reached_seconds, np.inf)
        best_product = min(best_product, float(products.min()))
        # Stage times fall along the pass, so what one of them costs at least, the next ones do too.
        known_rate, known_down_to = 0.0, np.inf
        for index in np.flatnonzero(~is_exact & np.isfinite(rates)):
            x = float(stage_seconds[index])
            rates[index] = max(rates[index], known_rate)
            if x >= known_down_to:
                reached_seconds[index] = known_down_to
                continue
            if x * rates[index] >= best_product:
                continue
            capped = cheapest_capped_partition(
                replicas[index],
                unit_prices=self.table.price_usd_per_hour,
                max_units=self.table.max_units,
                cutoff=best_product / x * _CUTOFF_MARGIN,
            )
            rates[index] = max(rates[index], capped.lower_bound)
            if capped.rows is not None:
                rows[index] = -1
                rows[index, : capped.rows.size] = capped.rows
                case = slice(index, index + 1)
                units = used_units(replicas[index], rows[case], self.num_types)[0]
                reached_seconds[index] = self._slowest(replicas[case], rows[case])[0]
                products[index] = reached_seconds[index] * (units @ self.table.price_usd_per_hour)
                best_product = min(best_product, float(products[index]))
            if not capped.is_settled:
                reached_seconds[index] = x * (1 - _UNSETTLED_STEP)
            known_rate, known_down_to = float(rates[index]), float(reached_seconds[index])
        return RateSolutions(
            rates=rates,
            reached_seconds=reached_seconds,
            products=products,
            plan_at=lambda index: _replicated_rows(replicas[index], rows[index]),
        )

    def _slowest(self, replicas: Floats, rows: Ints) -> Floats:
        """Return the longest stage time of each partition, shape (X,)."""
        stages = np.maximum(rows, 0)
        counts = np.take_along_axis(replicas.reshape(len(rows), -1), stages, axis=1)
        seconds = self.table.take(stages).seconds(counts)
        return np.asarray(np.where(rows >= 0, seconds, 0.0).max(axis=1))


def _plan_in_parts(parts: Sequence[RateSolutions[_ReplicatedRows]], index: int) -> _ReplicatedRows:
    for part in parts:
        if index < part.rates.size:
            return part.plan_at(index)
        index -= part.rates.size
    raise IndexError(index)


def _replicated_rows(replicas: Floats, rows: Ints) -> _ReplicatedRows:
    stages = rows[rows >= 0]
    return _ReplicatedRows(rows=stages, num_replicas=replicas.reshape(-1)[stages].astype(np.int64))


def _as_stages(problem: SchedulingProblem, plan: _ReplicatedRows) -> tuple[Stage, ...]:
    names = problem.device_type_names
    stages = [
        Stage(*segment_layers(row // len(names)), names[row % len(names)], int(count))
        for row, count in zip(plan.rows.tolist(), plan.num_replicas, strict=True)
    ]
    return tuple(sorted(stages, key=lambda stage: stage.first_layer))


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
    fits = np.isfinite(table.memory_replicas) & (table.memory_replicas <= table.max_units)
    seconds = table.seconds(table.memory_replicas)
    return low_seconds, float(seconds[fits].max(initial=0.0))


def _least_seconds(problem: SchedulingProblem, table: StageTable) -> float:
    low_seconds, high_seconds = stage_time_range(problem, table)
    return least_stage_seconds(ChainSolver(table), low_seconds=low_seconds, high_seconds=high_seconds)


def _has_plan(problem: SchedulingProblem, table: StageTable) -> bool:
    """Return whether a plan keeps memory and caps, the floor left aside."""
    _, high_seconds = stage_time_range(problem, table)
    if high_seconds == 0:
        return False
    return bool(np.isfinite(ChainSolver(table).solve(np.array([high_seconds]), np.inf).rates[0]))


def _with_scaled_caps(table: StageTable, factor: float) -> StageTable:
    return replace(table, max_units=np.floor(table.max_units * factor))


def _fits_into_memory(problem: SchedulingProblem, factor: float) -> bool:
    units = {
        name: replace(unit, memory_bytes=min(unit.memory_bytes * factor, LARGEST_NUMBER))
        for name, unit in problem.device_types.items()
    }
    table = segment_table(replace(problem, device_types=units))
    return _has_plan(problem, _with_scaled_caps(table, _UNLIMITED))


def _least_factor(is_enough: Callable[[float], bool]) -> float:
    """Return the least factor above 1 that is enough, to three digits."""
    low, high = 1.0, 2.0
    while not is_enough(high) and high < _UNLIMITED:
        low, high = high, high * 2
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _largest_misfit(problem: SchedulingProblem, table: StageTable) -> str:
    """Name the largest layer that no device type holds even alone, if there is one."""
    alone = [segment_row(index, index) for index in range(problem.num_layers)]
    misfits = np.flatnonzero(~np.isfinite(table.memory_replicas[alone]).any(axis=1))
    if not misfits.size:
        return ""
    worst = max(misfits.tolist(), key=lambda index: problem.layers[index].state_bytes)
    layer = problem.layers[worst]
    most_bytes = max(unit.memory_bytes for unit in problem.device_types.values())
    return (
        f": layer {worst} ({layer.name}) alone keeps {layer.state_bytes:.6g} bytes, the largest device type "
        f"has {most_bytes:.6g}"
    )
