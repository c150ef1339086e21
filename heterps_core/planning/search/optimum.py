"""The cheapest plan of a problem with its proof: the optimum, or a lower bound that no plan undercuts.

This is the certificate that every plan carries, whatever method found it. For a fixed longest stage time the
problem is solved by `chain_solver.py`; over the stage time it is branch and bound
(`provisioning/stage_time_search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.field_rules import LARGEST_NUMBER
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.stage_table import (
    StageTable,
    segment_layers,
    segment_row,
    segment_table,
)
from heterps_core.planning.cost_model.step_model import step_groups
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.provisioning.replica_balance import (
    LayerRun,
    fixed_stages,
    floor_missed,
    memory_text,
)
from heterps_core.planning.provisioning.stage_time_search import (
    StageTimeOptimum,
    least_stage_seconds,
    minimise_stage_time_rate,
)
from heterps_core.planning.search.chain_solver import ChainSolver, ReplicatedRows
from heterps_core.plans.scheduling_plan import Stage

_POINTS_PER_ROUND = 32
"""Stage times per round of the branch and bound."""

_MOST_FLOORS = 4
"""Floors that are asked for one after the other where plans miss the problem's own when simulated."""

_ABOVE_FLOOR = 1e-4
"""Relative distance of what is asked for from what would be enough."""

_UNLIMITED = 1e12
"""Factor on the caps that stands for no caps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The cheapest plan there is, with its proof."""

    stages: tuple[Stage, ...]
    cost_usd: float
    cost_lower_bound_usd: float
    """Equal to the cost where the optimum is proven, below it where the search over caps gave up."""


def find_optimum(problem: SchedulingProblem) -> Optimum:
    """Return the cheapest plan and the proven lower bound on the cost of any plan.

    By the trainer's step plans are proven by its formula, and the one that is found is simulated: it costs what its
    simulation says, and keeps the floor there.

    Raises:
        InfeasiblePlanError: No plan keeps all constraints; names the one that cannot be kept. Or none was met, and
            the message says that none is proven impossible.
    """
    stages, bound_usd, is_proven = _proven(problem)
    if problem.step_model is StepModel.TRAINER:
        stages, cost_usd = _judged(problem, stages)
        is_proven = is_proven and cost_usd <= bound_usd * (1 + COMPARISON_TOLERANCE)
    else:
        cost_usd = evaluate(problem, stages).cost_usd
    return Optimum(
        stages=stages,
        cost_usd=cost_usd,
        cost_lower_bound_usd=cost_usd if is_proven else min(cost_usd, bound_usd),
    )


def proven_bound_usd(problem: SchedulingProblem) -> float:
    """Return a cost in USD that no plan undercuts, without simulating any.

    Raises:
        InfeasiblePlanError: As `find_optimum`, but not where only the plans that it simulates miss the floor.
    """
    return _proven(problem)[1]


def _proven(problem: SchedulingProblem) -> tuple[tuple[Stage, ...], float, bool]:
    """Return the plan of least cost by the formula, the bound in USD, and whether the plan meets it."""
    found = _cheapest_by_formula(problem)
    if found.plan is None:
        raise explain_infeasibility(problem) if math.isinf(found.lower_bound) else _nothing_met()
    # A bound that misses the optimum by rounding alone is the optimum.
    is_proven = found.lower_bound >= found.product * (1 - COMPARISON_TOLERANCE)
    return found.plan, float(objective_of(problem).cost_usd(found.lower_bound)), is_proven


def _judged(problem: SchedulingProblem, cheapest: tuple[Stage, ...]) -> tuple[tuple[Stage, ...], float]:
    """Return the cheapest plan that keeps the floor when simulated, and its cost.

    Stages wait for one another by a little: where that misses the floor, one so much higher is asked for.

    Raises:
        InfeasiblePlanError: None of them keeps the floor.
    """
    stages: tuple[Stage, ...] | None = cheapest
    asked = problem
    for _ in range(_MOST_FLOORS):
        assert stages is not None
        evaluation = evaluate(problem, stages)
        if not evaluation.violations:
            return stages, evaluation.cost_usd
        missed = problem.throughput_floor_samples_per_s / evaluation.throughput_samples_per_s
        higher = asked.throughput_floor_samples_per_s * missed * (1 + _ABOVE_FLOOR)
        asked = replace(asked, throughput_floor_samples_per_s=higher)
        stages = _cheapest_by_formula(asked).plan
        if stages is None:
            break
    raise InfeasiblePlanError(
        "throughput floor",
        f"stages wait for one another: the plans of the highest throughput by the formula reach "
        f"{evaluation.throughput_samples_per_s:.6g} samples/s when simulated, below the floor of "
        f"{problem.throughput_floor_samples_per_s:.6g}; lower the floor or raise max_units",
    )


def _cheapest_by_formula(problem: SchedulingProblem) -> StageTimeOptimum[tuple[Stage, ...]]:
    objective = objective_of(problem)
    limit_seconds = problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE)
    stages: tuple[Stage, ...] | None = None
    best_product = lower_bound = math.inf

    def minimise(solver: ChainSolver) -> StageTimeOptimum[ReplicatedRows]:
        low_seconds, high_seconds = stage_time_range(problem, solver.table)
        return minimise_stage_time_rate(
            solver,
            low_seconds=low_seconds,
            high_seconds=min(high_seconds, limit_seconds),
            batch_size=_POINTS_PER_ROUND,
            known_product=best_product,
        )

    for group in step_groups(problem):
        table = segment_table(problem, num_microbatches=group.num_microbatches)
        # More micro-batches only cost more: what a plan costs with those of this group, those of all further groups
        # cost at least. So if the best of all plans is one of this group, or none is better, they need no look.
        is_last = group.most_stages in (None, problem.num_layers)
        if group.most_stages != 1 or is_last:
            found = minimise(ChainSolver(table, objective))
            if found.plan is None or is_last or found.plan.rows.size <= (group.most_stages or 0):
                is_last = True
            else:
                improved = _rebalanced(problem, _as_stages(problem, found.plan))
                if improved is not None and improved[1] < best_product:
                    stages, best_product = improved
        if not is_last:
            found = minimise(ChainSolver(table, objective, most_stages=group.most_stages))
        lower_bound = min(lower_bound, found.lower_bound)
        if found.plan is not None:
            stages, best_product = _as_stages(problem, found.plan), found.product
        if is_last:
            break
    return StageTimeOptimum(plan=stages, product=best_product, lower_bound=lower_bound)


def _rebalanced(
    problem: SchedulingProblem, stages: tuple[Stage, ...]
) -> tuple[tuple[Stage, ...], float] | None:
    """Return these stages with the best replicas for their own number of micro-batches, and the product."""
    runs = [LayerRun(stage.first_layer, stage.last_layer, stage.device_type) for stage in stages]
    fixed = fixed_stages(problem, runs)
    found = fixed.cheapest_replicas(limit_seconds=problem.stage_seconds_limit)
    if found.plan is None:
        return None
    counts = found.plan.tolist()
    return tuple(
        replace(stage, num_replicas=int(count)) for stage, count in zip(stages, counts, strict=True)
    ), found.product


def highest_throughput(problem: SchedulingProblem) -> float:
    """Return the highest throughput in samples/s that memory and caps allow, 0 where no plan was met.

    Where the search over caps gives up, it is the highest that was met.
    """
    objective = objective_of(problem)
    least_seconds = math.inf
    for group in step_groups(problem):
        table = segment_table(problem, num_microbatches=group.num_microbatches)
        low_seconds, high_seconds = stage_time_range(problem, table)
        if low_seconds >= least_seconds:
            break
        solver = ChainSolver(table, objective, most_stages=group.most_stages)
        found = least_stage_seconds(solver, low_seconds=low_seconds, high_seconds=high_seconds)
        least_seconds = min(least_seconds, found)
    return problem.batch_size / least_seconds


def explain_infeasibility(problem: SchedulingProblem) -> InfeasiblePlanError:
    """Return the error that names the constraint that no plan keeps, and how far it is missed.

    Constraints are dropped one after the other, the floor first, then the caps: the first whose absence
    lets a plan exist is the one that is named.
    """
    table = segment_table(problem)
    if _has_plan(problem, table):
        highest = highest_throughput(problem)
        return floor_missed(problem, problem.batch_size / highest) if highest else _nothing_met()
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


def _nothing_met() -> InfeasiblePlanError:
    return InfeasiblePlanError(
        "constraints",
        "the search over the caps gave up before it met one, though none is proven impossible; raise max_units, "
        "lower the floor, join layers, or use the scheduler 'genetic'",
    )


def _as_stages(problem: SchedulingProblem, plan: ReplicatedRows) -> tuple[Stage, ...]:
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


def _has_plan(problem: SchedulingProblem, table: StageTable) -> bool:
    """Return whether a plan keeps memory and caps, the floor left aside."""
    _, high_seconds = stage_time_range(problem, table)
    if high_seconds == 0:
        return False
    solver = ChainSolver(table, objective_of(problem))
    return bool(np.isfinite(solver.solve(np.array([high_seconds]), np.inf).rates[0]))


def _with_scaled_caps(table: StageTable, factor: float) -> StageTable:
    # What so many units would be charged in whole instances does not matter here, and has no table.
    return replace(table, max_units=np.floor(table.max_units * factor), covers={})


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
    largest = max(problem.device_types.values(), key=lambda unit: unit.usable_bytes)
    return (
        f": layer {worst} ({layer.name}) alone keeps {layer.state_bytes:.6g} bytes, the largest device type "
        f"has {memory_text(largest)}"
    )
