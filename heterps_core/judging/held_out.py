"""How good one or two models are on the same held-out rows, in memory that does not grow with the rows.

Each model's logits are counted in bins of equal width in asinh((logit - mean) / deviation), which are narrow where
logits lie, 1e-5 deviations. From the counts follows an AUC in which a click and another row of one bin count one
half, as ties do. It is off by at most half of the share of such pairs, which is told as `auc_error`: 3e-6 where
logits are about normal. Log-loss and calibration are sums over the rows, exact. Where rows have weights, bins count
these, and all figures are weighted as those of `quality.py`; a row of weight 0 does not count at all.

Bins need the mean first, and intervals of differences both models' logits of each row, so these wait in a file
without a name, 9 bytes a row and model. Who has a part of the rows adds its counts and sums to those of the others;
nothing else is exchanged.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.errors import TrainingError
from heterps_core.json_codec import JsonDocument
from heterps_core.judging.intervals import Estimate
from heterps_core.judging.quality import (
    LOGIT_LIMIT,
    WHERE_DIVERGED,
    ClickQuality,
    FloatArray,
    clipped_logits,
    estimate,
    row_losses,
)

NUM_BINS = 1 << 20

_ROWS_PER_READ = 1 << 18
_ROW = np.dtype([("is_click", np.uint8), ("weight", np.float32), ("logit", np.float32)])

# Columns of `HeldOutScores.sums_CK`, and of its rows.
_NOT_FINITE, _ROWS, _LOSSES, _PROBABILITIES, _LOGITS = 0, slice(1, 4), slice(4, 7), 7, slice(8, 10)
_NUMBER, _WEIGHT = 0, 1

AddUp = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Returns the sum of an array over all who have a part of the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelQuality:
    """One model on the held-out rows."""

    auc: float | None
    """None where all labels are equal."""

    auc_error: float
    """Most that `auc` is off."""

    log_loss: float
    """Nats per row."""

    calibration_ratio: float | None
    """Predicted clicks over observed clicks; None without a click."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of two figures on the same rows."""

    value: float
    variance: float
    """Of `value`."""

    def interval(self, *, confidence: float) -> Estimate:
        """Return the two-sided interval, by the normal approximation."""
        return estimate(self.value, variance=self.variance, confidence=confidence)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutJudgement(JsonDocument):
    """A new model on held-out rows, beside the mean click rate and perhaps another model."""

    num_rows: int
    """Of a weight above 0, like the next two."""

    num_clicks: int
    num_not_finite: int
    """Predictions of the new model; then there is no quality."""

    quality: ModelQuality | None
    log_loss_above_mean_rate: Difference | None
    """Log-loss less that of a constant, the click rate of these rows; below 0 where the model is better. None without
    at least two clicks and two other rows, like the other differences."""

    other: ModelQuality | None = None
    """None where there is no other model, or its predictions are not finite."""

    other_not_finite: int = 0
    auc_difference: Difference | None = None
    """Of the new model less the other: above 0 where it ranks better."""

    log_loss_difference: Difference | None = None

    def click_quality(self) -> ClickQuality:
        """Return the quality of the new model.

        Raises:
            TrainingError: A prediction is not finite: the training has diverged.
        """
        if self.quality is None:
            raise TrainingError(
                f"predictions must be finite, but {self.num_not_finite} of {self.num_rows} are not: the training has "
                f"diverged; {WHERE_DIVERGED}"
            )
        return ClickQuality(auc=self.quality.auc, log_loss=self.quality.log_loss, num_rows=self.num_rows)


class HeldOutScores:
    """One model's logits of held-out rows, or of a part of them, as they come.

    Attributes:
        sums_CK: By class (others, clicks): rows whose logit is not finite, all rows, their weights and the squares of
            these, and of the finite ones `_moments` of the losses, then, weighted, the probabilities, the clipped
            logits and their squares added up.
    """

    def __init__(self) -> None:
        self.sums_CK: npt.NDArray[np.float64] = np.zeros((2, 10))
        self._rows = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._rows.close)

    def add(self, labels: npt.NDArray[Any], logits: FloatArray, weights: FloatArray | None = None) -> None:
        """Take in the next rows: labels [n] in {0, 1}, logits [n], and weights [n], None where all count alike."""
        rows = np.empty(len(labels), dtype=_ROW)
        rows["is_click"], rows["logit"], rows["weight"] = labels, logits, 1.0 if weights is None else weights
        rows = rows[rows["weight"] > 0.0]
        self._rows.write(rows.tobytes())
        for of_class, is_click in enumerate((False, True)):
            of_all = rows[rows["is_click"] == is_click]
            finite = of_all[np.isfinite(of_all["logit"])]
            of_rows, of_finite = (some["weight"].astype(np.float64) for some in (of_all, finite))
            losses = row_losses(np.full(len(finite), is_click), finite["logit"])
            clipped = clipped_logits(finite["logit"])
            probabilities = 1.0 / (1.0 + np.exp(-clipped))
            self.sums_CK[of_class] += (
                len(of_all) - len(finite),
                len(of_all),
                of_rows.sum(),
                (of_rows**2).sum(),
                *_moments(losses, of_finite),
                of_finite @ probabilities,
                of_finite @ clipped,
                of_finite @ clipped**2,
            )

    def rows(self) -> Iterator[npt.NDArray[Any]]:
        """Yield what was added, in its order, some rows at a time."""
        self._rows.seek(0)
        while content := self._rows.read(_ROWS_PER_READ * _ROW.itemsize):
            yield np.frombuffer(content, dtype=_ROW)

    def counts(self, bins: Bins) -> npt.NDArray[np.float64]:
        """Return the weights of the finite rows by class and bin [2, B]."""
        found = np.zeros(2 * NUM_BINS)
        for rows in self.rows():
            finite = rows[np.isfinite(rows["logit"])]
            places = finite["is_click"] * np.int64(NUM_BINS) + bins.of(finite["logit"])
            found += np.bincount(places, weights=finite["weight"], minlength=len(found))
        return found.reshape(2, NUM_BINS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """Where bins lie."""

    mean: float
    deviation: float

    @classmethod
    def around(cls, sums_CK: npt.NDArray[np.float64]) -> Bins:
        """Return bins for logits of these sums; see `HeldOutScores`."""
        total, squares = sums_CK[:, _LOGITS].sum(axis=0).tolist()
        weight = float(sums_CK[:, _ROWS][:, _WEIGHT].sum()) or 1.0
        variance = squares / weight - (total / weight) ** 2
        return cls(mean=total / weight, deviation=math.sqrt(max(variance, 0.0)) or 1.0)

    def of(self, logits: FloatArray) -> npt.NDArray[np.int64]:
        """Return the bin [n] of each finite logit [n]; a larger logit has the same bin or a later one."""
        places = np.arcsinh((clipped_logits(logits) - self.mean) / self.deviation)
        largest = math.asinh((LOGIT_LIMIT + abs(self.mean)) / self.deviation)
        bins: npt.NDArray[np.int64] = np.minimum(
            (places / largest + 1.0) * (NUM_BINS // 2), NUM_BINS - 1
        ).astype(np.int64)
        return bins


def judge_held_out(
    scores: HeldOutScores, other: HeldOutScores | None = None, *, add_up: AddUp = lambda array: array
) -> HeldOutJudgement:
    """Judge a new model by its scores, beside another model's on the same rows in the same order.

    AUC differences and their variance are those of DeLong, as `quality.auc_difference` has them, with placements read
    from the counts.

    Args:
        add_up: Where several processes have a part of the rows each; all of them call this function then.

    Raises:
        TrainingError: There is no row.
    """
    sums_CK = add_up(scores.sums_CK)
    bins = Bins.around(sums_CK)
    counts_CB = add_up(scores.counts(bins))
    rows_CK = sums_CK[:, _ROWS]
    num_others, num_clicks = rows_CK[:, _NUMBER].astype(int).tolist()
    judgement = HeldOutJudgement(
        num_rows=num_others + num_clicks,
        num_clicks=num_clicks,
        num_not_finite=int(sums_CK[:, _NOT_FINITE].sum()),
        quality=_quality(counts_CB, sums_CK),
        log_loss_above_mean_rate=_above_mean_rate(sums_CK),
    )
    if other is None:
        return judgement
    other_sums_CK = add_up(other.sums_CK)
    other_bins = Bins.around(other_sums_CK)
    other_counts_CB = add_up(other.counts(other_bins))
    judgement = replace(
        judgement,
        other=_quality(other_counts_CB, other_sums_CK),
        other_not_finite=int(other_sums_CK[:, _NOT_FINITE].sum()),
    )
    if judgement.log_loss_above_mean_rate is None or judgement.other is None:
        return judgement
    placed = (bins, _placements(counts_CB)), (other_bins, _placements(other_counts_CB))
    placements, losses = add_up(_paired_moments(scores, other, *placed))
    of_others, of_clicks = (_mean(*each) for each in zip(rows_CK, placements, strict=True))
    return replace(
        judgement,
        auc_difference=Difference(value=of_clicks.value, variance=of_clicks.variance + of_others.variance),
        log_loss_difference=_mean(rows_CK.sum(axis=0), losses.sum(axis=0)),
    )


def _quality(counts_CB: npt.NDArray[np.float64], sums_CK: npt.NDArray[np.float64]) -> ModelQuality | None:
    weight = float(sums_CK[:, _ROWS][:, _WEIGHT].sum())
    if not weight:
        raise TrainingError(
            "a model must be judged on at least 1 row of a weight above 0, got none; hold rows out by eval_fraction"
        )
    if sums_CK[:, _NOT_FINITE].any():
        return None
    auc, auc_error = auc_of_counts(counts_CB)
    weight_of_clicks = float(sums_CK[1, _ROWS][_WEIGHT])
    probabilities = float(sums_CK[:, _PROBABILITIES].sum())
    return ModelQuality(
        auc=auc,
        auc_error=auc_error,
        log_loss=float(sums_CK[:, _LOSSES][:, 0].sum()) / weight,
        calibration_ratio=probabilities / weight_of_clicks if weight_of_clicks else None,
    )


def auc_of_counts(counts_CB: npt.NDArray[np.float64]) -> tuple[float | None, float]:
    """Return the AUC of weights by class (others, clicks) and bin, and the most that binning has moved it.

    With o_b others and c_b clicks in bin b, and O and C of them in all, all weighted,

        AUC = sum_b c_b (o_1 + ... + o_(b-1) + o_b / 2) / (O C)        error <= sum_b c_b o_b / 2 / (O C)

    Example:
        >>> auc_of_counts(np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
        (0.875, 0.125)
    """
    others, clicks = counts_CB
    pairs = others.sum() * clicks.sum()
    if pairs == 0:
        return None, 0.0
    halves = clicks * others / 2.0
    above = clicks * (np.cumsum(others) - others)
    return float((above.sum() + halves.sum()) / pairs), float(halves.sum() / pairs)


def _placements(counts_CB: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return for a row of each class and bin [2, B] the share of the other class that it is ranked right against."""
    others, clicks = counts_CB
    of_clicks = (np.cumsum(others) - others / 2.0) / others.sum()
    of_others = 1.0 - (np.cumsum(clicks) - clicks / 2.0) / clicks.sum()
    return np.stack([of_others, of_clicks])


def _above_mean_rate(sums_CK: npt.NDArray[np.float64]) -> Difference | None:
    """Return the log-loss less that of a constant, the mean click rate; it is one number for each class."""
    rows_CK, losses_CK = sums_CK[:, _ROWS], sums_CK[:, _LOSSES]
    if rows_CK[:, _NUMBER].min() < 2 or sums_CK[:, _NOT_FINITE].any():
        return None
    _, weights, squared_weights = rows_CK.T
    losses, doubly_weighted, squares = losses_CK.T
    of_constant = -np.log(weights / weights.sum())
    differences_CK = np.stack(
        [
            losses - of_constant * weights,
            doubly_weighted - of_constant * squared_weights,
            squares - 2.0 * of_constant * doubly_weighted + of_constant**2 * squared_weights,
        ]
    )
    return _mean(rows_CK.sum(axis=0), differences_CK.sum(axis=1))


def _paired_moments(
    scores: HeldOutScores,
    other: HeldOutScores,
    placed: tuple[Bins, npt.NDArray[np.float64]],
    other_placed: tuple[Bins, npt.NDArray[np.float64]],
) -> npt.NDArray[np.float64]:
    """Return `_moments` of the differences of placements and of those of losses, for both classes, [2, 2, 3]."""
    sums = np.zeros((2, 2, 3))
    for rows, other_rows in zip(scores.rows(), other.rows(), strict=True):
        is_click, first, second = rows["is_click"], rows["logit"], other_rows["logit"]
        (bins, placements_CB), (other_bins, other_placements_CB) = placed, other_placed
        placements = placements_CB[is_click, bins.of(first)]
        placements -= other_placements_CB[is_click, other_bins.of(second)]
        losses = row_losses(is_click == 1, first) - row_losses(is_click == 1, second)
        for of_class in (0, 1):
            mine = is_click == of_class
            for figure, values in enumerate((placements, losses)):
                sums[figure, of_class] += _moments(values[mine], rows["weight"][mine].astype(np.float64))
    return sums


def _moments(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return values times weight, values times the square of the weight, and the squares of both, added up."""
    weighted = values * weights
    return float(weighted.sum()), float(weighted @ weights), float(weighted @ weighted)


def _mean(rows: npt.NDArray[np.float64], moments: npt.NDArray[np.float64]) -> Difference:
    """Return the weighted mean of differences, with its variance as `quality.auc_difference` has it.

    Args:
        rows: Their number, their weights added up, and the squares of these.
        moments: Of the differences.
    """
    number, weight, squared_weight = rows.tolist()
    total, doubly_weighted, squares = moments.tolist()
    mean = total / weight
    distances = squares - 2.0 * mean * doubly_weighted + mean**2 * squared_weight
    return Difference(value=mean, variance=max(distances, 0.0) * number / (number - 1) / weight**2)
