from dataclasses import replace

import pytest

from heterps_core.plans.scheduling_plan import Stage
from infra.workspace import Workspace
from tasks.records.mlflow_views import run_note
from tasks.reports.reporting import explanation_markdown, plan_text, report_text, training_summary
from tasks.scheduling import Searches, explain_choice
from tests.tasks.builders import make_problem, make_result
from tests.tasks.report_builders import make_plan_report, make_run_report, make_training


def test_markdown_keeps_the_lines_aligned():
    problem = make_problem()

    text = explanation_markdown(problem, explain_choice.fn(problem, make_result(problem)))

    assert text.startswith("# The plan, explained\n\n```\nWhy this plan")
    assert text.endswith("```\n")


@pytest.fixture
def one_step():
    """A run of a single step, which measures no speed."""
    training = make_training()
    return replace(
        training,
        steps=training.steps[:1],
        throughput_samples_per_s=None,
        undisturbed_throughput_samples_per_s=None,
    )


def test_a_speed_that_was_not_measured_is_a_dash_in_every_text(one_step, tmp_path):
    report = make_run_report(training=one_step)

    assert training_summary(one_step).startswith("1 steps, - samples/s, ")
    assert "measured   - samples/s; - over the whole time" in report_text(report, Workspace(root=tmp_path))
    assert "**- samples/s**;" in run_note(report)


def test_a_speed_that_was_not_measured_has_no_figure(one_step):
    metrics = make_run_report(training=one_step).metrics()

    speeds = (
        "night/samples_per_s",
        "night/off_by",
        "measured/throughput_samples_per_s",
        "measured/step_seconds",
    )
    assert {name: metrics[name] for name in speeds} == dict.fromkeys(speeds)


def test_a_plan_that_is_not_of_the_method_that_was_asked_for_says_so(tmp_path):
    problem = make_problem()
    exact, asked = (
        make_result(problem),
        make_result(problem, stages=(Stage(0, 2, "gpu-t4", 8),), scheduler="genetic"),
    )
    searches = Searches(results={"exact": exact, "genetic": asked}, without_plan={}, taken="exact")
    report = replace(make_plan_report(), searches=searches, scheduler="genetic")

    text = plan_text(report, Workspace(root=tmp_path))

    extra = asked.plan.cost_usd / exact.plan.cost_usd - 1
    assert f"the plan of genetic, which was asked for, costs {extra:.2%} more" in text
    assert "exact (chosen)" in text
    assert "genetic (asked for)" in text
