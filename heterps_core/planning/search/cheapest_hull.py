"""The cheapest partitions where interruptions stretch the run: price and interruptions are weighed together.

For a fixed stage time a plan's product is g(L) * H, with H all that it is charged by the hour, L its interruptions
per hour and g(L) = x h(L) + x0. H and L add up over stages, their product does not. But log g and log H are concave,
so the product is quasi-concave and least at a corner of the lower left hull of the points (L, H); each corner is
the cheapest partition for some weights of the two, which dynamic programming finds (Eisner and Severance,
J. ACM 23(4), 1976). All cases are refined together.

Shape legend: X = cases (stage times), G = runs of layers, T = device types, L = layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.objective import Objective
from heterps_core.planning.cost_model.partition_sums import sums_over_changes, sums_over_stages
from heterps_core.planning.search.chain_partition import cheapest_partitions

_MAX_ROUNDS = 24
"""Halvings of the hull; more corners than 2^24 are not met."""

_SAME = 1e-9
"""Relative difference below which two weighted prices are the same corner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheapestProducts:
    """The partition of least product for each of X cases."""

    lower_bounds: Floats
    """No partition's product is less; infinite where there is none; shape (X,)."""

    hourly: Floats
    """Least H over all partitions, shape (X,)."""

    interruptions_per_hour: Floats
    """Least L over all partitions, shape (X,)."""

    rows: Ints
    """The best partition met, last stage first, padded with -1; shape (X, L)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Points:
    """Plans as points; H is infinite where there is none."""

    hourly: Floats
    interruptions: Floats
    rows: Ints

    def of(self, chosen: NDArray[np.bool_]) -> _Points:
        return _Points(
            hourly=self.hourly[chosen], interruptions=self.interruptions[chosen], rows=self.rows[chosen]
        )

    def followed_by(self, others: _Points) -> _Points:
        return _Points(
            hourly=np.concatenate([self.hourly, others.hourly]),
            interruptions=np.concatenate([self.interruptions, others.interruptions]),
            rows=np.concatenate([self.rows, others.rows]),
        )


def cheapest_products(
    objective: Objective,
    charged_seconds: Floats,
    stage_prices: Floats,
    interruptions_per_hour: Floats,
) -> CheapestProducts:
    """Return the partitions of least product for X charged stage times.

    Exact unless a hull has an absurd number of corners; then the bounds still hold.

    Args:
        objective: Of the problem.
        charged_seconds: x in the product, shape (X,). Prices may belong to longer stage times.
        stage_prices: USD per hour of each run on each type, infinite where not allowed; shape (X, G, T).
        interruptions_per_hour: Of each run on each type, finite; shape (X, G, T).
    """
    return _HullSearch(objective, charged_seconds, stage_prices, interruptions_per_hour).run()


class _HullSearch:
    """Refines the hulls of X cases together; arguments as in `cheapest_products`."""

    def __init__(
        self,
        objective: Objective,
        charged_seconds: Floats,
        stage_prices: Floats,
        interruptions_per_hour: Floats,
    ) -> None:
        self.objective = objective
        self.charged_seconds = charged_seconds
        self.stage_prices = stage_prices
        self.interruptions_per_hour = interruptions_per_hour
        self.change_prices: Floats | None = None
        if objective.transfer_products is not None:
            billed = charged_seconds + objective.extra_seconds
            self.change_prices = objective.transfer_products / billed[:, None, None, None]

    def run(self) -> CheapestProducts:
        """Return the cheapest products."""
        cases = np.arange(self.charged_seconds.size)
        ones, zeros = np.ones(cases.size), np.zeros(cases.size)
        left = least_hourly = self._cheapest(cases, ones, zeros)
        best, best_rows = self._products(cases, left), left.rows.copy()
        if not self.objective.has_interruptions:
            return CheapestProducts(
                lower_bounds=best,
                hourly=left.hourly,
                interruptions_per_hour=left.interruptions,
                rows=best_rows,
            )
        right = least_interruptions = self._cheapest(cases, zeros, ones)
        self._keep_best(cases, right, best, best_rows)
        for _ in range(_MAX_ROUNDS):
            # Nothing between two corners is below the point that has the better of both their coordinates.
            is_open = self._floors(cases, left, right) < best[cases] * (1 - _SAME)
            cases, left, right = cases[is_open], left.of(is_open), right.of(is_open)
            if not cases.size:
                break
            hourly_weights = left.interruptions - right.interruptions
            interruption_weights = right.hourly - left.hourly
            middle = self._cheapest(cases, hourly_weights, interruption_weights)
            self._keep_best(cases, middle, best, best_rows)
            on_line = hourly_weights * left.hourly + interruption_weights * left.interruptions
            found = hourly_weights * middle.hourly + interruption_weights * middle.interruptions
            is_corner = found < on_line * (1 - _SAME)
            cases = np.tile(cases[is_corner], 2)
            left, middle, right = left.of(is_corner), middle.of(is_corner), right.of(is_corner)
            left, right = left.followed_by(middle), middle.followed_by(right)
        lower_bounds = best.copy()
        np.minimum.at(lower_bounds, cases, self._floors(cases, left, right))
        return CheapestProducts(
            lower_bounds=lower_bounds,
            hourly=least_hourly.hourly,
            interruptions_per_hour=least_interruptions.interruptions,
            rows=best_rows,
        )

    def _cheapest(self, cases: Ints, hourly_weights: Floats, interruption_weights: Floats) -> _Points:
        """Return the points of least weighted sum."""
        prices = self.stage_prices[cases]
        weights = (hourly_weights[:, None, None], interruption_weights[:, None, None])
        # A weight of 0 must not make a stage free that is not allowed.
        weighted = np.where(np.isfinite(prices), prices, 0.0) * weights[0]
        weighted += self.interruptions_per_hour[cases] * weights[1]
        weighted[~np.isfinite(prices)] = np.inf
        changes = None if self.change_prices is None else self.change_prices[cases]
        found = cheapest_partitions(
            weighted,
            None if changes is None else changes * hourly_weights[:, None, None, None],
        )
        hourly = sums_over_stages(prices, found.rows)
        if changes is not None:
            hourly = hourly + np.array(
                [
                    sums_over_changes(change, rows[None])[0]
                    for change, rows in zip(changes, found.rows, strict=True)
                ]
            )
        return _Points(
            hourly=np.where(np.isfinite(found.prices), hourly + self.objective.extra_usd_per_hour, np.inf),
            interruptions=sums_over_stages(self.interruptions_per_hour[cases], found.rows),
            rows=found.rows,
        )

    def _products(self, cases: Ints, points: _Points) -> Floats:
        return self._product_of(cases, points.hourly, points.interruptions)

    def _floors(self, cases: Ints, left: _Points, right: _Points) -> Floats:
        return self._product_of(cases, left.hourly, right.interruptions)

    def _product_of(self, cases: Ints, hourly: Floats, interruptions: Floats) -> Floats:
        stretched = self.charged_seconds[cases] * self.objective.stretch(interruptions)
        return np.asarray((stretched + self.objective.extra_seconds) * hourly)

    def _keep_best(self, cases: Ints, points: _Points, best: Floats, best_rows: Ints) -> None:
        products = self._products(cases, points)
        for index in np.argsort(-products, kind="stable"):
            case = cases[index]
            if products[index] < best[case]:
                best[case], best_rows[case] = products[index], points.rows[index]
