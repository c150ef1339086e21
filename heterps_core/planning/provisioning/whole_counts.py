"""What the provisioning baselines share: the least whole counts at the floor, and the cap on units at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.arrays import Ints
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import LayerRun, balance_replicas, fixed_stages
from heterps_core.plans.scheduling_plan import Stage


def least_replicas_at_floor(problem: SchedulingProblem, runs: Sequence[LayerRun]) -> Ints:
    """Return the least count of each stage alone that keeps floor, memory and the cap of its type, shape (S,).

    Raises:
        InfeasiblePlanError: A stage has none; names the constraint that fails.
    """
    limit_seconds = problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE)
    replicas = fixed_stages(problem, runs).table.least_replicas(np.array([limit_seconds]))[0]
    if not np.isfinite(replicas).all():
        # What one stage cannot keep alone, no provisioning keeps; the exact one says what it is.
        balance_replicas(problem, runs)
    return np.asarray(replicas, dtype=np.int64)


def stages_within_caps(
    problem: SchedulingProblem, runs: Sequence[LayerRun], replicas: Sequence[int], *, method: str
) -> tuple[Stage, ...]:
    """Return the runs as stages with these counts.

    Raises:
        InfeasiblePlanError: They take more units of a type than there are.
    """
    stages = tuple(Stage(*run, num_replicas=int(count)) for run, count in zip(runs, replicas, strict=True))
    for name, unit in problem.device_types.items():
        taken = sum(stage.num_replicas for stage in stages if stage.device_type == name)
        if taken > unit.max_units:
            raise InfeasiblePlanError(
                "units cap",
                f"{method} takes {taken} units of {name}, but max_units is {unit.max_units}; raise it, or use "
                f"balance_replicas, which looks for counts within the caps",
            )
    return stages
