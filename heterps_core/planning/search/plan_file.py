"""A plan file together with the problem file that it was made for, checked against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError, MalformedProblemError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.field_checks import (
    as_object,
    check_positive,
    check_text,
    member,
    object_without_duplicates,
    shown,
)
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import SchedulingPlan


def load_problem_and_plan(problem_path: Path, plan_path: Path) -> tuple[SchedulingProblem, SchedulingPlan]:
    """Read a problem and a plan of `heterps plan --output` that fits it.

    A plan below the throughput floor fits; one whose stages do not cover the layers, lack memory, or take more units
    than there are does not.

    Raises:
        ConfigurationError: A file cannot be read, or the plan does not fit the problem.
        MalformedProblemError: A file is no JSON, or a field breaks its rule; carries the file.
    """
    try:
        problem = SchedulingProblem.load(problem_path)
    except MalformedProblemError as error:
        raise _of_file(problem_path, error) from error
    document = _read_json(plan_path)
    try:
        plan = _plan_from_json(document, problem)
    except MalformedProblemError as error:
        raise _of_file(plan_path, error) from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{plan_path} cannot be used: {error}") from error
    try:
        violations = evaluate(problem, plan.stages).violations
    except ConfigurationError as error:
        raise ConfigurationError(f"{plan_path} does not fit {problem_path}: {error}") from error
    for violation in violations:
        if violation.constraint != "throughput floor":
            raise ConfigurationError(f"{plan_path} does not fit {problem_path}: {violation}; plan anew")
    return problem, plan


def _of_file(path: Path, error: MalformedProblemError) -> MalformedProblemError:
    return error if error.field == str(path) else MalformedProblemError(str(path), str(error))


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=object_without_duplicates)
    except OSError as error:
        raise ConfigurationError(f"cannot read the plan file {path}: {error.strerror}") from error
    except MalformedProblemError as error:
        raise _of_file(path, error) from error
    except RecursionError as error:
        raise MalformedProblemError(str(path), "is nested too deeply for a plan") from error
    except ValueError as error:
        # No UTF-8, no JSON, or an integer of thousands of digits.
        raise MalformedProblemError(str(path), f"is not valid JSON: {error}") from error


def _plan_from_json(document: object, problem: SchedulingProblem) -> SchedulingPlan:
    fields = as_object("plan", document)
    # Before the stages are made and evaluated, which trust the types and sizes of these.
    check_text("scheduler", member(fields, "", "scheduler"))
    check_positive("throughput_samples_per_s", member(fields, "", "throughput_samples_per_s"))
    stages = member(fields, "", "stages")
    if not isinstance(stages, list):
        raise MalformedProblemError("stages", f"must be a list of stages, got {shown(stages)}")
    for index, stage in enumerate(stages):
        _check_stage(f"stages[{index}]", as_object(f"stages[{index}]", stage), problem)
    return SchedulingPlan.from_json(fields)


def _check_stage(path: str, fields: dict[str, Any], problem: SchedulingProblem) -> None:
    name = member(fields, path, "device_type")
    if name not in problem.device_type_names:
        known = ", ".join(problem.device_types)
        raise MalformedProblemError(
            f"{path}.device_type", f"must be one of the problem's, {known}, got {shown(name)}"
        )
    last_layer, max_units = problem.num_layers - 1, problem.device_types[name].max_units
    for field, least, most in (
        ("first_layer", 0, last_layer),
        ("last_layer", 0, last_layer),
        ("num_replicas", 1, max_units),
    ):
        value = member(fields, path, field)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise MalformedProblemError(
                f"{path}.{field}", f"must be a whole number in {least}..{most}, got {shown(value)}"
            )
