"""The cheapest plan of a problem with its proof: the optimum, or a lower bound that no plan undercuts.

This is the certificate that every plan carries, whatever method found it. For a fixed longest stage time the
problem is solved by `chain_solver.py`; over the stage time it is branch and bound
(`provisioning/stage_time_search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

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
from heterps_core.planning.cost_model.step_model import num_microbatches_of, step_groups
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

_SAME_WHEN_SIMULATED = 5e-3
"""Relative distance from the bound at which plans in which stages wait less are not looked for."""

_VARIATIONS = ((2.0, 1.0), (4.0, 0.8))
"""All-reduces so many times as long, and the share of the limit on the stage time, of plans that wait less."""

_SIMULATED_PASSES = 2_000
"""Stages times micro-batches of all plans together that are simulated to improve the best one."""

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

    By the trainer's step plans are proven by its formula and judged by its simulation: where stages of the cheapest
    plan wait for one another, plans are tried in which they do so less, and the bound stays.

    Raises:
        InfeasiblePlanError: No plan keeps all constraints; names the one that cannot be kept. Or none was met, and
            the message says that none is proven impossible.
    """
    stages, bound_usd, is_proven = _proven(problem)
    if problem.step_model is StepModel.TRAINER:
        stages, cost_usd = _judged(problem, stages, bound_usd)
        is_proven = is_proven and cost_usd <= bound_usd * (1 + COMPARISON_TOLERANCE)
    else:
        cost_usd = evaluate(problem, stages).cost_usd
    return Optimum(
        stages=stages,
        cost_usd=cost_usd,
        cost_lower_bound_usd=cost_usd if is_proven else min(cost_usd, bound_usd),
    )


def proven_bound_usd(problem: SchedulingProblem) -> float:
    """Return a cost in USD that no plan undercuts, without looking for a plan that is simulated to cost no more.

    Raises:
        InfeasiblePlanError: As `find_optimum`, but not where only the plans that it tries miss the floor.
    """
    if problem.step_model is StepModel.PAPERS:
        return find_optimum(problem).cost_lower_bound_usd
    return _proven(problem)[1]


def _proven(problem: SchedulingProblem) -> tuple[tuple[Stage, ...], float, bool]:
    """Return the plan of least cost by the formula, the bound in USD, and whether the plan meets it."""
    found = _cheapest_by_formula(problem)
    if found.plan is None:
        raise explain_infeasibility(problem) if math.isinf(found.lower_bound) else _nothing_met()
    # A bound that misses the optimum by rounding alone is the optimum.
    is_proven = found.lower_bound >= found.product * (1 - COMPARISON_TOLERANCE)
    return found.plan, float(objective_of(problem).cost_usd(found.lower_bound)), is_proven


def _judged(
    problem: SchedulingProblem, cheapest: tuple[Stage, ...], bound_usd: float
) -> tuple[tuple[Stage, ...], float]:
    """Return the plan of least simulated cost that is met, and that cost.

    Raises:
        InfeasiblePlanError: None keeps the floor.
    """
    best, best_usd = cheapest, _simulated_usd(problem, cheapest)
    enough_usd = bound_usd * (1 + _SAME_WHEN_SIMULATED)
    if best_usd <= enough_usd:
        return best, best_usd
    # The fewer stages there are, the less they wait for one another.
    candidates = [_cheapest_by_formula(problem, most_stages=most).plan for most in (2, 3, 5)]
    candidates += [_cheapest_by_formula(_varied(problem, *variation)).plan for variation in _VARIATIONS]
    for found in candidates:
        if found is not None and (usd := _simulated_usd(problem, found)) < best_usd:
            best, best_usd = found, usd
    num_passes, moves = 0, _neighbours(best)
    while best_usd > enough_usd and num_passes < _SIMULATED_PASSES and (moved := next(moves, None)):
        num_passes += len(moved) * num_microbatches_of(problem, len(moved))
        if (usd := _simulated_usd(problem, moved)) < best_usd:
            best, best_usd, moves = moved, usd, _neighbours(moved)
    if math.isinf(best_usd):
        raise InfeasiblePlanError(
            "throughput floor",
            f"stages wait for one another: the plan of the highest throughput by the formula reaches "
            f"{evaluate(problem, best).throughput_samples_per_s:.6g} samples/s when simulated, below the floor of "
            f"{problem.throughput_floor_samples_per_s:.6g}, and no other plan was met; lower the floor or raise "
            f"max_units",
        )
    return best, best_usd


def _simulated_usd(problem: SchedulingProblem, stages: tuple[Stage, ...]) -> float:
    """Return the cost of a plan, infinite where it breaks a constraint."""
    evaluation = evaluate(problem, stages)
    return math.inf if evaluation.violations else evaluation.cost_usd


def _varied(problem: SchedulingProblem, weight: float, share: float) -> SchedulingProblem:
    """Return the problem with all-reduces so many times as long, and a floor that this share of the limit keeps.

    Others wait for a stage while it sums gradients, so shorter sums and some slack wait less.
    """
    layers = tuple(
        layer
        if layer.is_sharded
        else replace(
            layer,
            communication_seconds={
                name: weight * seconds for name, seconds in layer.communication_seconds.items()
            },
        )
        for layer in problem.layers
    )
    return replace(
        problem,
        layers=layers,
        throughput_floor_samples_per_s=problem.throughput_floor_samples_per_s / share,
    )


def _neighbours(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """Yield the plans with other replicas of one stage, or one boundary moved by a layer."""
    for index, stage in enumerate(stages):
        for count in (stage.num_replicas + step for step in (-2, -1, 1, 2)):
            if count >= 1:
                yield (*stages[:index], replace(stage, num_replicas=count), *stages[index + 1 :])
    for index, (left, right) in enumerate(pairwise(stages)):
        for cut in (left.last_layer - 1, left.last_layer + 1):
            if left.first_layer <= cut < right.last_layer:
                moved = replace(left, last_layer=cut), replace(right, first_layer=cut + 1)
                yield (*stages[:index], *moved, *stages[index + 2 :])


def _cheapest_by_formula(
    problem: SchedulingProblem, *, most_stages: int | None = None
) -> StageTimeOptimum[tuple[Stage, ...]]:
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
        if most_stages is not None and (group.most_stages or math.inf) > most_stages:
            break
        table = segment_table(problem, num_microbatches=group.num_microbatches)
        # More micro-batches only cost more: what a plan costs with those of this group, those of all further groups
        # cost at least. So if the best of all plans is one of this group, or none is better, they need no look.
        is_last = group.most_stages in (None, problem.num_layers)
        if (group.most_stages != 1 and most_stages is None) or is_last:
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
