"""Figures with their intervals, and what a challenger's are beside a champion's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with the ends of its two-sided confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference of two figures on the same rows."""

    value: float
    variance: float
    """Variance of `value`."""

    def interval(self, *, confidence: float) -> Estimate:
        """Return the two-sided interval of a confidence in (0, 1), by the normal approximation."""
        half_width = NormalDist().inv_cdf((1.0 + confidence) / 2.0) * math.sqrt(self.variance)
        return Estimate(value=self.value, low=self.value - half_width, high=self.value + half_width)
