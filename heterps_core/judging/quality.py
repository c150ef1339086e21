"""How good predictions are, and how two models compare on the same rows: differences with their intervals.

All works on logits: a float32 sigmoid turns confident predictions into exact 0 and 1, which ties them for the AUC and
makes the log-loss infinite. Intervals take rows as independent; clicks of one person within a day are not quite.
Where rows have weights, each function takes them as `weights` [N], at least 0: a mean over rows becomes a weighted
one, and a pair of a click and another row counts the product of their weights. None stands for 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.judging.intervals import Difference

LOGIT_LIMIT = 40.0
"""Logits are clipped to +-40 (a probability of 4e-18), so one row adds at most 40 to the sum of the log-loss."""

WHERE_DIVERGED = (
    "lower dense_learning_rate or embedding_learning_rate, look for values in the data that are not finite or very "
    "large (count_columns of the schema enter as logarithms), choose a larger batch_size, or begin with "
    "start_from=scratch"
)
"""Advice to the user."""

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickQuality:
    """Quality of predictions on a set of labelled rows."""

    auc: float | None
    """Chance that a random click is ranked above a random non-click; None where either is absent."""

    log_loss: float
    """Mean negative log-likelihood per row, in nats."""

    num_rows: int
    normalized_entropy: float | None = None
    """See `normalized_entropy`."""


def measure_quality(
    labels: npt.NDArray[Any], logits: FloatArray, weights: FloatArray | None = None
) -> ClickQuality:
    """Return AUC and log-loss of logits [N] for labels [N] in {0, 1}.

    Raises:
        TrainingError: There is no row of any weight, or a logit is not finite: the training has diverged.
    """
    weights = _checked_weights(labels, logits, weights)
    loss, click_rate = log_loss(labels, logits, weights), float(np.average(labels, weights=weights))
    return ClickQuality(
        auc=roc_auc(labels, logits, weights),
        log_loss=loss,
        num_rows=len(labels),
        normalized_entropy=normalized_entropy(loss, click_rate),
    )


def normalized_entropy(loss: float, click_rate: float) -> float | None:
    """Return a log-loss over that of the mean click rate of its rows: 1 is no better; None where all are equal.

    It depends less on the click rate than the log-loss does (He et al. 2014, "Practical Lessons from Predicting
    Clicks on Ads at Facebook").

    Example:
        >>> round(normalized_entropy(0.5, 0.5), 4)
        0.7213
    """
    if not 0.0 < click_rate < 1.0:
        return None
    return loss / -(click_rate * math.log(click_rate) + (1.0 - click_rate) * math.log(1.0 - click_rate))


def roc_auc(labels: npt.NDArray[Any], scores: FloatArray, weights: FloatArray | None = None) -> float | None:
    """Return the area under the ROC curve, or None where all labels are equal.

    By ranks (Mann and Whitney, 1947), with w_i the weights, W+ and W- their sums over clicks and over others, and r_i
    the weight of all rows that are ranked below row i and half of that of rows with its score:

        AUC = (sum of w_i r_i over clicks - W+ W+ / 2) / (W+ W-)

    So a tie between a click and a non-click counts one half.

    Example:
        >>> roc_auc(np.array([0, 1, 0, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
        0.875
    """
    weights = _checked_weights(labels, scores, weights)
    clicks = labels.astype(bool)
    of_clicks, of_others = float(weights[clicks].sum()), float(weights[~clicks].sum())
    if of_clicks == 0 or of_others == 0:
        return None
    rank_sum = float((weights * _mid_ranks(scores, weights))[clicks].sum())
    return (rank_sum - of_clicks * of_clicks / 2.0) / (of_clicks * of_others)


def log_loss(labels: npt.NDArray[Any], logits: FloatArray, weights: FloatArray | None = None) -> float:
    """Return the mean of log(1 + exp(z)) - y z over logits z [N], clipped, and labels y [N] in {0, 1}.

    Example:
        >>> round(log_loss(np.array([1, 0]), np.array([0.0, 0.0])), 6)
        0.693147
    """
    weights = _checked_weights(labels, logits, weights)
    clipped = clipped_logits(logits)
    # logaddexp(0, z) is log(1 + exp(z)) without overflow.
    return float(np.average(np.logaddexp(0.0, clipped) - labels * clipped, weights=weights))


def clipped_logits(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Return logits [N] within +-`LOGIT_LIMIT`."""
    return np.clip(logits.astype(np.float64), -LOGIT_LIMIT, LOGIT_LIMIT)


def _checked_weights(
    labels: npt.NDArray[Any], scores: FloatArray, weights: FloatArray | None
) -> npt.NDArray[np.float64]:
    """Return what each row [N] counts for."""
    if len(labels) == 0 or labels.shape != scores.shape:
        raise TrainingError(
            f"quality needs one score for each of at least 1 label, got {scores.shape} scores "
            f"for {labels.shape} labels"
        )
    num_bad = len(scores) - int(np.isfinite(scores).sum())
    if num_bad:
        raise TrainingError(
            f"predictions must be finite, but {num_bad} of {len(scores)} are not: the training has diverged; "
            f"{WHERE_DIVERGED}"
        )
    checked = _float_weights(labels, weights)
    if not checked.any():
        raise TrainingError(f"quality needs a row that counts, but all {len(labels)} have the weight 0")
    return checked


def _float_weights(labels: npt.NDArray[Any], weights: FloatArray | None) -> npt.NDArray[np.float64]:
    return np.ones(len(labels)) if weights is None else weights.astype(np.float64)


def auc_difference(
    labels: npt.NDArray[Any], challenger: FloatArray, champion: FloatArray, weights: FloatArray | None = None
) -> Difference:
    """Return AUC of the challenger less that of the champion, with its variance by DeLong's method.

    With m clicks and n others, the placement of a click is the share of others that it is ranked above, and that of
    another row the share of clicks ranked above it, ties counting one half. Both average to the AUC. With p_i and q_j
    the differences of the two models' placements of click i and of row j,

        difference = mean p_i          variance = var(p_i) / m + var(q_j) / n

    (DeLong, DeLong and Clarke-Pearson, Biometrics 44(3), 1988, for two curves). Placements come from mid-ranks in
    O(N log N) (Sun and Xu, IEEE Signal Processing Letters 21(11), 2014): the rank among all rows less that among the
    rows of the same class. With weights all means are weighted, and var(p_i) / m becomes
    m / (m - 1) sum of w_i^2 (p_i - mean p)^2 / W+^2, the variance of a weighted mean of independent rows.

    Args:
        labels: In {0, 1}, [N]: at least two clicks and two others.
        challenger: Finite scores [N] that increase with the click probability.
        champion: The same of the other model, on the same rows.
        weights: What each row counts for.

    Raises:
        ConfigurationError: The arrays break these rules.

    Example:
        >>> challenger, champion = np.array([3.0, 1.0, 2.0, 0.0]), np.array([1.0, 0.0, 1.0, 0.0])
        >>> auc_difference(np.array([1, 1, 0, 0]), challenger, champion).value
        0.25
    """
    clicks, weights = _checked_clicks(labels, weights, challenger, champion)
    of_clicks, of_others = _placements(clicks, challenger, weights)
    champion_of_clicks, champion_of_others = _placements(clicks, champion, weights)
    between_clicks = mean_difference(of_clicks - champion_of_clicks, weights[clicks])
    between_others = mean_difference(of_others - champion_of_others, weights[~clicks])
    return Difference(value=between_clicks.value, variance=between_clicks.variance + between_others.variance)


def _placements(
    clicks: npt.NDArray[np.bool_], scores: FloatArray, weights: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the placements of clicks [m] and of others [n], each in [0, 1]."""
    ranks = _mid_ranks(scores, weights)
    own_of_clicks, own_of_others = (_mid_ranks(scores[rows], weights[rows]) for rows in (clicks, ~clicks))
    of_clicks = (ranks[clicks] - own_of_clicks) / weights[~clicks].sum()
    of_others = 1.0 - (ranks[~clicks] - own_of_others) / weights[clicks].sum()
    return of_clicks, of_others


def _mid_ranks(scores: FloatArray, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return for each row [N] the weight of lower scores, and half of that of equal ones."""
    _, group = np.unique(scores, return_inverse=True)
    weight_of = np.bincount(group, weights=weights)
    ranks: npt.NDArray[np.float64] = (np.cumsum(weight_of) - weight_of / 2.0)[group]
    return ranks


def mean_difference(values: npt.NDArray[np.float64], weights: FloatArray) -> Difference:
    """Return the weighted mean of differences [n], at least two of a weight above 0, and that mean's variance."""
    weights = weights.astype(np.float64)
    mean = float(np.average(values, weights=weights))
    distances = weights * (values - mean) / weights.sum()
    count = np.count_nonzero(weights)
    return Difference(value=mean, variance=float((distances**2).sum()) * count / (count - 1))


def row_losses(clicks: npt.NDArray[np.bool_], logits: FloatArray) -> npt.NDArray[np.float64]:
    """Return the negative log-likelihood [N] of each row, in nats."""
    clipped = clipped_logits(logits)
    losses: npt.NDArray[np.float64] = np.logaddexp(0.0, np.where(clicks, -clipped, clipped))
    return losses


def _checked_clicks(
    labels: npt.NDArray[Any], weights: FloatArray | None, *models: FloatArray
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return which rows [N] are clicks, and what each row counts for."""
    shapes = {scores.shape for scores in models}
    if shapes != {labels.shape} or not all(np.isfinite(scores).all() for scores in models):
        raise ConfigurationError(
            f"models are compared by a finite score of each for all of the same rows, got scores of the shapes "
            f"{', '.join(map(str, sorted(shapes)))} for labels of the shape {labels.shape}"
        )
    clicks = labels.astype(bool)
    checked = _float_weights(labels, weights)
    counting = checked > 0.0
    num_clicks, num_rows = int(clicks[counting].sum()), int(counting.sum())
    if min(num_clicks, num_rows - num_clicks) < 2:
        raise ConfigurationError(
            f"models are compared on at least 2 clicks and 2 others, got {num_clicks} clicks in {num_rows} rows"
        )
    return clicks, checked
