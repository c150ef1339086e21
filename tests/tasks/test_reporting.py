from dataclasses import replace

import pytest

from infra.workspace import Workspace
from tasks.mlflow_views import run_note
from tasks.reporting import explanation_markdown, report_text, training_summary
from tasks.scheduling import explain_choice
from tests.tasks.builders import make_problem, make_result
from tests.tasks.report_builders import make_run_report, make_training


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
