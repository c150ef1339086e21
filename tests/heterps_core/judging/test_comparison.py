"""Intervals against counting all pairs, against a bootstrap, and by how often they hold a known truth."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from statistics import NormalDist

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.judging.held_out import HeldOutScores, judge_held_out
from heterps_core.judging.quality import auc_difference, measure_quality

Z_95 = 1.959963984540054


def made_up_scores(seed, *, num_rows, has_ties=False):
    """Labels and two models' scores that share most of their noise; rounded scores are often equal."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, num_rows)
    common = generator.normal(size=num_rows)
    models = [strength * labels + common + 0.5 * generator.normal(size=num_rows) for strength in (1.0, 0.8)]
    return labels, *(np.round(scores) if has_ties else scores for scores in models)


def scores_of(labels, logits, weights=None, *, num_parts=3):
    """Scores that come in some parts."""
    scores = HeldOutScores(len(labels))
    for part in np.array_split(np.arange(len(labels)), num_parts):
        some_weights = None if weights is None else weights[part]
        scores.add(np.asarray(labels)[part], np.asarray(logits)[part], some_weights)
    return scores


def judged(labels, challenger, champion=None, weights=None):
    other = None if champion is None else scores_of(labels, champion, weights, num_parts=2)
    return judge_held_out(scores_of(labels, challenger, weights), other)


def delong_by_all_pairs(labels, first, second):
    """Difference of the AUCs and its variance, from the m x n kernel values of DeLong's paper."""

    def kernel(scores):
        clicks, others = scores[labels == 1], scores[labels == 0]
        return np.array([[1.0 if c > o else 0.5 if c == o else 0.0 for o in others] for c in clicks])

    of_first, of_second = kernel(first), kernel(second)
    m, n = of_first.shape
    # V10 and V01 of the paper, and their 2 x 2 covariances over clicks and over others.
    s10 = np.cov(np.stack([of_first.mean(axis=1), of_second.mean(axis=1)]))
    s01 = np.cov(np.stack([of_first.mean(axis=0), of_second.mean(axis=0)]))
    contrast = np.array([1.0, -1.0])
    return of_first.mean() - of_second.mean(), contrast @ (s10 / m + s01 / n) @ contrast


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_auc_difference_and_its_interval_are_those_of_all_pairs(seed, has_ties):
    labels, challenger, champion = made_up_scores(seed, num_rows=80, has_ties=has_ties)

    estimate = auc_difference(labels, challenger, champion).interval(confidence=0.95)

    difference, variance = delong_by_all_pairs(labels, challenger, champion)
    assert estimate.value == pytest.approx(difference, abs=1e-12)
    assert estimate.high - estimate.value == pytest.approx(Z_95 * math.sqrt(variance), rel=1e-9)
    assert estimate.value - estimate.low == pytest.approx(estimate.high - estimate.value)


def test_the_auc_difference_is_that_of_the_two_aucs():
    labels, challenger, champion = made_up_scores(0, num_rows=500, has_ties=True)

    estimate = auc_difference(labels, challenger, champion).interval(confidence=0.9)

    aucs = [measure_quality(labels, scores).auc for scores in (challenger, champion)]
    assert estimate.value == pytest.approx(aucs[0] - aucs[1], abs=1e-12)


def test_the_log_loss_difference_is_that_of_the_two_losses():
    labels, challenger, champion = made_up_scores(0, num_rows=500)

    difference = judged(labels, challenger, champion).log_loss_difference

    losses = [measure_quality(labels, scores).log_loss for scores in (challenger, champion)]
    # Scores are kept as float32, as models give them.
    assert difference.value == pytest.approx(losses[0] - losses[1], abs=1e-7)


def test_intervals_are_as_wide_as_a_bootstrap_says():
    labels, challenger, champion = made_up_scores(3, num_rows=300, has_ties=True)
    generator = np.random.default_rng(0)

    found = judged(labels, challenger, champion)

    draws = []
    for _ in range(1_500):
        rows = generator.integers(0, len(labels), len(labels))
        first, second = (measure_quality(labels[rows], scores[rows]) for scores in (challenger, champion))
        draws.append((first.auc - second.auc, first.log_loss - second.log_loss))
    deviations = np.std(draws, axis=0)
    # The standard deviation of 1,500 draws is known to 2 %; the rest is the bootstrap's own difference on 300 rows.
    for difference, deviation in zip(
        (found.auc_difference, found.log_loss_difference), deviations, strict=True
    ):
        interval = difference.interval(confidence=0.95)
        assert interval.high - interval.value == pytest.approx(Z_95 * deviation, rel=0.1)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Normal scores, whose AUC is known: P(click above another) = Phi(shift / sqrt(2) / deviation)."""
    generator = np.random.default_rng(7)
    truth = sum(
        sign * NormalDist().cdf(strength / math.sqrt(2 * (1 + 0.25)))
        for sign, strength in ((1, 1.0), (-1, 0.8))
    )
    num_trials = 600
    num_held = 0
    for _ in range(num_trials):
        labels, challenger, champion = made_up_scores(generator.integers(2**32), num_rows=300)
        estimate = auc_difference(labels, challenger, champion).interval(confidence=0.9)
        num_held += estimate.low <= truth <= estimate.high
    # Of 600 trials at 90 %, the share has a standard deviation of 1.2 %; four of them either way.
    assert num_held / num_trials == pytest.approx(0.9, abs=0.05)


def test_the_log_loss_interval_holds_the_truth_as_often_as_it_says():
    """Labels drawn from one model's probabilities: the other's mean loss is higher by the mean divergence."""
    generator = np.random.default_rng(11)
    logits = generator.normal(size=400)
    wrong = logits + 0.3
    p = 1 / (1 + np.exp(-logits))
    q = 1 / (1 + np.exp(-wrong))
    truth = float(np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))))
    num_trials = 1_000
    estimates = [
        judged(generator.random(400) < p, wrong, logits).log_loss_difference.interval(confidence=0.9)
        for _ in range(num_trials)
    ]

    num_held = sum(estimate.low <= truth <= estimate.high for estimate in estimates)

    assert num_held / num_trials == pytest.approx(0.9, abs=0.04)


def test_a_model_does_not_differ_from_itself():
    labels, challenger, _ = made_up_scores(0, num_rows=50)

    found = judged(labels, challenger, challenger)

    for difference in (found.auc_difference, found.log_loss_difference):
        assert (difference.value, difference.variance) == (0.0, 0.0)


def test_a_higher_confidence_widens_the_interval_by_the_normal_quantile():
    labels, challenger, champion = made_up_scores(1, num_rows=100)

    narrow, wide = (auc_difference(labels, challenger, champion).interval(confidence=c) for c in (0.9, 0.99))

    assert (wide.high - wide.value) / (narrow.high - narrow.value) == pytest.approx(2.575829 / 1.644854)


def test_calibration_compares_predicted_with_observed_clicks():
    # By hand: sigmoid(log 3) = 3/4 and sigmoid(-log 3) = 1/4, so 2 clicks are foreseen where 1 came.
    logits = np.array([math.log(3), math.log(3), -math.log(3), -math.log(3)])

    assert judged([1, 0, 0, 0], logits).quality.calibration_ratio == pytest.approx(2.0)
    assert judged([0, 0, 0, 0], logits).quality.calibration_ratio is None


def test_the_mean_click_rate_is_no_better_than_itself_and_what_is_beside_it_is_worse():
    labels = np.array([1, 0, 0, 0, 1, 0, 0, 0])
    logit = math.log(0.25 / 0.75)

    at, below, above = (
        judged(labels, np.full(8, logit + shift)).log_loss_above_mean_rate.value for shift in (0.0, -0.1, 0.1)
    )

    assert at == pytest.approx(0.0, abs=1e-7)
    assert min(below, above) > 1e-4


@pytest.mark.parametrize(
    ("labels", "challenger", "message"),
    [
        ([1, 0, 0, 0], [0.0] * 4, "at least 2 clicks and 2 others, got 1 clicks in 4 rows"),
        ([1, 1, 0, 0], [0.0] * 3, "for all of the same rows"),
        ([1, 1, 0, 0], [0.0, math.nan, 0.0, 0.0], "a finite score of each"),
    ],
)
def test_what_cannot_be_compared_is_refused(labels, challenger, message):
    with pytest.raises(ConfigurationError, match=message):
        auc_difference(np.array(labels), np.array(challenger), np.zeros(4))


def test_whole_weights_count_as_repeated_rows():
    labels, challenger, champion = made_up_scores(5, num_rows=90, has_ties=True)
    weights = np.random.default_rng(0).integers(0, 4, 90)
    repeated = [np.repeat(values, weights) for values in (labels, challenger, champion)]

    found, expected = judged(labels, challenger, champion, weights), judged(*repeated)

    exact = auc_difference(labels, challenger, champion, weights).interval(confidence=0.95)
    assert exact.value == pytest.approx(expected.auc_difference.value, abs=1e-12)
    for name in ("auc_difference", "log_loss_difference", "log_loss_above_mean_rate"):
        assert getattr(found, name).value == pytest.approx(getattr(expected, name).value, abs=1e-12)
    # Tenths are of rows.
    one, all_rows = (asdict(replace(each.quality, deciles=())) for each in (found, expected))
    assert one.pop("deciles") == all_rows.pop("deciles") == ()
    assert one == pytest.approx(all_rows, abs=1e-12)
    assert found.num_rows == np.count_nonzero(weights)


def test_intervals_of_weighted_rows_are_as_wide_as_a_bootstrap_says():
    labels, challenger, champion = made_up_scores(3, num_rows=300)
    generator = np.random.default_rng(0)
    weights = generator.exponential(size=300)
    rates = np.full(300, np.log(weights @ labels / (weights @ (1 - labels))))

    found = judged(labels, challenger, champion, weights)

    exact = auc_difference(labels, challenger, champion, weights).interval(confidence=0.95)
    assert found.auc_difference.interval(confidence=0.95).low == pytest.approx(exact.low, rel=1e-3)
    draws = []
    for _ in range(1_000):
        rows = generator.integers(0, 300, 300)
        first, second, third = (
            measure_quality(labels[rows], scores[rows], weights[rows])
            for scores in (challenger, champion, rates)
        )
        draws.append(
            (first.auc - second.auc, first.log_loss - second.log_loss, first.log_loss - third.log_loss)
        )
    differences = (found.auc_difference, found.log_loss_difference, found.log_loss_above_mean_rate)
    for difference, deviation in zip(differences, np.std(draws, axis=0), strict=True):
        interval = difference.interval(confidence=0.95)
        assert interval.high - interval.value == pytest.approx(Z_95 * deviation, rel=0.1)
