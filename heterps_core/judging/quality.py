"""How good predicted click probabilities are: AUC and log-loss, in plain NumPy.

Both work on logits, because a float32 sigmoid turns confident predictions into exact 0 and 1, which
ties them for the AUC and makes the log-loss infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.errors import TrainingError

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

    Args:
        labels: [N] in {0, 1}.
        scores: [N], finite; any increasing function of the click probability.

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
    _, group, group_sizes = np.unique(scores, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(group_sizes)
    mean_ranks = last_ranks - (group_sizes - 1) / 2.0
    rank_sum = float(mean_ranks[group][clicks].sum())
    return (rank_sum - num_clicks * (num_clicks + 1) / 2.0) / (num_clicks * num_others)


def log_loss(labels: npt.NDArray[Any], logits: FloatArray) -> float:
    """Return the mean of log(1 + exp(z)) - y z over logits z [N], clipped, and labels y [N] in {0, 1}.

    Example:
        >>> round(log_loss(np.array([1, 0]), np.array([0.0, 0.0])), 6)
        0.693147
    """
    _check(labels, logits)
    clipped = np.clip(logits.astype(np.float64), -LOGIT_LIMIT, LOGIT_LIMIT)
    # logaddexp(0, z) is log(1 + exp(z)) without overflow.
    return float(np.mean(np.logaddexp(0.0, clipped) - labels * clipped))


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
