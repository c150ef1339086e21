"""The samples that an AUC needs, as a function of the batch: a law that is fitted to a few short trainings.

    samples(A, B) = S (T - A)^-p (1 + B / B0)

T is the AUC that samples without end would reach, p how slowly it is approached, and the last factor what a batch B
costs in samples: as many again at B = B0 (the trade of steps for samples of McCandlish et al. 2018, "An empirical
model of large-batch training"). Few short trainings do not say all four numbers: every T, p and B0 of a grid is
weighted by how well it explains the trainings, with S fitted to it, and answers are quantiles over the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.errors import ConfigurationError
from heterps_core.field_rules import Count
from heterps_core.json_codec import JsonDocument

_LEAST_POINTS = 3
_LIMITS_ABOVE = np.geomspace(0.003, 0.3, 40)
"""T over the best AUC of a training."""

_POWERS = np.arange(1.0, 8.1, 0.5)
_USUAL_POWER, _POWER_SPREAD = 4.0, 0.35
"""Median and standard deviation of the logarithm of p before a training is seen."""

_BATCHES = 2.0 ** np.arange(0.0, 17.0, 0.5)
"""B0, in samples."""

_LEAST_SPREAD = 0.08
"""Least standard deviation of the logarithm of samples: two seeds of one training differ by as much."""

_RANGE = (0.1, 0.5, 0.9)
FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityPoint(JsonDocument):
    """The AUC of one training."""

    num_samples: Count
    batch_size: Count
    auc: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesNeeded:
    """Samples to an AUC; infinite where the law does not reach it."""

    low: float
    """Less than this in a tenth of the fits, by their weight."""

    median: float
    high: float
    """More than this in a tenth of the fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityCurve:
    """All fits of the law to some trainings [fits]."""

    points: tuple[QualityPoint, ...]
    _limits: FloatArray
    _powers: FloatArray
    _batches: FloatArray
    _log_samples: FloatArray
    """Logarithm of S."""

    _weights: FloatArray

    @classmethod
    def of(cls, points: Sequence[QualityPoint]) -> QualityCurve:
        """Fit the law to trainings with different numbers of samples.

        Raises:
            ConfigurationError: There are fewer than three, or all have the same number of samples.
        """
        samples, batches, aucs = (
            np.array([getattr(point, name) for point in points], np.float64)
            for name in ("num_samples", "batch_size", "auc")
        )
        if len(points) < _LEAST_POINTS or len(set(samples)) == 1:
            raise ConfigurationError(
                f"a curve of quality needs at least {_LEAST_POINTS} trainings of different numbers of samples, got "
                f"{len(points)} with {', '.join(f'{number:,.0f}' for number in samples) or 'none'}; take more rows"
            )
        # No AUC is above 1; the least limit stays, so that there is one.
        above = np.minimum(_LIMITS_ABOVE, max(1.0 - aucs.max(), _LIMITS_ABOVE[0]))
        limits, powers, batches_0 = (
            axis.ravel() for axis in np.meshgrid(aucs.max() + above, _POWERS, _BATCHES, indexing="ij")
        )
        residuals = (
            np.log(samples)
            + powers[:, None] * np.log(limits[:, None] - aucs)
            - np.log1p(batches / batches_0[:, None])
        )
        log_samples = residuals.mean(axis=1)
        squares = ((residuals - log_samples[:, None]) ** 2).sum(axis=1)
        variance = max(squares.min() / max(len(points) - 4, 1), _LEAST_SPREAD**2)
        unusual = (np.log(powers / _USUAL_POWER) / _POWER_SPREAD) ** 2
        weights = np.exp(-(squares - squares.min()) / (2 * variance) - unusual / 2)
        return cls(
            points=tuple(points),
            _limits=limits,
            _powers=powers,
            _batches=batches_0,
            _log_samples=log_samples,
            _weights=weights / weights.sum(),
        )

    def samples_needed(self, auc: float, batch_size: int) -> SamplesNeeded:
        """Return the samples to an AUC in [0, 1) with batches of a size."""
        gaps = np.maximum(self._limits - auc, 0.0)
        with np.errstate(divide="ignore"):
            log_needed = (
                self._log_samples - self._powers * np.log(gaps) + np.log1p(batch_size / self._batches)
            )
        low, median, high = (math.exp(value) for value in self._quantiles(log_needed))
        return SamplesNeeded(low=low, median=median, high=high)

    def auc_after(self, num_samples: float, batch_size: int) -> float:
        """Return the AUC after so many samples in batches of a size: the median of the fits."""
        logs = self._log_samples + np.log1p(batch_size / self._batches) - np.log(num_samples)
        return self._quantiles(self._limits - np.exp(logs / self._powers))[1]

    def _quantiles(self, values: FloatArray) -> tuple[float, ...]:
        order = np.argsort(values)
        ranks = np.searchsorted(np.cumsum(self._weights[order]), _RANGE)
        return tuple(values[order][np.minimum(ranks, len(order) - 1)].tolist())
