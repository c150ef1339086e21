"""What a user gets for a problem file that is not as it should be: a status of the contract and one line.

HETERPS_FUZZED_FILES=10000 asks for more files than an ordinary test run can afford, drawn again each time.
"""

import contextlib
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.cli import main
from heterps_core.errors import MalformedDocumentError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem
from tests.heterps_core.planning.problem.damaged_files import (
    TERMS,
    places_in,
    problem_files,
    with_optional_fields,
)

NUM_FILES = int(os.environ.get("HETERPS_FUZZED_FILES", "300"))
FAST_SCHEDULERS = ["exact", "greedy", "heuristic", "cpu-only", "gpu-only"]
EXPLANATIONS = ["none", "none", "none", "none", "none", "none", "short", "full"]
"""Explaining a plan takes as long as dozens of searches."""

CONSTRAINTS = ("throughput floor", "memory", "units cap", "choice of device types")
UNKNOWN_CONSTRAINT = "constraints"
"""Named by a method that cannot find a plan though there is one."""

NO_NUMBERS = [None, "12", True, [], {}, -1, float("nan"), float("inf"), 10**400]


def plan_of(content, scheduler, explanation):
    """Run the command on a file of these bytes.

    Return status, what was printed, the plan if there is one, and the problem unless it is malformed.
    """
    with TemporaryDirectory() as folder:
        problem_path, plan_path = Path(folder) / "problem.json", Path(folder) / "plan.json"
        problem_path.write_bytes(content)
        arguments = ["plan", str(problem_path), "--scheduler", scheduler, "--explain", explanation]
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            status = main([*arguments, "--output", str(plan_path)])
        plan = json.loads(plan_path.read_text()) if plan_path.exists() else None
        try:
            problem = SchedulingProblem.load(problem_path)
        except MalformedDocumentError:
            problem = None
    return status, printed.getvalue(), errors.getvalue(), plan, problem


def check_answer(content, scheduler, explanation):
    """Check that the command answers a file with a sound plan or one line that names what is wrong."""
    status, printed, errors, plan, problem = plan_of(content, scheduler, explanation)
    assert status in {0, 2, 3}
    assert (status == 2) == (problem is None), errors
    if status == 0:
        assert errors == ""
        check_plan(problem, plan)
        return
    assert (printed, plan) == ("", None)
    assert errors.startswith("heterps: error: ")
    assert errors.endswith("\n")
    assert len(errors.splitlines()) == 1, errors
    if status == 2:
        _, _, fault = errors.partition("problem.json: ")
        assert fault.strip(), errors
    else:
        named = CONSTRAINTS if scheduler == "exact" else (*CONSTRAINTS, UNKNOWN_CONSTRAINT)
        assert any(f"no plan meets the {name}: " in errors for name in named), errors


def check_plan(problem, plan):
    """Check a plan's figures against the plain form of the contract's formulas."""
    figures = [value for value in plan.values() if isinstance(value, int | float)]
    assert all(map(math.isfinite, figures)), plan
    stages = [
        Stage(*(stage[name] for name in ("first_layer", "last_layer", "device_type", "num_replicas")))
        for stage in plan["stages"]
    ]
    evaluation = evaluate(problem, stages)
    assert not evaluation.violations
    assert math.isclose(plan["cost_usd"], evaluation.cost_usd, rel_tol=1e-12)
    assert 0 < plan["cost_lower_bound_usd"] <= plan["cost_usd"]
    assert plan["optimality_gap"] >= 0


@pytest.mark.weekly
@settings(
    max_examples=NUM_FILES,
    derandomize="HETERPS_FUZZED_FILES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    content=problem_files(),
    scheduler=st.sampled_from(FAST_SCHEDULERS),
    explanation=st.sampled_from(EXPLANATIONS),
)
def test_any_file_is_answered_with_a_plan_or_one_line(content, scheduler, explanation):
    check_answer(content, scheduler, explanation)


@pytest.fixture
def document():
    return with_optional_fields(num_layers=2, num_types=2)


def path_of(document, node, key):
    """Return the path of a member as errors write it: layers[1].compute_seconds.cpu."""
    place = f"[{key}]" if isinstance(node, list) else f".{key}"
    if node is document:
        return key
    holder, holder_key = next((n, k) for n, k in places_in(document) if n[k] is node)
    return path_of(document, holder, holder_key) + place


def test_every_number_that_is_none_is_named_by_its_path(document):
    numbers = [
        (node, key)
        for node, key in places_in(document)
        if isinstance(node[key], int | float) and not isinstance(node[key], bool)
    ]
    assert len(numbers) > 2 * 6 + 2 * 9 + len(TERMS)

    for node, key in numbers:
        good = node[key]
        for bad in NO_NUMBERS:
            node[key] = bad
            with pytest.raises(MalformedDocumentError) as raised:
                SchedulingProblem.from_json(document)
            assert raised.value.field == path_of(document, node, key), bad
        node[key] = good


def test_files_of_before_with_zones_and_their_price_load(document):
    before = json.loads(json.dumps(document))
    before["extra_costs"]["transfer_usd_per_gb"] = 0.02
    before["device_types"]["cpu"]["zone"] = "us-east-1a"

    assert SchedulingProblem.from_json(before) == SchedulingProblem.from_json(document)


def test_every_required_member_that_is_missing_is_named_by_its_path(document):
    optional = {"extra_costs", "instances", "interruptions_per_hour"}
    optional |= {"compute_relative_spread", "communication_relative_spread"}
    required = [
        (node, key)
        for node, key in places_in(document)
        if isinstance(node, dict)
        and not any(name in path_of(document, node, key).split(".") for name in optional)
        and node is not document["device_types"]
    ]

    for node, key in required:
        path = path_of(document, node, key)
        kept = dict(node)
        del node[key]
        with pytest.raises(MalformedDocumentError) as raised:
            SchedulingProblem.from_json(document)
        assert str(raised.value) == f"{path}: is missing"
        node.clear()
        node.update(kept)


def test_a_problem_whose_tables_would_not_fit_into_memory_is_refused():
    problem = make_problem(0, num_layers=2, num_types=17)

    # By hand: 1,000 * 1,001 / 2 * 17.
    with pytest.raises(
        MalformedDocumentError, match=r"layers: 1000 layers on 17 .* 8,508,500 candidate stages"
    ):
        replace(problem, layers=problem.layers * 500)
