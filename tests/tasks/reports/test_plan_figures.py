from dataclasses import replace
from itertools import pairwise

import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.explanation import Detail, explain_plan
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from tasks.reports.plan_figures import (
    front_figure,
    pipeline_passes,
    stages_figure,
)
from tests.tasks.builders import make_problem


def end_of_step_s(stage_seconds, num_microbatches):
    return max(item.end_s for item in pipeline_passes(stage_seconds, num_microbatches=num_microbatches))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_equal_stages_take_the_known_time_of_a_pipeline(num_stages, num_microbatches):
    # Narayanan et al. (2019): fill and drain add (K - 1) / M of the time of a stage.
    expected_s = 6.0 * (1 + (num_stages - 1) / num_microbatches)

    assert end_of_step_s([6.0] * num_stages, num_microbatches) == pytest.approx(expected_s)


def test_unequal_stages_by_hand():
    # M = 2, stages of 6 and 12 s: passes of 1 + 2 s and 2 + 4 s. f0 f1 | then on the slow stage
    # f0 1..3, b0 3..7, f1 7..9, b1 9..13, and the fast stage ends with b1 13..15.
    passes = pipeline_passes([6.0, 12.0], num_microbatches=2)

    by_hand = {
        (0, "forward", 0): (0, 1), (0, "forward", 1): (1, 2), (0, "backward", 0): (7, 9),
        (0, "backward", 1): (13, 15), (1, "forward", 0): (1, 3), (1, "backward", 0): (3, 7),
        (1, "forward", 1): (7, 9), (1, "backward", 1): (9, 13),
    }  # fmt: skip
    found = {(item.stage, item.direction, item.microbatch): (item.start_s, item.end_s) for item in passes}
    assert found == {key: pytest.approx(times) for key, times in by_hand.items()}


def test_no_stage_does_two_things_at_once():
    passes = pipeline_passes([3.0, 7.0, 5.0], num_microbatches=6)

    for stage in range(3):
        mine = [item for item in passes if item.stage == stage]
        assert all(left.end_s <= right.start_s + 1e-9 for left, right in pairwise(mine))
        assert len(mine) == 12


def test_stages_figure_has_a_bar_for_each_pass_and_a_row_for_each_stage():
    problem = make_problem()
    evaluation = evaluate(problem, (Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1)))

    [axes] = stages_figure(problem, evaluation, num_microbatches=8, title="a plan").axes

    assert len(axes.patches) == 2 * 2 * 8
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "embedding\n4 x cpu-c7i",
        "fc1 .. output\n1 x gpu-t4",
    ]


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
    # The embedding grows no faster with more cpu units, so throughput must be bought from expensive gpus.
    problem = make_problem(throughput_floor_samples_per_s=0.0)
    units = problem.device_types
    dear = replace(units["gpu-t4"], price_usd_per_hour=60.0, max_units=200)
    problem = replace(problem, device_types={**units, "gpu-t4": dear})

    explanation, figure = draw(problem)

    assert explanation.front[-1].cost_usd > 10 * explanation.front[0].cost_usd
    assert figure.axes[0].get_yscale() == "log"
