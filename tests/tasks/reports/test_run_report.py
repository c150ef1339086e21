import pytest

from heterps_core.planning.explain.explanation import Detail, explain_plan
from tasks.reports.run_report import _explanation_metrics
from tasks.scheduling import explain_choice
from tests.tasks.builders import make_problem, make_result


def test_the_flow_explains_small_problems_in_full():
    problem = make_problem()

    explanation = explain_choice.fn(problem, make_result(problem, cost_lower_bound_usd=0.0008))

    # By hand: the plan of the builder costs 0.0009 USD, the cheapest 0.0008.
    assert explanation.detail is Detail.FULL
    assert explanation.chosen_extra_usd == pytest.approx(0.0001)


def test_figures_of_an_explanation_have_stable_names():
    problem = make_problem(throughput_floor_samples_per_s=12_000.0)

    result = make_result(problem, cost_lower_bound_usd=1e-6)
    metrics = _explanation_metrics(explain_choice.fn(problem, result))

    assert metrics["explanation/runner_up_extra_usd"] >= -1e-15  # rounding of two equal costs
    assert metrics["explanation/ten_percent_more_usd"] > 0


def test_what_is_not_known_has_no_figure():
    problem = make_problem()
    explanation = explain_plan(problem, make_result(problem).plan.stages, detail=Detail.SHORT)

    metrics = _explanation_metrics(explanation)

    unknown = {name for name, value in metrics.items() if value is None}
    assert unknown == {"explanation/runner_up_extra_usd"}
