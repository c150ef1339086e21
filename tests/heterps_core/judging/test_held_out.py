"""The judgement of held-out rows, against scikit-learn and the figures of all rows at once."""

import json

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from heterps_core.errors import TrainingError
from heterps_core.judging import held_out
from heterps_core.judging.held_out import HeldOutJudgement, HeldOutScores, judge_held_out
from heterps_core.judging.quality import auc_difference
from tests.heterps_core.judging.test_comparison import judged, scores_of


def clicks(num_rows, *, seed=0, noise=0.2):
    """Labels that a model of logits around -1.5 predicts, and those of one that is worse by noise."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(-1.5, 1.0, num_rows).astype(np.float32)
    labels = (generator.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    return labels, logits, logits + generator.normal(0.0, noise, num_rows).astype(np.float32)


def test_auc_and_log_loss_are_those_of_scikit_learn():
    labels, logits, _ = clicks(200_000)

    found = judged(labels, logits).quality

    assert found.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert found.log_loss == pytest.approx(
        log_loss(labels, 1 / (1 + np.exp(-logits.astype(np.float64)))), abs=1e-9
    )


def test_weighted_figures_are_those_of_scikit_learn():
    labels, logits, _ = clicks(20_000)
    weights = np.random.default_rng(2).exponential(size=20_000).astype(np.float32) * (logits > -3.0)

    found = judged(labels, logits, weights=weights).quality

    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert found.auc == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), abs=1e-9)
    assert found.log_loss == pytest.approx(log_loss(labels, probabilities, sample_weight=weights), abs=1e-9)
    assert found.calibration_ratio == pytest.approx(weights @ probabilities / (weights @ labels), rel=1e-6)


def test_normalised_entropy_and_tenths_are_worked_by_hand():
    labels = np.array([0, 0, 1, 0, 1, 1])
    logits = np.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], dtype=np.float32)
    weights = np.array([1.0, 3.0, 2.0, 2.0, 1.0, 1.0], dtype=np.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "_NUM_BINS", 3)
        found = judged(labels, logits, weights=weights).quality

    # Clicks weigh 4 of 10.
    assert found.normalized_entropy == pytest.approx(
        found.log_loss / -(0.4 * np.log(0.4) + 0.6 * np.log(0.6))
    )
    assert [each.num_rows for each in found.deciles] == [2, 2, 2]
    assert [each.observed for each in found.deciles] == [0.0, 0.5, 1.0]
    first = (1 / (1 + np.exp(2.0)) + 3 / (1 + np.exp(1.0))) / 4
    assert found.deciles[0].predicted == pytest.approx(first, rel=1e-6)


def test_the_difference_of_two_models_has_the_interval_of_delong():
    labels, logits, noisy = clicks(20_000)

    found = judged(labels, logits, noisy).auc_difference.interval(confidence=0.95)

    exact = auc_difference(labels, logits, noisy).interval(confidence=0.95)
    assert found.value == pytest.approx(exact.value, abs=1e-6)
    assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=1e-3)


def test_parts_of_the_rows_are_judged_as_all_rows_are():
    """As replicas hold their own rows: each call of `gather` returns what the others have at the same place."""
    labels, logits, noisy = clicks(5_000)
    whole = judged(labels, logits, noisy)
    parts = np.array_split(np.random.default_rng(1).permutation(5_000), 3)
    pairs = [(scores_of(labels[part], logits[part]), scores_of(labels[part], noisy[part])) for part in parts]
    of_calls = [
        [array for pair in pairs for array in [each(*pair)]]
        for each in (
            lambda scores, _: scores.rows,
            lambda scores, _: np.array([scores.num_not_finite]),
            lambda _, other: other.rows,
            lambda _, other: np.array([other.num_not_finite]),
        )
    ]

    found = judge_held_out(*pairs[0], gather=lambda _: np.concatenate(of_calls.pop(0)))

    assert found.num_rows == 5_000
    assert found.quality.auc == pytest.approx(whole.quality.auc, abs=1e-12)
    assert found.auc_difference.variance == pytest.approx(whole.auc_difference.variance)
    assert found.log_loss_difference.value == pytest.approx(whole.log_loss_difference.value)


def test_of_more_rows_than_are_judged_every_kth_is_the_same_for_both_models(monkeypatch):
    monkeypatch.setattr(held_out, "MAX_JUDGED_ROWS", 1_000)
    labels, logits, noisy = clicks(2_500)

    found = judged(labels, logits, noisy)

    # By hand: 2,500 rows for at most 1,000 are every third one, whatever parts they come in.
    every = slice(None, None, 3)
    assert found == judged(labels[every], logits[every], noisy[every])
    assert found.num_rows == 834


def test_predictions_that_are_not_finite_are_counted_and_leave_no_quality():
    found = judged([0, 1, 0, 1, 1], [0.1, np.nan, np.inf, 0.3, 0.2], [0.0] * 5)

    assert (found.num_not_finite, found.quality, found.auc_difference) == (2, None, None)
    with pytest.raises(TrainingError, match="predictions must be finite, but 2 are not"):
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
        judge_held_out(HeldOutScores(0))
    with pytest.raises(TrainingError, match="of a weight above 0, got none"):
        judged([0, 1], [0.0, 1.0], weights=np.zeros(2))


def test_a_judgement_is_read_as_it_was_written():
    labels, logits, noisy = clicks(500)
    found = judged(labels, logits, noisy)

    assert HeldOutJudgement.from_json(json.loads(json.dumps(found.to_json()))) == found
