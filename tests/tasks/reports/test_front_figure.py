from dataclasses import replace

import pytest

from heterps_core.planning.explain.explanation import Detail, explain_plan
from heterps_core.planning.search.optimum import find_optimum
from tasks.reports.front_figure import front_figure
from tests.tasks.builders import make_problem


def draw(problem):
    explanation = explain_plan(problem, find_optimum(problem).stages, detail=Detail.FULL)
    return explanation, front_figure(problem, explanation)


def test_the_front_is_drawn_with_the_plan_the_floor_and_the_device_types():
    problem = make_problem()

    explanation, figure = draw(problem)

    above, below = figure.axes
    points = {collection.get_label(): collection.get_offsets() for collection in above.collections}
    assert points["cheapest plan"].tolist() == [
        [point.throughput_samples_per_s, point.cost_usd] for point in explanation.front
    ]
    # By hand: 12,500 samples/s for 0.0008 USD.
    assert points["this plan"].tolist() == [[pytest.approx(12_500), pytest.approx(0.0008)]]
    assert "floor 1,000" in [text.get_text() for text in above.get_legend().get_texts()]
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["cpu-c7i", "gpu-t4"]
    assert (above.get_yscale(), below.get_xscale()) == ("linear", "linear")


def test_costs_over_decades_stand_on_a_logarithmic_axis():
    # The embedding grows no faster with more cpu units, so throughput must be bought from dear gpus.
    problem = make_problem(throughput_floor_samples_per_s=0.0)
    units = problem.device_types
    dear = replace(units["gpu-t4"], price_usd_per_hour=60.0, max_units=200)
    problem = replace(problem, device_types={**units, "gpu-t4": dear})

    explanation, figure = draw(problem)

    assert explanation.front[-1].cost_usd > 10 * explanation.front[0].cost_usd
    assert figure.axes[0].get_yscale() == "log"
