import numpy as np
import pytest

from heterps_core.planning.calibration.correction import correction_factor, shrunk_median
from tests.heterps_core.planning.calibration.builders import answers


@pytest.mark.parametrize("seed", range(20))
def test_no_point_of_a_fine_grid_has_a_smaller_sum_of_distances(seed):
    random = np.random.default_rng(seed)
    values = random.normal(size=int(random.integers(0, 9))).tolist()
    towards, weight = float(random.normal()), float(random.uniform(0.5, 4.0))

    def distances(m):
        return sum(abs(value - m) for value in values) + weight * abs(m - towards)

    found = shrunk_median(values, towards=towards, weight=weight)

    assert distances(found) <= min(distances(m) for m in np.linspace(-4, 4, 801)) + 1e-12


def test_of_equally_good_points_the_one_nearest_to_the_prior_is_taken():
    # By hand: with weights 1, 1 and 2 every point between 0 and 4 is as good as any other.
    assert shrunk_median([4.0, 5.0], towards=0.0, weight=2.0) == 0.0
    assert shrunk_median([], towards=0.3, weight=2.0) == 0.3


def test_one_disturbed_night_moves_nothing_and_three_that_agree_do():
    assert correction_factor(answers([9.0]), ("machine",), depth=1) == 1.0
    assert correction_factor(answers([1.2, 1.2, 9.0]), ("machine",), depth=1) == pytest.approx(1.2)


def test_slow_and_fast_predictions_count_alike():
    slow = correction_factor(answers([2.0] * 5), ("machine",), depth=1)
    fast = correction_factor(answers([0.5] * 5), ("machine",), depth=1)

    assert slow * fast == pytest.approx(1.0)


def test_what_has_few_answers_is_corrected_like_what_it_belongs_to():
    one, other = ("machine", "ctrdnn"), ("machine", "nce")
    seen = [*answers([1.3] * 9, path=one), *answers([2.0, 2.0], path=other, first_night=9)]

    # Two nights do not outweigh the prior of two, which is the machine's own factor.
    assert correction_factor(seen, other, depth=2) == pytest.approx(1.3)
    more = [*seen, *answers([2.0], path=other, first_night=11)]
    assert correction_factor(more, other, depth=2) == pytest.approx(2.0)


def test_answers_of_another_machine_teach_nothing():
    assert correction_factor(answers([3.0] * 9), ("other machine", "ctrdnn", "1 + 1"), depth=3) == 1.0


def test_depth_zero_is_no_correction():
    assert correction_factor(answers([3.0] * 9), ("machine",), depth=0) == 1.0
