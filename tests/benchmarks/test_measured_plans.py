import numpy as np
import pytest

from heterps_core.errors import TrainingError
from tests.benchmarks.measured_plans import Case, load_case, plans_up_to, plans_without_search, step_seconds

CASE = Case(
    problem=load_case("alexnet").problem,
    seconds=np.array([[3.0, 6.0], [3.0, 6.0], [6.0, 12.0]]),
    cut_seconds=np.array([1.0, 1.0]),
    num_microbatches=2,
    budget=1,
)
"""Three blocks; the second device takes twice as long."""


def test_the_step_of_a_pipeline_is_that_of_its_passes():
    assert step_seconds(CASE, (0, 0, 0)) == pytest.approx(12)
    assert step_seconds(CASE, (1, 1, 1)) == pytest.approx(24)
    # By hand: forward passes take 2 and 1 s, backward passes 4 and 2 s, messages 0.5 s. The first gradient reaches
    # the first stage at 2 + 0.5 + 1 + 2 + 0.5 = 6 s, and its two backward passes follow one another.
    assert step_seconds(CASE, (1, 1, 0)) == pytest.approx(6 + 2 * 4)


def test_a_device_with_six_stages_fails():
    with pytest.raises(TrainingError, match="at most 5 stages"):
        step_seconds(CASE, (0, 1) * 6)


def test_plans_without_search_are_among_those_of_two_stages():
    assert len(plans_up_to(3, 3)) == 8  # every plan of three blocks on two devices
    assert set(plans_without_search(CASE)) <= set(plans_up_to(2, 3))
    # By hand: 6 and 12 s, then 6 and 6 s where the slow device has the first block alone.
    assert plans_without_search(CASE)[2:] == [(0, 0, 1), (1, 0, 0)]
