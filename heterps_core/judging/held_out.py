"""How good one or two models are on the same held-out rows, where several processes may have a part of the rows each.

Of more than `MAX_JUDGED_ROWS` every k-th row is judged: half of DeLong's interval of 95 % for the difference of two
models is about 0.0004 then. AUC, log-loss and intervals are exact for the judged rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.errors import TrainingError
from heterps_core.json_codec import JsonDocument
from heterps_core.judging.intervals import Difference
from heterps_core.judging.quality import (
    WHERE_DIVERGED,
    ClickQuality,
    FloatArray,
    auc_difference,
    clipped_logits,
    log_loss,
    mean_difference,
    normalized_entropy,
    roc_auc,
    row_losses,
)

MAX_JUDGED_ROWS = 1_000_000

_ROW = np.dtype([("is_click", np.bool_), ("weight", np.float32), ("logit", np.float32)])

Gather = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Returns an array [n] of each process one after the other, in the same order at each call."""


_NUM_BINS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """About a tenth of the rows, by their predictions."""

    num_rows: int
    predicted: float
    """Mean probability, by the weights of rows."""

    observed: float
    """Share of clicks, by the weights of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelQuality:
    """One model on the held-out rows."""

    auc: float | None
    """None where all labels are equal."""

    log_loss: float
    """Nats per row."""

    calibration_ratio: float | None
    """Predicted clicks over observed clicks; None without a click."""

    normalized_entropy: float | None = None
    """Log-loss over that of the mean click rate; None where all labels are equal."""

    deciles: tuple[CalibrationBin, ...] = ()
    """Predicted against observed clicks, from the lowest predictions to the highest; empty in earlier judgements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutJudgement(JsonDocument):
    """A new model on held-out rows, beside the mean click rate and perhaps another model."""

    num_rows: int
    """Judged rows of a weight above 0, like the next one."""

    num_clicks: int
    num_not_finite: int
    """Predictions of the new model, of all rows of a weight above 0; then there is no quality."""

    quality: ModelQuality | None
    log_loss_above_mean_rate: Difference | None
    """Log-loss less that of a constant, the click rate of these rows; below 0 where the model is better. None without
    at least two clicks and two other rows, like the other differences."""

    other: ModelQuality | None = None
    """None where there is no other model, or its predictions are not finite."""

    other_not_finite: int = 0
    auc_difference: Difference | None = None
    """AUC of the new model less that of the other: above 0 where the new one ranks better."""

    log_loss_difference: Difference | None = None

    def click_quality(self) -> ClickQuality:
        """Return the quality of the new model.

        Raises:
            TrainingError: A prediction is not finite: the training has diverged.
        """
        if self.quality is None:
            raise TrainingError(
                f"predictions must be finite, but {self.num_not_finite:,} are not: the training has diverged; "
                f"{WHERE_DIVERGED}"
            )
        return ClickQuality(
            auc=self.quality.auc,
            log_loss=self.quality.log_loss,
            num_rows=self.num_rows,
            normalized_entropy=self.quality.normalized_entropy,
        )


class HeldOutScores:
    """One model's logits of held-out rows, or of a part of them, as they come.

    Args:
        num_rows: Held-out rows of all processes, at least as many as come.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_not_finite = 0
        self._stride = max(-(-num_rows // MAX_JUDGED_ROWS), 1)
        self._num_seen = 0
        self._parts = [np.empty(0, dtype=_ROW)]

    def add(self, labels: npt.NDArray[Any], logits: FloatArray, weights: FloatArray | None = None) -> None:
        """Take in the next rows: labels [n] in {0, 1}, logits [n], and weights [n], None where all count alike."""
        rows = np.empty(len(labels), dtype=_ROW)
        rows["is_click"], rows["logit"], rows["weight"] = labels, logits, 1.0 if weights is None else weights
        self.num_not_finite += int((~np.isfinite(rows["logit"]) & (rows["weight"] > 0.0)).sum())
        rows = rows[-self._num_seen % self._stride :: self._stride]
        self._num_seen += len(labels)
        self._parts.append(rows[rows["weight"] > 0.0])

    @property
    def rows(self) -> npt.NDArray[Any]:
        """Rows to be judged [n], in the order in which they came."""
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0]


def judge_held_out(
    scores: HeldOutScores, other: HeldOutScores | None = None, *, gather: Gather = lambda array: array
) -> HeldOutJudgement:
    """Judge a new model by its scores, beside another model's on the same rows in the same order.

    Args:
        gather: Where several processes have a part of the rows each; all of them call this function then.

    Raises:
        TrainingError: There is no row.
    """
    rows = gather(scores.rows)
    if not len(rows):
        raise TrainingError(
            "a model must be judged on at least 1 row of a weight above 0, got none; hold rows out by eval_fraction"
        )
    num_not_finite = int(gather(np.array([scores.num_not_finite])).sum())
    labels, weights = rows["is_click"], rows["weight"]
    num_clicks = int(labels.sum())
    has_both = min(num_clicks, len(rows) - num_clicks) >= 2
    judgement = HeldOutJudgement(
        num_rows=len(rows),
        num_clicks=num_clicks,
        num_not_finite=num_not_finite,
        quality=None if num_not_finite else _quality(rows),
        log_loss_above_mean_rate=None,
    )
    if has_both and not num_not_finite:
        losses = row_losses(labels, rows["logit"])
        click_rate = float(np.average(labels, weights=weights))
        of_constant = -np.log(np.where(labels, click_rate, 1.0 - click_rate))
        judgement = replace(
            judgement, log_loss_above_mean_rate=mean_difference(losses - of_constant, weights)
        )
    if other is None:
        return judgement
    other_rows, other_not_finite = gather(other.rows), int(gather(np.array([other.num_not_finite])).sum())
    other_quality = None if other_not_finite else _quality(other_rows)
    judgement = replace(judgement, other=other_quality, other_not_finite=other_not_finite)
    if not has_both or num_not_finite or other_not_finite:
        return judgement
    return replace(
        judgement,
        auc_difference=auc_difference(labels, rows["logit"], other_rows["logit"], weights),
        log_loss_difference=mean_difference(losses - row_losses(labels, other_rows["logit"]), weights),
    )


def _quality(rows: npt.NDArray[Any]) -> ModelQuality:
    labels, logits, weights = rows["is_click"], rows["logit"], rows["weight"].astype(np.float64)
    probabilities = 1.0 / (1.0 + np.exp(-clipped_logits(logits)))
    weight_of_clicks = float(weights @ labels)
    loss = log_loss(labels, logits, weights)
    return ModelQuality(
        auc=roc_auc(labels, logits, weights),
        log_loss=loss,
        calibration_ratio=float(weights @ probabilities) / weight_of_clicks if weight_of_clicks else None,
        normalized_entropy=normalized_entropy(loss, weight_of_clicks / float(weights.sum())),
        deciles=_deciles(labels, probabilities, weights),
    )


def _deciles(
    labels: npt.NDArray[np.bool_], probabilities: FloatArray, weights: FloatArray
) -> tuple[CalibrationBin, ...]:
    """Return predicted and observed clicks of tenths of the rows [N]; fewer where there are fewer rows."""
    order = np.argsort(probabilities, kind="stable")
    num_bins = min(_NUM_BINS, len(labels))
    starts = np.arange(num_bins) * len(labels) // num_bins
    of_bins, predicted, observed = (
        np.add.reduceat(values[order], starts)
        for values in (weights, weights * probabilities, weights * labels)
    )
    counts = np.diff(starts, append=len(labels)).tolist()
    bins = zip(counts, (predicted / of_bins).tolist(), (observed / of_bins).tolist(), strict=True)
    return tuple(CalibrationBin(num_rows=rows, predicted=mean, observed=share) for rows, mean, share in bins)
