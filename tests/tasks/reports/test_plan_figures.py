from itertools import pairwise

import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.plans.scheduling_plan import Stage
from tasks.reports.plan_figures import (
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
