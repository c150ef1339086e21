"""The hidden effects of a synthetic click stream: the drawn rows and their click probabilities.

The log-odds of a click are a sum of: an effect of the value in each of 26 slots; products of hidden
factors of two values for some pairs of slots, which no linear model can learn; and a linear and a
quadratic effect of the logarithm of some of 13 counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heterps_core.data.hashing import mix

CLICK_RATE = 0.25
"""Click rate of the stream; published samples of click logs lie at 0.2 to 0.26."""

_LOGIT_DEVIATION = 1.4
"""Standard deviation of the log-odds; with it the best reachable AUC is 0.80 to 0.82."""

SLOT_CARDINALITIES = (
    150, 300, 900, 700, 50, 8, 800, 60, 3, 1000, 600, 900, 400,
    20, 500, 800, 9, 350, 250, 4, 900, 6, 12, 500, 35, 300,
)  # fmt: skip
"""Values per slot: from a few to a thousand, so that some 100,000 rows show most of them often enough."""

_SLOT_MISSING_SHARES = (
    0.0, 0.0, 0.03, 0.03, 0.0, 0.15, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0,
    0.0, 0.0, 0.03, 0.0, 0.0, 0.45, 0.45, 0.03, 0.75, 0.0, 0.03, 0.45, 0.45,
)  # fmt: skip

_COUNT_LOG_MEANS = (0.8, 2.5, 2.0, 1.8, 7.0, 3.5, 1.8, 2.2, 4.0, 0.2, 1.0, 0.3, 2.0)
_COUNT_LOG_DEVIATIONS = (1.0, 1.8, 1.3, 1.0, 2.0, 1.5, 1.3, 1.0, 1.4, 0.5, 0.9, 0.6, 1.1)
_COUNT_MISSING_SHARES = (0.4, 0.0, 0.2, 0.2, 0.03, 0.2, 0.05, 0.0, 0.05, 0.4, 0.05, 0.75, 0.2)

_ZIPF_EXPONENT = 1.2
_INTERACTING_SLOTS = ((5, 22), (8, 13), (16, 19), (21, 22))
"""Pairs of slots with few values, so that each combination is seen often enough to be learned."""

_SLOT_SHARE, _INTERACTION_SHARE, _COUNT_SHARE = 0.35, 0.35, 0.3

_CALIBRATION_ROWS = 65_536
CALIBRATION_STREAM = 2**32
"""Number of the random stream for calibration; chunks count from 0 and never get there."""

_POPULARITY_STEPS = 65_536
"""Popularity is held in steps of 1/65536: a value is then drawn by one look-up."""

FloatArray = npt.NDArray[np.float64]


class ClickEffects(NamedTuple):
    """What the log-odds are a sum of, before it is scaled."""

    values: Sequence[FloatArray]
    """Effects of each slot's values [cardinality + 1]; the last is the effect of "missing"."""

    factors: Sequence[FloatArray]
    """Factors of the values of each interacting slot, two for each pair."""

    counts: Sequence[FloatArray]
    """Slopes and curvatures [13]."""

    @classmethod
    def draw(cls, generator: np.random.Generator) -> ClickEffects:
        """Draw all effects."""
        return cls(
            [draw_value_effects(generator, size) for size in SLOT_CARDINALITIES],
            [
                generator.normal(size=SLOT_CARDINALITIES[slot] + 1)
                for pair in _INTERACTING_SLOTS
                for slot in pair
            ],
            [size * generator.normal(size=len(_COUNT_LOG_MEANS)) for size in (1.0, 0.5)],
        )


def draw_value_effects(generator: np.random.Generator, size: int) -> FloatArray:
    """Draw the effects [size + 1] of a slot's values and of "missing".

    Slots of many values have small ones: nothing could learn large ones from a few rows each.
    """
    effects: FloatArray = generator.normal(size=size + 1) * size**-0.5
    return effects


class ClickTruth:
    """The hidden effects of a stream, scaled to the click rate and to their shares of the variance.

    `texts` [cardinality + 1] end with a null for "missing"; the generator draws the rows that effects are scaled by.
    """

    def __init__(
        self, effects: ClickEffects, texts: Sequence[pa.StringArray], generator: np.random.Generator
    ) -> None:
        self._popularity = [_popularity_table(size) for size in SLOT_CARDINALITIES]
        self._effects = effects
        self._texts = texts
        # Until calibrated: all parts unscaled.
        self._scales = np.ones(3)
        self._part_means = np.zeros(3)
        self._intercept = 0.0
        self._calibrate(generator)

    @classmethod
    def of_seed(cls, seed: int) -> ClickTruth:
        """Return the truth of a stream; a function of the seed alone."""
        generator = np.random.default_rng([seed, CALIBRATION_STREAM])
        texts = [value_texts(slot, np.arange(size)) for slot, size in enumerate(SLOT_CARDINALITIES)]
        return cls(ClickEffects.draw(generator), texts, generator)

    def draw(self, generator: np.random.Generator, num_rows: int) -> tuple[FloatArray, list[pa.Array]]:
        """Draw rows: return their click probabilities [N], and 13 count and 26 text columns, null where missing."""
        counts, is_count_missing = _draw_counts(generator, num_rows)
        values = self._draw_values(generator, num_rows)
        parts = self._parts(counts, is_count_missing, values)
        logits = self._intercept + (parts - self._part_means) @ self._scales
        columns = [pa.array(counts[:, i], mask=is_count_missing[:, i]) for i in range(counts.shape[1])]
        columns += [texts.take(pa.array(values[:, slot])) for slot, texts in enumerate(self._texts)]
        return 1.0 / (1.0 + np.exp(-logits)), columns

    def _draw_values(self, generator: np.random.Generator, num_rows: int) -> npt.NDArray[np.int64]:
        """Draw numbers [N, 26] of values inside their slots; a slot's cardinality stands for "missing"."""
        values = np.empty((num_rows, len(SLOT_CARDINALITIES)), dtype=np.int64, order="F")
        for slot, size in enumerate(SLOT_CARDINALITIES):
            drawn = generator.integers(0, _POPULARITY_STEPS, size=num_rows, dtype=np.uint16)
            values[:, slot] = self._popularity[slot][drawn]
            if _SLOT_MISSING_SHARES[slot]:
                is_missing = generator.random(num_rows, dtype=np.float32) < _SLOT_MISSING_SHARES[slot]
                values[is_missing, slot] = size
        return values

    def _parts(
        self,
        counts: npt.NDArray[np.int64],
        is_count_missing: npt.NDArray[np.bool_],
        values: npt.NDArray[np.int64],
    ) -> FloatArray:
        """Return the three parts [N, 3] of the log-odds: slots, interactions, counts."""
        parts = np.zeros((len(values), 3))
        for slot, effects in enumerate(self._effects.values):
            parts[:, 0] += effects[values[:, slot]]
        factors = iter(self._effects.factors)
        for first, second in _INTERACTING_SLOTS:
            parts[:, 1] += next(factors)[values[:, first]] * next(factors)[values[:, second]]
        logs = (np.log1p(np.maximum(counts, 0)) - _COUNT_LOG_MEANS) / _COUNT_LOG_DEVIATIONS
        # A missing count has no effect, as the mean has none: that is how it enters the model.
        logs[is_count_missing] = 0.0
        slopes, curvatures = self._effects.counts
        parts[:, 2] = logs @ slopes + logs**2 @ curvatures
        return parts

    def _calibrate(self, generator: np.random.Generator) -> None:
        """Scale the parts to their shares of the variance and set the intercept for the click rate."""
        counts, is_count_missing = _draw_counts(generator, _CALIBRATION_ROWS)
        parts = self._parts(counts, is_count_missing, self._draw_values(generator, _CALIBRATION_ROWS))
        shares = np.array([_SLOT_SHARE, _INTERACTION_SHARE, _COUNT_SHARE])
        self._scales = _LOGIT_DEVIATION * np.sqrt(shares) / parts.std(axis=0)
        self._part_means = parts.mean(axis=0)
        self._intercept = _intercept_for((parts - self._part_means) @ self._scales, CLICK_RATE)


def _draw_counts(
    generator: np.random.Generator, num_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Draw 13 log-normal counts [N, 13] and which of them are missing."""
    shape = (num_rows, len(_COUNT_LOG_MEANS))
    normal = generator.standard_normal(shape, dtype=np.float32)
    counts = np.exp(
        normal * np.array(_COUNT_LOG_DEVIATIONS, dtype=np.float32)
        + np.array(_COUNT_LOG_MEANS, dtype=np.float32)
    ).astype(np.int64)
    return counts, generator.random(shape, dtype=np.float32) < np.array(
        _COUNT_MISSING_SHARES, dtype=np.float32
    )


def _popularity_table(size: int) -> npt.NDArray[np.int64]:
    """Return a table of `_POPULARITY_STEPS` values in which value v stands about (v + 1) ** -1.2 as often as 0."""
    weights = np.arange(1, size + 1) ** -_ZIPF_EXPONENT
    edges = np.round(np.cumsum(weights) / weights.sum() * _POPULARITY_STEPS).astype(np.int64)
    return np.repeat(np.arange(size), np.diff(edges, prepend=0))


def value_texts(slot: int, numbers: npt.NDArray[np.int64]) -> pa.StringArray:
    """Return 8 hexadecimal digits for each number [n] of a value of a slot, with a null at the end for "missing"."""
    digits = mix((np.uint64(slot) << np.uint64(32)) + numbers.astype(np.uint64)) >> np.uint64(32)
    return pa.array([f"{number:08x}" for number in digits.tolist()] + [None], pa.string())


def _intercept_for(logits: FloatArray, click_rate: float) -> float:
    """Return the intercept with which centred logits give the click rate on average, by bisection."""
    low, high = -20.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if np.mean(1.0 / (1.0 + np.exp(-(logits + middle)))) < click_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
