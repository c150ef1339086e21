"""The plan's pipeline, step by step, as the report shows it."""

import pytest

from heterps_core.plans.scheduling_plan import Stage
from tasks.scheduling import simulate_choice
from tests.tasks.builders import make_problem, make_result


@pytest.mark.parametrize(
    ("stages", "step_seconds"),
    [
        # By hand: 80 ms on 4 units at once.
        ((Stage(0, 2, "cpu-c7i", 4),), 0.020),
        # By hand: 100 rows are too few to be cut, so 40 ms / 4 and 8 ms come one after the other, without the third
        # of the 8 ms that is put off until the first stage is busy again.
        ((Stage(0, 0, "cpu-c7i", 4), Stage(1, 2, "gpu-t4", 1)), 0.010 + 2 / 3 * 0.008),
    ],
)
def test_the_step_of_a_small_plan_is_the_one_worked_by_hand(stages, step_seconds):
    problem = make_problem()

    simulation = simulate_choice.fn(problem, make_result(problem, stages=stages))

    assert simulation.run.step_seconds == pytest.approx(step_seconds, rel=1e-3)
