from dataclasses import replace
from datetime import UTC, datetime

import pytest

from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from tasks.comparison import (
    ComparedProblem,
    Comparison,
    MethodSummary,
    load_problems,
    reason_in_one_line,
)
from tasks.reports.comparison_document import comparison_document
from tasks.reports.document import markdown, terminal_text
from tests.tasks.builders import make_problem, make_result

PROBLEM = make_problem()
ORIGIN = {
    "command": "python -m flows.compare_schedulers",
    "finished_at": datetime(2026, 11, 21, tzinfo=UTC),
}
COST_USD = make_result(PROBLEM).plan.cost_usd


def found(method, seed, gap):
    """A search that ended at a cost of the bound times 1 + gap, with the bound at the cost of the usual plan."""
    result = make_result(PROBLEM, scheduler=method)
    plan = replace(result.plan, cost_usd=COST_USD * (1 + gap), optimality_gap=gap, seed=seed)
    return replace(result, plan=plan, search_seconds=1.0 + seed)


def summary(method, *results, num_seeds=2, remark=""):
    return MethodSummary(method=method, num_seeds=num_seeds, results=results, remark=remark)


@pytest.fixture
def comparison():
    return Comparison(
        problems=(
            ComparedProblem(name="tiny", problem=PROBLEM, estimated_device_types=("gpu-t4",)),
            ComparedProblem(name="folder/hard.json", problem=PROBLEM),
        ),
        left_out={"broken-model": "cannot be built"},
        summaries={
            "tiny": (
                summary("genetic", found("genetic", 0, 0.0), found("genetic", 1, 0.0)),
                summary("reinforce", found("reinforce", 0, 0.5), remark="met no | plan"),
            ),
            "folder/hard.json": (
                summary("reinforce", found("reinforce", 0, 1e-5), found("reinforce", 1, 1e-5)),
                summary("genetic", remark="no plan"),
            ),
        },
        num_seeds=2,
        budget_evaluations=1_000,
        seconds=90.0,
    )


def test_the_typical_search_has_the_median_cost_and_the_gap_is_the_largest():
    three = summary("genetic", *(found("genetic", seed, gap) for seed, gap in enumerate([0.3, 0.1, 0.2])))
    two = summary("genetic", *three.results[:2])

    assert three.typical.plan.seed == 2
    assert two.typical.plan.seed == 1
    assert three.largest_gap == 0.3
    assert three.median_seconds == 2.0


def test_markdown_says_how_to_make_it_again_and_what_is_uncertain(comparison):
    text = markdown(comparison_document(comparison, **ORIGIN))

    assert "`python -m flows.compare_schedulers`, 2026-11-21, on " in text
    assert "torch 2." in text
    assert "at most 1,000 plans" in text
    assert "All searches took 1.5 minutes." in text
    assert "estimated, not measured, for gpu-t4" in text
    assert "- **broken-model**: cannot be built" in text
    # By hand: 0.9 USD/hour for 3.6 s.
    assert "| genetic | 0.0009 | 0 | 0 | 12 | 1.500 | 2/2 |  |" in text
    assert "| reinforce | 0.00135 | 50.00% | 50.00% | 12 | 1.000 | 1/2 | met no \\| plan |" in text
    assert "| reinforce | 0.000900009 | < 0.01% | < 0.01% | 12 | 1.500 | 2/2 |  |" in text
    assert "| genetic | - | - | - | - | - | 0/2 | no plan |" in text


def test_the_terminal_shows_a_line_for_each_method_of_each_problem(comparison):
    lines = terminal_text(comparison_document(comparison, **ORIGIN)).splitlines()

    assert [line.split()[0] for line in lines if line.endswith(("2/2", "| plan", "no plan"))] == [
        *("genetic", "reinforce", "reinforce", "genetic")
    ]


def test_reasons_are_one_line_without_the_way_out():
    missed_floor = InfeasiblePlanError("throughput floor", "10 samples/s, 99% below; raise max_units")

    assert reason_in_one_line(missed_floor) == "no plan meets the throughput floor: 10 samples/s, 99% below"
    assert reason_in_one_line(ValueError("a\nb")) == "failed: ValueError: a b"


def test_a_problem_file_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text("{}")

    with pytest.raises(ConfigurationError, match=r"problem\.json: schema_version: is missing"):
        load_problems([str(path)])
    with pytest.raises(ConfigurationError, match=r"cannot read .*none\.json"):
        load_problems([str(tmp_path / "none.json")])
