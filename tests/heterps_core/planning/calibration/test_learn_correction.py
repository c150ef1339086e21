import math
from statistics import fmean, median

import numpy as np
import pytest

from heterps_core.planning.calibration.correction import (
    LEAST_UNSEEN_NIGHTS,
    NO_CORRECTION,
    learn_correction,
    replay,
)
from tests.heterps_core.planning.calibration.builders import answers

PATH = ("machine", "ctrdnn", "1 + 1")


def noisy_nights(seed, *, bias, num_nights=30, noise=0.05):
    return np.exp(np.random.default_rng(seed).normal(math.log(bias), noise, num_nights)).tolist()


def test_nothing_is_corrected_before_any_run_has_answered():
    assert learn_correction([], PATH) == NO_CORRECTION
    assert learn_correction(answers([2.0] * 9, path=("elsewhere",)), PATH) == NO_CORRECTION


def test_a_steady_bias_is_learned_and_the_error_on_unseen_nights_falls_to_the_noise():
    learned = learn_correction(answers(noisy_nights(0, bias=1.3)), PATH)

    assert learned.factor == pytest.approx(1.3, rel=0.05)
    assert learned.depth >= 1
    assert learned.error_without == pytest.approx(math.log(1.3), abs=0.03)
    assert learned.error_with < 0.5 * learned.error_without


@pytest.mark.parametrize("seed", range(10))
def test_predictions_that_are_right_but_noisy_are_left_about_as_they_are(seed):
    learned = learn_correction(answers(noisy_nights(seed, bias=1.0)), PATH)

    assert learned.factor == pytest.approx(1.0, abs=0.03)
    assert learned.error_with <= learned.error_without * 1.15


def test_a_correction_that_was_worse_on_unseen_nights_is_never_applied():
    # Blocks of three: each teaches the opposite of what the next one needs.
    swinging = [1.5, 1.5, 1.5, 1 / 1.5, 1 / 1.5, 1 / 1.5] * 4

    learned = learn_correction(answers(swinging), PATH)

    assert learned.depth == 0
    assert learned.factor == 1.0


def test_few_nights_are_not_enough():
    few = learn_correction(answers([1.4] * (LEAST_UNSEEN_NIGHTS - 1)), PATH)
    enough = learn_correction(answers([1.4] * (LEAST_UNSEEN_NIGHTS + 2)), PATH)

    assert few.factor == 1.0
    assert enough.factor == pytest.approx(1.4)


def test_each_night_is_corrected_by_the_nights_before_it_alone():
    nights = answers(noisy_nights(3, bias=1.25, num_nights=12))
    spoilt = [*nights[:8], *answers([50.0] * 4, first_night=8)]

    assert replay(nights)[:9] == replay(spoilt)[:9]


def test_the_replayed_factors_are_medians_of_the_past_with_two_nights_of_one():
    # One path throughout, so a second program of three lines says what a shallow correction is.
    ratios = noisy_nights(5, bias=1.4, noise=0.02)
    past = ratios[:20]
    by_median = math.exp(median([0.0, 0.0, *map(math.log, past)]))

    assert replay(answers(ratios[:21]))[-1] == pytest.approx(by_median, rel=0.01)


def test_what_is_told_of_the_whole_procedure_is_the_mean_over_its_replay():
    nights = answers(noisy_nights(7, bias=1.2))

    learned = learn_correction(nights, PATH)

    errors = [
        abs(math.log(answer.measured_seconds / factor))
        for answer, factor in zip(nights, replay(nights), strict=True)
    ]
    assert learned.error_with == pytest.approx(fmean(errors))


def test_stages_of_one_night_do_not_teach_one_another():
    several = [answer for night in range(3) for answer in answers([1.5], first_night=night) * 4]

    # The first night's four answers would outweigh the prior, but they are of the same run.
    assert replay(several)[:4] == [1.0] * 4


def test_a_summary_says_what_was_done_and_how_well_it_did():
    assert "no run has answered" in NO_CORRECTION.summary
    assert "must have been answered first, 2 are" in learn_correction(answers([1.3] * 2), PATH).summary
    assert learn_correction(answers([1.3] * 9), PATH).summary.startswith(
        "corrected by 1.300 (30.0% off without"
    )
    assert "no correction has been better" in learn_correction(answers([1.0] * 9), PATH).summary
