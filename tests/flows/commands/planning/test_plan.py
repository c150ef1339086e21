import json
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli import main
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from tests.paths import PROJECT, TESTS

PROBLEMS = TESTS / "golden" / "problems"
FIVE_LAYERS = str(PROBLEMS / "five_layers_1.json")

PLAN_FIELDS = {
    "schema_version",
    "scheduler",
    "seed",
    "stages",
    "throughput_samples_per_s",
    "price_usd_per_hour",
    "cost_usd",
    "cost_lower_bound_usd",
    "optimality_gap",
    "num_evaluations",
    "search_seconds",
}


def test_writes_the_contracts_fields_and_prints_a_table(tmp_path, capsys):
    output = tmp_path / "plan.json"

    status = main(["plan", FIVE_LAYERS, "--scheduler", "exact", "--seed", "5", "--output", str(output)])

    plan = json.loads(output.read_text())
    assert status == 0
    assert set(plan) >= PLAN_FIELDS
    assert (plan["scheduler"], plan["seed"], plan["optimality_gap"]) == ("exact", 5, 0)
    assert plan["stages"][1] == {
        "first_layer": 2,
        "last_layer": 4,
        "device_type": "gpu_b",
        "num_replicas": 2,
    }
    printed = capsys.readouterr().out
    assert "1.561005 USD" in printed
    assert "0 (proven optimal)" in printed
    assert "<- slowest" in printed


def test_the_budget_reaches_the_search(tmp_path):
    output = tmp_path / "plan.json"

    main(
        ["plan", FIVE_LAYERS, "--scheduler", "bayesian", "--budget-evaluations", "9", "--output", str(output)]
    )

    assert json.loads(output.read_text())["num_evaluations"] == 9


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([str(PROBLEMS / "infeasible.json"), "--scheduler", "exact"], 3, "534101 samples/s, 99.9% below"),
        ([FIVE_LAYERS, "--scheduler", "exakt"], 2, "Did you mean 'exact'?"),
        ([str(PROBLEMS / "none.json"), "--scheduler", "exact"], 2, "cannot read the problem file"),
        ([str(PROBLEMS), "--scheduler", "exact"], 2, "cannot read the problem file"),
        ([str(PROBLEMS / "expected.json"), "--scheduler", "exact"], 2, "schema_version: is missing"),
        ([FIVE_LAYERS, "--scheduler", "exact", "--output", "/none/plan.json"], 2, "cannot write"),
        ([FIVE_LAYERS, "--scheduler", "exact", "--seed", "-1"], 2, "--seed must not be negative"),
        ([FIVE_LAYERS, "--scheduler", "exact", "--budget-evaluations", "0"], 2, "at least 1 evaluation"),
        (
            [FIVE_LAYERS, "--scheduler", "brute-force", "--budget-evaluations", "9"],
            2,
            "3 * 3^4 = 243 plans",
        ),
    ],
)
def test_errors_are_one_line_and_a_status(capsys, arguments, status, message):
    assert main(["plan", *arguments]) == status

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("heterps: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_malformed_field_is_named(tmp_path, capsys):
    document = json.loads(Path(FIVE_LAYERS).read_text())
    document["layers"][3]["compute_seconds"]["cpu"] = float("nan")
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))

    assert main(["plan", str(path), "--scheduler", "exact"]) == 2
    assert "layers[3].compute_seconds.cpu: must be a finite number, got nan" in capsys.readouterr().err


def test_a_malformed_field_is_named_with_its_file(tmp_path, capsys):
    document = json.loads(Path(FIVE_LAYERS).read_text())
    document["layers"][3]["state_bytes"] = -1
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))

    assert main(["plan", str(path), "--scheduler", "exact"]) == 2

    message = f"heterps: error: {path}: layers[3].state_bytes: must not be negative, got -1\n"
    assert capsys.readouterr().err == message


def test_a_file_that_is_no_json_is_named_once(tmp_path, capsys):
    path = tmp_path / "problem.json"
    path.write_text("{")

    assert main(["plan", str(path), "--scheduler", "exact"]) == 2
    assert capsys.readouterr().err.count(str(path)) == 1


@pytest.mark.parametrize("scheduler", ["exact", "greedy"])
def test_the_plan_is_explained_in_print_and_in_the_file(tmp_path, capsys, scheduler):
    output = tmp_path / "plan.json"

    assert main(["plan", FIVE_LAYERS, "--scheduler", scheduler, "--output", str(output)]) == 0

    explanation = json.loads(output.read_text())["explanation"]
    assert explanation["detail"] == "full"
    assert explanation["cost_usd"] == pytest.approx(1.561005, rel=1e-6)
    printed = capsys.readouterr().out
    for phrase in ("Why this plan", "next best", "What would change it", "10 % more"):
        assert phrase in printed


def test_the_explanation_can_be_left_out_or_short(tmp_path, capsys):
    output = tmp_path / "plan.json"
    arguments = ["plan", FIVE_LAYERS, "--scheduler", "exact", "--output", str(output)]

    assert main([*arguments, "--explain", "none"]) == 0
    assert "Why this plan" not in capsys.readouterr().out
    assert "explanation" not in json.loads(output.read_text())

    assert main([*arguments, "--explain", "short"]) == 0
    assert "Ask for it with --explain full" in " ".join(capsys.readouterr().out.split())
    assert json.loads(output.read_text())["explanation"]["price_flips"] == []


@pytest.fixture
def problem_with_extra_costs(tmp_path):
    problem = replace(
        SchedulingProblem.load(Path(FIVE_LAYERS)),
        extra_costs=ExtraCosts(startup_seconds=360.0, storage_usd_per_hour=0.5),
    )
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem.to_json()))
    return str(path)


def cost_lines(printed):
    """The lines of the bill below the cost: name -> USD."""
    lines = [line.split() for line in printed.splitlines() if line.startswith(" " * 12) and " USD " in line]
    return {" ".join(words[2:]): float(words[0]) for words in lines if words[1] == "USD"}


def test_the_cost_is_shown_in_lines_where_it_has_several(problem_with_extra_costs, capsys):
    arguments = ["plan", problem_with_extra_costs, "--scheduler", "exact", "--explain", "none"]

    assert main(arguments) == 0
    printed = capsys.readouterr().out
    lines = cost_lines(printed)
    assert set(lines) == {"compute", "start-up and teardown", "storage"}
    [total] = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("cost ")]
    assert sum(lines.values()) == pytest.approx(total, abs=3e-6)


@pytest.mark.slow
def test_the_documents_tell_the_cost_of_the_example_night():
    night = json.loads((PROJECT / "docs" / "examples" / "night.problem.json").read_text())

    cost = f"{find_optimum(SchedulingProblem.from_json(night)).cost_usd:.2f} USD"

    for name in ("README.md", "docs/AWS.md", "docs/OPERATING.md"):
        assert cost in (PROJECT / name).read_text(), name
