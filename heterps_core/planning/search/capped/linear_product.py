"""A lower bound on the product that adds up over stages, for searches that need that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.cost_model.objective import Objective


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """A lower bound on the product of plans whose longest stage time is no shorter than `least_seconds`.

    A stage i is part of the plan's product with price_i (x h + x0), and its share price_i x is at least u_i, what
    `StageTable.least_usd_seconds` says. With l the least interruptions and H0 the least hourly charge of the plans
    that are meant, and s the slope of the chord of g(L) = x h(L) + x0 at the least x from l to their most
    interruptions, g(L) >= g(l) + s (L - l), so

        H g(L)  >=  sum of (u_i h(l) + price_i x0) + r0 g(l) + H0 s (L - l)

    Without interruptions h is 1 and the last term 0.
    """

    objective: Objective
    least_seconds: float
    least_hourly: float
    least_interruptions_per_hour: float
    most_interruptions_per_hour: float
    """Most interruptions per hour of the plans that are meant."""

    @property
    def constant(self) -> float:
        """What every plan is charged: r0 g(l) - H0 s l."""
        return (
            self.objective.extra_usd_per_hour * self._stretched(self.least_interruptions_per_hour)
            - self._usd_seconds_per_interruption() * self.least_interruptions_per_hour
        )

    def stage_prices(self, usd_seconds: Floats, usd_per_hour: Floats, interruptions: Floats) -> Floats:
        """Return what each stage adds; arguments (u, price, interruptions per hour) and result have one shape."""
        return np.asarray(
            usd_seconds * float(self.objective.stretch(self.least_interruptions_per_hour))
            + usd_per_hour * self.objective.extra_seconds
            + interruptions * self._usd_seconds_per_interruption()
        )

    def most_over_linear(self, product: float) -> float:
        """Return how far about plans of a product may lie above what this takes them for, as a ratio."""
        least, most = self.least_interruptions_per_hour, self.most_interruptions_per_hour
        middle = self._stretched((least + most) / 2)
        hourly = max(product / middle, self.least_hourly)
        linear = hourly * self._stretched(least) + self._usd_seconds_per_interruption() * (most - least) / 2
        return hourly * middle / linear

    def middle_interruptions(self) -> float:
        """Return interruptions per hour whose stretch is the geometric mean of those of the least and the most.

        It solves 1 + a sqrt(L) + b L = h for L.
        """
        stretch = self.objective.stretch
        low, high = self.least_interruptions_per_hour, self.most_interruptions_per_hour
        added = float(np.sqrt(stretch(low) * stretch(high))) - 1
        a, b = np.sqrt(2 * self.objective.checkpoint_hours), self.objective.restart_hours
        root = 2 * added / (a + np.sqrt(a * a + 4 * b * added)) if added > 0 else 0.0
        return float(min(max(root * root, low), high))

    def _stretched(self, interruptions_per_hour: float) -> float:
        stretch = float(self.objective.stretch(interruptions_per_hour))
        return self.least_seconds * stretch + self.objective.extra_seconds

    def _usd_seconds_per_interruption(self) -> float:
        low, high = self.least_interruptions_per_hour, self.most_interruptions_per_hour
        if high <= low:
            return 0.0
        return self.least_hourly * (self._stretched(high) - self._stretched(low)) / (high - low)
