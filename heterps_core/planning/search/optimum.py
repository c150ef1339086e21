"""The cheapest plan of a problem with its proof: the optimum, or a lower bound that no plan undercuts.

This is the certificate that every plan carries, whatever method found it. The proof is a branch and bound over the
longest stage time and the caps on units (`capped/capped_search.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.field_rules import LARGEST_NUMBER
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.instance_cover import NO_STAIRS
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import segment_row, segment_table
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.cost_model.step_model import step_groups
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.provisioning.replica_balance import floor_missed, memory_text
from heterps_core.planning.provisioning.stage_time_search import (
    least_stage_seconds,
)
from heterps_core.planning.search.capped.best_plan import ABOVE_FLOOR, MOST_FLOORS
from heterps_core.planning.search.capped.capped_search import NO_PLAN, CappedSearch, CheapestPlan
from heterps_core.planning.search.capped.feasibility import FeasibilitySearch, stage_time_range
from heterps_core.planning.search.capped.mixed_search import MixedSearch
from heterps_core.plans.scheduling_plan import Stage

MAX_SECONDS = 60.0
"""After which a search ends with a gap where no other limit is given; scarce units may keep it busy for hours."""

_UNLIMITED = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The cheapest plan there is, with its proof."""

    stages: tuple[Stage, ...]
    cost_usd: float
    cost_lower_bound_usd: float
    """Equal to the cost where the optimum is proven, below it where the search over caps gave up."""


def find_optimum(
    problem: SchedulingProblem,
    *,
    seconds: float = MAX_SECONDS,
    known: Sequence[Stage] = (),
    propose: Callable[[], Sequence[Stage] | None] | None = None,
) -> Optimum:
    """Return the cheapest plan and the proven lower bound on the cost of any plan.

    Args:
        seconds: After about so many seconds of this process's processor time the best plan and bound so far are
            returned. The search for the reason where there is no plan ends with them as well.
        known: A plan to begin with.
        propose: Returns a plan of another method, where the proof takes many steps.

    By the trainer's step plans are proven by its formula, and the one that is found is simulated: it costs what its
    simulation says, and keeps the floor there. Where steps drain, the search simulates all plans that it meets.

    Raises:
        InfeasiblePlanError: No plan keeps all constraints; names the one that cannot be kept. Or none was met, and
            the message says that none is proven impossible.
    """
    deadline = time.process_time() + seconds
    stages, bound_usd, is_proven = _proven(problem, known, deadline, propose)
    if problem.step_model is StepModel.TRAINER:
        stages, cost_usd = _judged(problem, stages, deadline)
        is_proven = is_proven and cost_usd <= bound_usd * (1 + COMPARISON_TOLERANCE)
    else:
        cost_usd = evaluate(problem, stages).cost_usd
    if problem.mixes_device_types:
        stages = tuple(part.with_shares for part in evaluate(problem, stages).stages)
    return Optimum(
        stages=stages,
        cost_usd=cost_usd,
        cost_lower_bound_usd=cost_usd if is_proven else min(cost_usd, bound_usd),
    )


def proven_bound_usd(
    problem: SchedulingProblem, *, seconds: float = MAX_SECONDS, known: Sequence[Stage] = ()
) -> float:
    """Return a cost in USD that no plan undercuts, without simulating any; arguments as in `find_optimum`.

    Raises:
        InfeasiblePlanError: As `find_optimum`, but not where only the plans that it simulates miss the floor.
    """
    return _proven(problem, known, time.process_time() + seconds)[1]


def _proven(
    problem: SchedulingProblem,
    known: Sequence[Stage],
    deadline: float,
    propose: Callable[[], Sequence[Stage] | None] | None = None,
) -> tuple[tuple[Stage, ...], float, bool]:
    """Return the plan of least cost by the formula, the bound in USD, and whether the plan meets it."""
    found = _cheapest(problem, deadline, known, propose)
    if found.stages is None:
        is_infeasible = math.isinf(found.lower_bound)
        raise _explain_infeasibility(problem, deadline=deadline) if is_infeasible else _nothing_met(problem)
    # A bound that misses the optimum by rounding alone is the optimum.
    is_proven = found.lower_bound >= found.product * (1 - COMPARISON_TOLERANCE)
    return found.stages, float(objective_of(problem).cost_usd(found.lower_bound)), is_proven


def _cheapest(
    problem: SchedulingProblem,
    deadline: float,
    known: Sequence[Stage] = (),
    propose: Callable[[], Sequence[Stage] | None] | None = None,
) -> CheapestPlan:
    """Return the plan of least cost by the formula and the bound; stages of two device types come last."""
    found = CappedSearch(problem, known=known, deadline=deadline, propose=propose).run()
    return MixedSearch(problem, found, deadline=deadline).run() if problem.mixes_device_types else found


def _judged(
    problem: SchedulingProblem, cheapest: tuple[Stage, ...], deadline: float
) -> tuple[tuple[Stage, ...], float]:
    """Return the cheapest plan that keeps the floor when simulated, and its cost.

    Stages wait for one another by a little: where that misses the floor, one so much higher is asked for.

    Raises:
        InfeasiblePlanError: None of them keeps the floor.
    """
    stages: tuple[Stage, ...] | None = cheapest
    asked = problem
    for _ in range(MOST_FLOORS):
        assert stages is not None
        evaluation = evaluate(problem, stages)
        if not evaluation.violations:
            return stages, evaluation.cost_usd
        missed = problem.throughput_floor_samples_per_s / evaluation.throughput_samples_per_s
        higher = asked.throughput_floor_samples_per_s * missed * (1 + ABOVE_FLOOR)
        asked = replace(asked, throughput_floor_samples_per_s=higher)
        stages = _cheapest(asked, deadline).stages
        if stages is None:
            break
    raise InfeasiblePlanError(
        "throughput floor",
        f"stages wait for one another: the plans of the highest throughput by the formula reach "
        f"{evaluation.throughput_samples_per_s:.6g} samples/s when simulated, below the floor of "
        f"{problem.throughput_floor_samples_per_s:.6g}; lower the floor or raise max_units",
    )


def highest_throughput(problem: SchedulingProblem, *, deadline: float | None = None) -> float:
    """Return the highest throughput in samples/s that memory and caps allow, 0 where no plan was met.

    Where the deadline (of `time.process_time`; by default in `MAX_SECONDS`) passes, it is the highest that was met.
    """
    deadline = time.process_time() + MAX_SECONDS if deadline is None else deadline
    least_seconds = math.inf
    for group in step_groups(problem):
        table = segment_table(problem, num_microbatches=group.num_microbatches)
        low_seconds, high_seconds = stage_time_range(problem, table)
        if low_seconds >= least_seconds:
            break
        found = least_stage_seconds(
            FeasibilitySearch(
                problem, table, most_stages=group.most_stages, deadline=deadline
            ).reached_within,
            low_seconds=low_seconds,
            high_seconds=high_seconds,
        )
        least_seconds = min(least_seconds, found)
    if problem.mixes_device_types:
        anyhow = replace(problem, throughput_floor_samples_per_s=0.0)
        search = MixedSearch(anyhow, NO_PLAN, deadline=deadline)
        low_seconds, high_seconds = search.stage_time_range()
        found = least_stage_seconds(
            search.reached_within, low_seconds=low_seconds, high_seconds=min(high_seconds, least_seconds)
        )
        least_seconds = min(least_seconds, found)
    return problem.batch_size / least_seconds


def may_have_plan(problem: SchedulingProblem, *, seconds: float = MAX_SECONDS) -> bool:
    """Return whether some plan keeps memory, caps and the floor by the formula; true where the seconds end first."""
    deadline = time.process_time() + seconds
    limit_seconds = problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE)
    for group in step_groups(problem):
        table = segment_table(problem, num_microbatches=group.num_microbatches)
        if _has_plan(problem, table, deadline, most_stages=group.most_stages, limit_seconds=limit_seconds):
            return True
    if not problem.mixes_device_types:
        return False
    search = MixedSearch(problem, NO_PLAN, deadline=deadline)
    high_seconds = min(search.stage_time_range()[1], limit_seconds)
    return math.isfinite(search.reached_within(high_seconds))


def _explain_infeasibility(problem: SchedulingProblem, *, deadline: float) -> InfeasiblePlanError:
    """Return the error that names the constraint that no plan keeps, and how far it is missed.

    Constraints are dropped one after the other, the floor first, then the caps: the first whose absence
    lets a plan exist is the one that is named. Where the deadline passes before that is known, none is.
    """
    error = _missed_constraint(problem, deadline)
    if time.process_time() < deadline:
        return error
    return InfeasiblePlanError(
        "constraints",
        "it is proven that no plan keeps memory, max_units and the floor, but the search for the one that is missed "
        "ended with its seconds; give it more, lower the floor, or raise max_units",
    )


def _missed_constraint(problem: SchedulingProblem, deadline: float) -> InfeasiblePlanError:
    table = segment_table(problem)
    if _has_plan(problem, table, deadline) or problem.mixes_device_types:
        highest = highest_throughput(problem, deadline=deadline)
        if highest:
            return floor_missed(problem, problem.batch_size / highest)
        if not problem.mixes_device_types:
            return _nothing_met(problem)
    if _has_plan(problem, _with_scaled_caps(table, _UNLIMITED), deadline):
        factor = _least_factor(lambda scale: _has_plan(problem, _with_scaled_caps(table, scale), deadline))
        return InfeasiblePlanError(
            "units cap",
            f"memory alone takes more units than max_units allows; {factor:.3g} times as many units of every "
            f"device type would be enough",
        )
    factor = _least_factor(lambda scale: _fits_into_memory(problem, scale, deadline))
    return InfeasiblePlanError(
        "memory",
        f"the state of the layers fits on no chain of device types; {factor:.3g} times the memory_bytes of "
        f"every device type would be enough{_largest_misfit(problem, table)}",
    )


def _nothing_met(problem: SchedulingProblem) -> InfeasiblePlanError:
    if problem.drains and problem.throughput_floor_samples_per_s > 0:
        return InfeasiblePlanError(
            "throughput floor",
            f"stages wait for one another in steps that drain: no plan that was met reaches "
            f"{problem.throughput_floor_samples_per_s:.6g} samples/s when simulated; lower the floor, raise "
            f"max_units, or delay updates",
        )
    return InfeasiblePlanError(
        "constraints",
        "the search over the caps ended before it met one, though none is proven impossible; give it more seconds, "
        "raise max_units, lower the floor, join layers, or use the scheduler 'genetic'",
    )


def _has_plan(
    problem: SchedulingProblem,
    table: StageTable,
    deadline: float,
    *,
    most_stages: int | None = None,
    limit_seconds: float = math.inf,
) -> bool:
    """Return whether a plan keeps memory, caps and a limit of the stage time; true from the deadline on."""
    _, high_seconds = stage_time_range(problem, table)
    if high_seconds == 0:
        return False
    search = FeasibilitySearch(problem, table, most_stages=most_stages, deadline=deadline)
    rows, _ = search.plan_within(min(high_seconds, limit_seconds))
    return rows is None or rows.size > 0


def _with_scaled_caps(table: StageTable, factor: float) -> StageTable:
    # What so many units would be charged in whole instances does not matter here, and has no table.
    return replace(
        table, max_units=np.floor(table.max_units * factor), covers=NO_STAIRS, on_demand_usd=NO_STAIRS
    )


def _fits_into_memory(problem: SchedulingProblem, factor: float, deadline: float) -> bool:
    units = {
        name: replace(unit, memory_bytes=min(unit.memory_bytes * factor, LARGEST_NUMBER))
        for name, unit in problem.device_types.items()
    }
    table = segment_table(replace(problem, device_types=units))
    return _has_plan(problem, _with_scaled_caps(table, _UNLIMITED), deadline)


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
    misfits = np.flatnonzero(~np.isfinite(table.fewest_replicas[alone]).any(axis=1))
    if not misfits.size:
        return ""
    worst = max(misfits.tolist(), key=lambda index: problem.layers[index].state_bytes)
    layer = problem.layers[worst]
    largest = max(problem.device_types.values(), key=lambda unit: unit.usable_bytes)
    return (
        f": layer {worst} ({layer.name}) alone keeps {layer.state_bytes:.6g} bytes, the largest device type "
        f"has {memory_text(largest)}"
    )
