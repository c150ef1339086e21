import numpy as np
import pytest
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from heterps_core.errors import TrainingError
from heterps_core.judging.quality import log_loss, measure_quality, roc_auc


def draw(seed, *, num_rows=2_000, levels=None):
    generator = np.random.default_rng(seed)
    labels = (generator.random(num_rows) < 0.3).astype(np.uint8)
    logits = generator.normal(size=num_rows) + labels
    return labels, logits if levels is None else np.round(logits * levels) / levels


@pytest.mark.parametrize("levels", [None, 1, 3])  # few levels: many ties
@pytest.mark.parametrize("seed", [0, 1])
def test_auc_equals_scikit_learn(seed, levels):
    labels, logits = draw(seed, levels=levels)

    assert roc_auc(labels, logits) == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)


def test_auc_equals_the_share_of_ordered_pairs():
    labels, logits = draw(7, num_rows=60, levels=2)
    clicks, others = logits[labels == 1], logits[labels == 0]
    pairs = [(1.0 if c > o else 0.5 if c == o else 0.0) for c in clicks for o in others]

    assert roc_auc(labels, logits) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(
    ("scores", "auc"), [([1.0, 2.0, 3.0, 4.0], 1.0), ([4.0, 3.0, 2.0, 1.0], 0.0), ([5.0, 5.0, 5.0, 5.0], 0.5)]
)
def test_auc_of_perfect_reversed_and_constant_scores(scores, auc):
    assert roc_auc(np.array([0, 0, 1, 1]), np.array(scores)) == auc


@pytest.mark.parametrize("label", [0, 1])
def test_auc_is_none_where_only_one_class_is_there(label):
    quality = measure_quality(np.full(3, label), np.zeros(3))

    assert quality.auc is None
    assert quality.log_loss == pytest.approx(np.log(2))


def test_log_loss_equals_scikit_learn():
    labels, logits = draw(0)

    expected = sklearn_log_loss(labels, 1.0 / (1.0 + np.exp(-logits)))

    assert log_loss(labels, logits) == pytest.approx(expected, rel=1e-12)


def test_log_loss_of_float32_logits_does_not_lose_confident_rows():
    labels, logits = draw(0)

    assert log_loss(labels, (logits * 8).astype(np.float32)) == pytest.approx(
        np.mean(np.logaddexp(0, logits * 8) - labels * logits * 8), rel=1e-5
    )


def test_one_confidently_wrong_row_costs_at_most_40():
    assert log_loss(np.array([1]), np.array([-1e6])) == pytest.approx(40.0)
    assert log_loss(np.array([1]), np.array([1e6])) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_predictions_that_are_not_finite_are_an_error(bad):
    with pytest.raises(
        TrainingError, match="1 of 2 are not: the training has diverged; lower dense_learning_rate"
    ):
        measure_quality(np.array([0, 1]), np.array([0.0, bad]))


@pytest.mark.parametrize("num_scores", [0, 2])
def test_refuses_scores_that_do_not_match_the_labels(num_scores):
    with pytest.raises(TrainingError, match="one score for each"):
        measure_quality(np.zeros(0), np.zeros(num_scores))


@pytest.mark.parametrize("levels", [None, 2])
def test_weighted_quality_equals_scikit_learn(levels):
    labels, logits = draw(3, levels=levels)
    weights = np.random.default_rng(0).exponential(size=len(labels)) * (logits > -1.0)

    found = measure_quality(labels, logits, weights)

    expected = roc_auc_score(labels, logits, sample_weight=weights)
    assert found.auc == pytest.approx(expected, abs=1e-12)
    probabilities = 1.0 / (1.0 + np.exp(-logits))
    expected = sklearn_log_loss(labels, probabilities, sample_weight=weights)
    assert found.log_loss == pytest.approx(expected, rel=1e-12)


def test_rows_of_no_weight_have_no_quality():
    with pytest.raises(TrainingError, match="a row that counts, but all 2 have the weight 0"):
        measure_quality(np.array([0, 1]), np.zeros(2), np.zeros(2))
    assert measure_quality(np.array([0, 1]), np.zeros(2), np.array([1.0, 0.0])).auc is None
