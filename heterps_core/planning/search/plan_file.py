"""A plan file together with the problem file that it was made for, checked against each other."""

from __future__ import annotations

from pathlib import Path

from heterps_core.errors import ConfigurationError, MalformedDocumentError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage


def load_problem_and_plan(problem_path: Path, plan_path: Path) -> tuple[SchedulingProblem, SchedulingPlan]:
    """Read a problem and a plan of `heterps plan --output` that fits it.

    A plan below the throughput floor fits; one whose stages do not cover the layers, lack memory, or take more units
    than there are does not.

    Raises:
        ConfigurationError: A file cannot be read, or the plan does not fit the problem.
        MalformedDocumentError: A file is no JSON, or a field breaks its rule; carries the file.
    """
    problem, plan = SchedulingProblem.load(problem_path), SchedulingPlan.load(plan_path)
    for index, stage in enumerate(plan.stages):
        _check_stage(f"{plan_path}: stages[{index}]", stage, problem)
    try:
        violations = evaluate(problem, plan.stages).violations
    except ConfigurationError as error:
        raise ConfigurationError(f"{plan_path} does not fit {problem_path}: {error}") from error
    for violation in violations:
        if violation.constraint != "throughput floor":
            raise ConfigurationError(f"{plan_path} does not fit {problem_path}: {violation}; plan again")
    return problem, plan


def _check_stage(path: str, stage: Stage, problem: SchedulingProblem) -> None:
    """Check what the cost model takes for granted."""
    for field, name in zip(("device_type", "second_device_type"), stage.replicas_by_type, strict=False):
        if name not in problem.device_types:
            rule = f"must be one of the problem's, {', '.join(problem.device_types)}, got {name!r}"
            raise MalformedDocumentError(f"{path}.{field}", rule)
    for name, least, most in (
        ("last_layer", 0, problem.num_layers - 1),
        ("num_replicas", 1, sum(problem.device_types[name].max_units for name in stage.replicas_by_type)),
    ):
        if (value := getattr(stage, name)) > most:
            rule = f"must be a whole number in {least}..{most}, got {value}"
            raise MalformedDocumentError(f"{path}.{name}", rule)
    if stage.shares and not stage.second_device_type:
        raise MalformedDocumentError(f"{path}.shares", "are measured in training; leave them out of a plan")
