"""The judgement of many rows in bounded memory, against scikit-learn and the figures of all rows at once."""

import json
from functools import partial

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from heterps_core.errors import TrainingError
from heterps_core.judging.held_out import NUM_BINS, Bins, HeldOutJudgement, HeldOutScores, judge_held_out
from heterps_core.judging.quality import auc_difference
from tests.heterps_core.judging.test_comparison import judged, scores_of


def clicks(num_rows, *, seed=0, noise=0.2):
    """Labels that a model of logits around -1.5 predicts, and those of one that is worse by noise."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(-1.5, 1.0, num_rows).astype(np.float32)
    labels = (generator.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    return labels, logits, logits + generator.normal(0.0, noise, num_rows).astype(np.float32)


def test_auc_and_log_loss_of_two_million_rows_are_those_of_scikit_learn():
    labels, logits, _ = clicks(2_000_000)

    found = judged(labels, logits).quality

    difference = abs(found.auc - roc_auc_score(labels, logits))
    assert difference <= found.auc_error <= 1e-5
    assert found.log_loss == pytest.approx(
        log_loss(labels, 1 / (1 + np.exp(-logits.astype(np.float64)))), abs=1e-9
    )


def test_weighted_figures_are_those_of_scikit_learn():
    labels, logits, _ = clicks(20_000)
    weights = np.random.default_rng(2).exponential(size=20_000).astype(np.float32) * (logits > -3.0)

    found = judged(labels, logits, weights=weights).quality

    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    difference = abs(found.auc - roc_auc_score(labels, logits, sample_weight=weights))
    assert difference <= found.auc_error <= 1e-5
    assert found.log_loss == pytest.approx(log_loss(labels, probabilities, sample_weight=weights), abs=1e-9)
    assert found.calibration_ratio == pytest.approx(weights @ probabilities / (weights @ labels), rel=1e-6)


@pytest.mark.parametrize(("centre", "spread"), [(-0.7, 0.01), (-6.0, 3.0), (30.0, 1e-4)])
def test_the_error_that_is_told_holds_and_is_small_however_logits_are_spread(centre, spread):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 20_000)
    logits = (centre + spread * (labels + generator.normal(0, 1, 20_000))).astype(np.float32)

    found = judged(labels, logits).quality

    assert abs(found.auc - roc_auc_score(labels, logits)) <= found.auc_error + 1e-12
    # float32 has 100 numbers within the last spread, so there equal logits are many, and counted as ties by both.
    assert found.auc_error <= 1e-5 or spread == 1e-4


def test_rows_of_one_bin_count_as_ties_and_the_error_that_is_told_holds_their_order():
    labels = np.array([0, 1, 0, 1, 0, 1])
    above = np.nextafter(np.float32(0.5), np.float32(1))

    found = judged(labels, np.array([0.5, above, above, 0.5, -30.0, 30.0], dtype=np.float32)).quality

    # Of nine pairs four are in one bin.
    assert (found.auc, found.auc_error) == (pytest.approx(7 / 9), pytest.approx(2 / 9))


def test_bins_keep_the_order_of_logits():
    logits = np.sort(np.random.default_rng(0).normal(0, 8, 100_000).astype(np.float32))
    bins = Bins(mean=-2.0, deviation=0.5)

    assert (np.diff(bins.of(logits)) >= 0).all()
    assert bins.of(np.array([-np.float32(1e30), -2.0]))[1] == NUM_BINS // 2
    assert 0 <= bins.of(np.array([-1e30]))[0] < bins.of(np.array([1e30]))[0] < NUM_BINS


def test_the_difference_of_two_models_has_the_interval_of_delong():
    labels, logits, noisy = clicks(20_000)

    found = judged(labels, logits, noisy).auc_difference.interval(confidence=0.95)

    exact = auc_difference(labels, logits, noisy, confidence=0.95)
    assert found.value == pytest.approx(exact.value, abs=1e-6)
    assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=1e-3)


def answer(given, totals, array):
    """Note what a part of the rows has, and return the sum over all parts where it is known."""
    given.append(array)
    return totals[len(given) - 1] if len(given) <= len(totals) else array


def test_parts_of_the_rows_add_up_to_the_judgement_of_all():
    """As replicas count their own rows: each call of `add_up` meets what the others have at the same place."""
    labels, logits, noisy = clicks(5_000)
    whole = judged(labels, logits, noisy)
    parts = np.array_split(np.random.default_rng(1).permutation(5_000), 3)
    pairs = [(scores_of(labels[part], logits[part]), scores_of(labels[part], noisy[part])) for part in parts]
    totals: list[np.ndarray] = []
    for num_known in range(6):  # calls of `add_up` whose sums are known by then
        given = []
        for scores, other in pairs:
            given.append([])
            judgement = judge_held_out(scores, other, add_up=partial(answer, given[-1], totals))
        totals = [sum(arrays) for arrays in zip(*given, strict=True)][: num_known + 1]

    assert judgement.num_rows == 5_000
    assert judgement.quality.auc == pytest.approx(whole.quality.auc, abs=1e-12)
    assert judgement.auc_difference.variance == pytest.approx(whole.auc_difference.variance)


def test_predictions_that_are_not_finite_are_counted_and_leave_no_quality():
    found = judged([0, 1, 0, 1, 1], [0.1, np.nan, np.inf, 0.3, 0.2], [0.0] * 5)

    assert (found.num_not_finite, found.quality, found.auc_difference) == (2, None, None)
    with pytest.raises(TrainingError, match="predictions must be finite, but 2 of 5 are not"):
        found.click_quality()
    other = judged([0, 1, 0, 1, 1], [0.0] * 5, [0.1, np.nan, 0.0, 0.3, 0.2])
    assert (other.other_not_finite, other.other, other.auc_difference) == (1, None, None)


def test_rows_of_one_class_have_a_log_loss_and_no_more():
    found = judged([0, 0, 0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0])

    assert found.quality.auc is None
    assert found.quality.log_loss == pytest.approx(np.log(2))
    assert (found.log_loss_above_mean_rate, found.auc_difference) == (None, None)


def test_no_rows_cannot_be_judged():
    with pytest.raises(TrainingError, match="at least 1 row"):
        judge_held_out(HeldOutScores())
    with pytest.raises(TrainingError, match="of a weight above 0, got none"):
        judged([0, 1], [0.0, 1.0], weights=np.zeros(2))


def test_a_judgement_is_read_as_it_was_written():
    labels, logits, noisy = clicks(500)
    found = judged(labels, logits, noisy)

    assert HeldOutJudgement.from_json(json.loads(json.dumps(found.to_json()))) == found
