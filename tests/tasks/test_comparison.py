from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tasks.comparison import ComparedSearch, Comparison, MethodSummary
from tasks.planning.compared_problems import ComparedProblem
from tasks.reports.comparison_document import Origin, comparison_document
from tasks.reports.comparison_figure import gap_figure
from tasks.reports.renderers import markdown, terminal_text
from tests.tasks.builders import make_problem, make_result

PROBLEM = make_problem()
ORIGIN = Origin(
    run_id="x",
    command="python -m flows.compare_schedulers",
    finished_at=datetime(2026, 11, 21, tzinfo=UTC),
)
COST_USD = make_result(PROBLEM).plan.cost_usd


def found(method, seed, gap):
    """A search that ended at a cost of the bound times 1 + gap, with the bound at the cost of the usual plan."""
    result = make_result(PROBLEM, scheduler=method)
    plan = replace(result.plan, cost_usd=COST_USD * (1 + gap), optimality_gap=gap, seed=seed)
    return ComparedSearch(
        method=method, seed=seed, result=replace(result, plan=plan, search_seconds=1.0 + seed)
    )


def missed(method, seed, reason):
    return ComparedSearch(method=method, seed=seed, result=None, remark=reason)


def summary(method, *searches):
    return MethodSummary(method=method, searches=searches)


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
                summary("reinforce", found("reinforce", 0, 0.5), missed("reinforce", 1, "met no | plan")),
            ),
            "folder/hard.json": (
                summary("reinforce", found("reinforce", 0, 1e-5), found("reinforce", 1, 1e-5)),
                summary("genetic", missed("genetic", 0, "no plan"), missed("genetic", 1, "no plan")),
            ),
        },
        num_seeds=2,
        budget_evaluations=1_000,
        seconds=90.0,
    )


def test_the_typical_search_has_the_median_cost_and_the_gap_is_the_largest():
    three = summary("genetic", *(found("genetic", seed, gap) for seed, gap in enumerate([0.3, 0.1, 0.2])))
    two = summary("genetic", *three.searches[:2])

    assert three.typical.plan.seed == 2
    assert two.typical.plan.seed == 1
    assert three.largest_gap == 0.3
    assert three.median_seconds == 2.0


def test_a_method_without_a_plan_has_no_typical_search_and_says_each_reason_once():
    none = summary("cpu-only", *(missed("cpu-only", seed, "no cpu") for seed in range(3)))

    assert none.typical is None
    assert none.remark == "no cpu"


def test_markdown_says_how_to_make_it_again_and_what_is_uncertain(comparison):
    text = markdown(comparison_document(comparison, ORIGIN))

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
    lines = terminal_text(comparison_document(comparison, ORIGIN)).splitlines()

    assert [line.split()[0] for line in lines if line.endswith(("2/2", "| plan", "no plan"))] == [
        *("genetic", "reinforce", "reinforce", "genetic")
    ]


def test_the_figure_has_a_panel_for_each_problem_and_a_dot_for_each_plan(comparison):
    panels = [axes for axes in gap_figure(comparison).axes if axes.get_visible()]

    assert [axes.get_title(loc="left") for axes in panels] == ["tiny", "hard.json"]
    dots = [[list(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"] for axes in panels]
    # The method that always found a plan stands first.
    assert dots == [[[0.5], [0.0, 0.0]], [[1e-5, 1e-5]]]
    assert [text.get_text() for text in panels[1].texts] == ["no plan"]
