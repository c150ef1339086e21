"""How good predictions are, and how two models compare on the same rows: differences with their intervals.

All works on logits: a float32 sigmoid turns confident predictions into exact 0 and 1, which ties them for the AUC and
makes the log-loss infinite. Intervals take rows as independent; clicks of one person within a day are not quite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.errors import ConfigurationError, TrainingError

LOGIT_LIMIT = 40.0
"""Logits are clipped to +-40 (a probability of 4e-18), so one row adds at most 40 to the sum of the log-loss."""

WHERE_DIVERGED = (
    "lower dense_learning_rate or embedding_learning_rate, look for values in the data that are not finite or very "
    "large (count_columns of the schema enter as logarithms), choose a larger batch_size, or begin with "
    "start_from=scratch"
)
"""What can be done about it by whoever trains."""

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickQuality:
    """Quality of predictions on a set of labelled rows."""

    auc: float | None
    """Chance that a random click is ranked above a random non-click; None where either is absent."""

    log_loss: float
    """Mean negative log-likelihood per row, in nats."""

    num_rows: int


def measure_quality(labels: npt.NDArray[Any], logits: FloatArray) -> ClickQuality:
    """Return AUC and log-loss of logits [N] for labels [N] in {0, 1}.

    Raises:
        TrainingError: There is no row, or a logit is not finite: the training has diverged.
    """
    return ClickQuality(auc=roc_auc(labels, logits), log_loss=log_loss(labels, logits), num_rows=len(labels))


def roc_auc(labels: npt.NDArray[Any], scores: FloatArray) -> float | None:
    """Return the area under the ROC curve, or None where all labels are equal.

    By ranks (Mann and Whitney, 1947), with R+ the sum of the clicks' ranks, n+ clicks and n- others:

        AUC = (R+ - n+ (n+ + 1) / 2) / (n+ n-)

    Equal scores share the mean of their ranks, so a tie between a click and a non-click counts one
    half.

    Example:
        >>> roc_auc(np.array([0, 1, 0, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
        0.875
    """
    _check(labels, scores)
    clicks = labels.astype(bool)
    num_clicks = int(clicks.sum())
    num_others = len(clicks) - num_clicks
    if num_clicks == 0 or num_others == 0:
        return None
    rank_sum = float(_mid_ranks(scores)[clicks].sum())
    return (rank_sum - num_clicks * (num_clicks + 1) / 2.0) / (num_clicks * num_others)


def log_loss(labels: npt.NDArray[Any], logits: FloatArray) -> float:
    """Return the mean of log(1 + exp(z)) - y z over logits z [N], clipped, and labels y [N] in {0, 1}.

    Example:
        >>> round(log_loss(np.array([1, 0]), np.array([0.0, 0.0])), 6)
        0.693147
    """
    _check(labels, logits)
    clipped = _clipped(logits)
    # logaddexp(0, z) is log(1 + exp(z)) without overflow.
    return float(np.mean(np.logaddexp(0.0, clipped) - labels * clipped))


def _clipped(logits: FloatArray) -> npt.NDArray[np.float64]:
    return np.clip(logits.astype(np.float64), -LOGIT_LIMIT, LOGIT_LIMIT)


def _check(labels: npt.NDArray[Any], scores: FloatArray) -> None:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with the ends of its two-sided confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedComparison:
    """Figures of a challenger less those of a champion, on the same rows."""

    auc_difference: Estimate
    """Above 0 where the challenger ranks better."""

    log_loss_difference: Estimate
    """Nats per row; below 0 where the challenger is better."""

    @classmethod
    def of(
        cls,
        labels: npt.NDArray[Any],
        challenger: FloatArray,
        champion: FloatArray,
        *,
        confidence: float,
    ) -> PairedComparison:
        """Compare two models' logits on the same rows; see `auc_difference`."""
        return cls(
            auc_difference=auc_difference(labels, challenger, champion, confidence=confidence),
            log_loss_difference=log_loss_difference(labels, challenger, champion, confidence=confidence),
        )


def auc_difference(
    labels: npt.NDArray[Any], challenger: FloatArray, champion: FloatArray, *, confidence: float
) -> Estimate:
    """Return AUC of the challenger less that of the champion, with its interval by DeLong's method.

    With m clicks and n others, the placement of a click is the share of others that it is ranked above, and that of
    another row the share of clicks ranked above it, ties counting one half. Both average to the AUC. With p_i and q_j
    the differences of the two models' placements of click i and of row j,

        difference = mean p_i          variance = var(p_i) / m + var(q_j) / n

    (DeLong, DeLong and Clarke-Pearson, Biometrics 44(3), 1988, for two curves). Placements come from mid-ranks in
    O(N log N) (Sun and Xu, IEEE Signal Processing Letters 21(11), 2014): the rank among all rows less that among the
    rows of the same class.

    Args:
        labels: In {0, 1}, [N]: at least two clicks and two others.
        challenger: Finite scores [N] that increase with the click probability.
        champion: The same of the other model, on the same rows.
        confidence: Of the two-sided interval, in (0, 1).

    Raises:
        ConfigurationError: The arrays or the confidence break these rules.

    Example:
        >>> estimate = auc_difference(
        ...     np.array([1, 1, 0, 0]),
        ...     np.array([3.0, 1.0, 2.0, 0.0]),
        ...     np.array([1.0, 0.0, 1.0, 0.0]),
        ...     confidence=0.95,
        ... )
        >>> estimate.value
        0.25
    """
    clicks = _checked_clicks(labels, challenger, champion)
    of_clicks, of_others = _placements(clicks, challenger)
    champion_of_clicks, champion_of_others = _placements(clicks, champion)
    p, q = of_clicks - champion_of_clicks, of_others - champion_of_others
    return _estimate(
        float(p.mean()), variance=p.var(ddof=1) / len(p) + q.var(ddof=1) / len(q), confidence=confidence
    )


def log_loss_difference(
    labels: npt.NDArray[Any], challenger: FloatArray, champion: FloatArray, *, confidence: float
) -> Estimate:
    """Return the challenger's mean log-loss less the champion's, with its interval; takes logits as `auc_difference`.

    With d_i the difference of the two losses on row i, the interval is normal: mean(d) +- z sd(d) / sqrt(N).
    """
    clicks = _checked_clicks(labels, challenger, champion)
    differences = _row_losses(clicks, challenger) - _row_losses(clicks, champion)
    return _estimate(
        float(differences.mean()), variance=differences.var(ddof=1) / len(clicks), confidence=confidence
    )


def calibration_ratio(labels: npt.NDArray[Any], logits: FloatArray) -> float | None:
    """Return predicted clicks over observed clicks, 1 for a model that is right on average; None without a click.

    Example:
        >>> calibration_ratio(np.array([1, 0, 0, 0]), np.zeros(4))
        2.0
    """
    num_clicks = float(labels.sum(dtype=np.float64))
    if num_clicks == 0:
        return None
    clipped = _clipped(logits)
    return float((1.0 / (1.0 + np.exp(-clipped))).sum()) / num_clicks


def constant_logits(labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return logits [N] of the mean click rate of `labels` [N]: the best that a constant can do on them.

    Args:
        labels: In {0, 1}, with at least one of each.
    """
    rate = float(labels.mean(dtype=np.float64))
    return np.full(len(labels), math.log(rate / (1.0 - rate)))


def _placements(
    clicks: npt.NDArray[np.bool_], scores: FloatArray
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the placements of clicks [m] and of others [n], each in [0, 1]."""
    ranks = _mid_ranks(scores)
    of_clicks = (ranks[clicks] - _mid_ranks(scores[clicks])) / int((~clicks).sum())
    of_others = 1.0 - (ranks[~clicks] - _mid_ranks(scores[~clicks])) / int(clicks.sum())
    return of_clicks, of_others


def _mid_ranks(scores: FloatArray) -> npt.NDArray[np.float64]:
    """Return ranks [N] from 1; equal scores share the mean of theirs."""
    _, group, group_sizes = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(group_sizes) - (group_sizes - 1) / 2.0
    ranks: npt.NDArray[np.float64] = mean_ranks[group]
    return ranks


def _row_losses(clicks: npt.NDArray[np.bool_], logits: FloatArray) -> npt.NDArray[np.float64]:
    """Return the negative log-likelihood [N] of each row, in nats."""
    clipped = _clipped(logits)
    losses: npt.NDArray[np.float64] = np.logaddexp(0.0, np.where(clicks, -clipped, clipped))
    return losses


def _estimate(value: float, *, variance: float, confidence: float) -> Estimate:
    if not 0.0 < confidence < 1.0:
        raise ConfigurationError(f"confidence must be in (0, 1), got {confidence}")
    half_width = NormalDist().inv_cdf((1.0 + confidence) / 2.0) * math.sqrt(variance)
    return Estimate(value=value, low=value - half_width, high=value + half_width)


def _checked_clicks(labels: npt.NDArray[Any], *models: FloatArray) -> npt.NDArray[np.bool_]:
    """Return which rows [N] are clicks."""
    shapes = {scores.shape for scores in models}
    if shapes != {labels.shape} or not all(np.isfinite(scores).all() for scores in models):
        raise ConfigurationError(
            f"models are compared by a finite score of each for all of the same rows, got scores of the shapes "
            f"{', '.join(map(str, sorted(shapes)))} for labels of the shape {labels.shape}"
        )
    clicks = labels.astype(bool)
    num_clicks = int(clicks.sum())
    if min(num_clicks, len(clicks) - num_clicks) < 2:
        raise ConfigurationError(
            f"models are compared on at least 2 clicks and 2 others, got {num_clicks} clicks in {len(clicks)} rows"
        )
    return clicks
