"""Candidate stages whose units are limited over the whole plan, and their cheapest partition at given prices.

Caps over the whole plan couple the stages. With a price on each scarce unit in their place (Lagrange), dynamic
programming finds the cheapest partition, and the least price of any with a given stage: stages that no better
partition can have are struck out.

Where neighbours must differ, the type of the stage before a layer matters for the stages from the layer on; elsewhere
all types are one there, B = 1.

Shape legend: n = candidate stages, T = device types, B = types that boundaries tell apart, E = further resources (a
limit on stages, on interruptions), R = T + E, L = layers, Q = price sets.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints, run_layers

ROUNDING = 1e-12
"""Relative, of sums of prices."""


def prices_of_differing_neighbours(types: Ints, num_layers: int) -> Floats:
    """Return prices of boundaries between columns of some types: 0, infinite between two of one type; (L, T, T)."""
    forbidden = np.where(types[:, None] == types, np.inf, 0.0)
    return np.broadcast_to(forbidden, (num_layers, *forbidden.shape))


class CappedChain:
    """Candidate stages with their prices and units; finds their cheapest partition of the chain within the caps.

    Args:
        rows: Flat indices run * T + type of the candidates, ascending; shape (n,).
        prices: Shape (n,), finite.
        units: Units that each takes of its type, shape (n,).
        caps: Units of each type over the whole plan, shape (T,).
        num_layers: L.
        change_prices: 0 for a boundary before a layer between two types, infinite where they may be no neighbours;
            shape (L, T, T); None where all may.
        further: What each takes of further resources, and their caps; shapes (E, n) and (E,).
    """

    def __init__(
        self,
        rows: Ints,
        *,
        prices: Floats,
        units: Floats,
        caps: Floats,
        num_layers: int,
        change_prices: Floats | None = None,
        further: tuple[Floats, Floats] | None = None,
    ) -> None:
        self.rows, self.prices, self.units = rows, prices, units
        self.num_layers, self.num_types = num_layers, caps.size
        self.types = rows % self.num_types
        self.firsts, self.lasts = run_layers(rows // self.num_types)
        self.further, further_caps = (np.empty((0, rows.size)), np.empty(0)) if further is None else further
        self.caps = np.append(caps, further_caps)
        self.change_prices = change_prices
        self.boundary_types = np.zeros_like(self.types) if change_prices is None else self.types
        self.num_boundary_types = 1 if change_prices is None else self.num_types
        # In the order of first layer and type, for dynamic programming from the end.
        self._by_first = np.lexsort((self.boundary_types, self.firsts))
        keys = (self.firsts * self.num_boundary_types + self.boundary_types)[self._by_first]
        self._groups, self._starts = np.unique(keys, return_index=True)
        self._ends = np.append(self._starts[1:], keys.size)
        self._group_bounds = np.searchsorted(
            self._groups // self.num_boundary_types, np.arange(num_layers + 1)
        )
        self._next = ((self.lasts + 1) * self.num_boundary_types + self.boundary_types)[self._by_first]

    def take(self, chosen: NDArray[np.bool_]) -> CappedChain:
        """Return the chain with some of the candidates."""
        return CappedChain(
            self.rows[chosen],
            prices=self.prices[chosen],
            units=self.units[chosen],
            caps=self.caps[: self.num_types],
            num_layers=self.num_layers,
            change_prices=self.change_prices,
            further=(self.further[:, chosen], self.caps[self.num_types :]),
        )

    def positions(self, rows: Ints) -> Ints | None:
        """Return where some candidates stand, None where not all are there."""
        found = np.searchsorted(self.rows, rows)
        is_there = (found < self.rows.size).all() and (self.rows[found] == rows).all()
        return found if is_there else None

    def partitions_of(self, partitions: Iterable[Ints]) -> list[Ints]:
        """Return positions in place of rows, without partitions of which a stage is no candidate."""
        return [stages for rows in partitions if (stages := self.positions(rows)) is not None]

    def full_prices(self, scarcity: Floats) -> Floats:
        """Return prices with scarce units charged, shape (..., R) -> (..., n)."""
        full = self.prices + self.units * scarcity[..., self.types]
        return np.asarray(full + scarcity[..., self.num_types :] @ self.further)

    def completions(self, full_prices: Floats) -> Floats:
        """Return the least price of layers a.. to the end where the stage before a is on type t.

        Full prices of shape (Q, n) give (Q, L + 1, B), of which row L is 0.
        """
        num_sets = len(full_prices)
        after = np.zeros((num_sets, self.num_layers + 1, self.num_boundary_types))
        flat = after.reshape(num_sets, -1)
        ordered = full_prices[:, self._by_first]
        for first in range(self.num_layers - 1, -1, -1):
            beginning = self._beginnings(first, ordered, flat)
            if self.change_prices is not None:
                beginning = (self.change_prices[first] + beginning[:, None, :]).min(axis=2)
            after[:, first] = beginning
        return after

    def _beginnings(self, first: int, ordered: Floats, flat_after: Floats) -> Floats:
        """Return the least price of layers first.. to the end by the type of their first stage, shape (Q, B)."""
        beginning = np.full((len(ordered), self.num_boundary_types), np.inf)
        low, high = self._group_bounds[first], self._group_bounds[first + 1]
        if low < high:
            start, end = self._starts[low], self._ends[high - 1]
            totals = ordered[:, start:end] + flat_after[:, self._next[start:end]]
            beginning[:, self._groups[low:high] % self.num_boundary_types] = np.minimum.reduceat(
                totals, self._starts[low:high] - start, axis=1
            )
        return beginning

    def cheapest_of(self, full_prices: Floats) -> tuple[float, Ints]:
        """Return price and positions of the cheapest partition where the caps are left aside; shape (n,)."""
        return self.cheapest(full_prices, self.completions(full_prices[None])[0])

    def cheapest(self, full_prices: Floats, after: Floats) -> tuple[float, Ints]:
        """Return the least price of a partition and the positions of its stages, for one price set.

        Their completions have shape (L + 1, B).
        """
        ordered, flat = full_prices[self._by_first], after.reshape(-1)
        stages: list[int] = []
        price, first, before = np.inf, 0, -1
        while first < self.num_layers:
            low, high = self._group_bounds[first], self._group_bounds[first + 1]
            if low == high:
                return np.inf, np.empty(0, dtype=np.int64)
            start, end = self._starts[low], self._ends[high - 1]
            totals = ordered[start:end] + flat[self._next[start:end]]
            if before >= 0 and self.change_prices is not None:
                types = self.types[self._by_first[start:end]]
                totals = totals + self.change_prices[first, before, types]
            best = int(totals.argmin())
            if not np.isfinite(totals[best]):
                return np.inf, np.empty(0, dtype=np.int64)
            if first == 0:
                price = float(totals[best])
            stages.append(int(self._by_first[start + best]))
            first, before = int(self.lasts[stages[-1]]) + 1, int(self.types[stages[-1]])
        return price, np.array(stages)

    def reaching(self, full_prices: Floats) -> Floats:
        """Return the least price of layers ..a - 1 where the stage from a on is on type t, shape (L + 1, B)."""
        before = np.full((self.num_layers + 1, self.num_boundary_types), np.inf)
        before[0] = 0.0
        flat = before.reshape(-1)
        ends = np.searchsorted(self.lasts, np.arange(self.num_layers + 1))
        keys = self.firsts * self.num_boundary_types + self.boundary_types
        for last in range(self.num_layers - 1):
            chosen = slice(ends[last], ends[last + 1])
            if chosen.start == chosen.stop:
                continue
            ending = np.full(self.num_boundary_types, np.inf)
            np.minimum.at(ending, self.boundary_types[chosen], full_prices[chosen] + flat[keys[chosen]])
            if self.change_prices is not None:
                ending = (ending[:, None] + self.change_prices[last + 1]).min(axis=0)
            before[last + 1] = ending
        return before

    def used(self, stages: Ints) -> Floats:
        """Return the resources that the stages at some positions take together, shape (R,)."""
        used = np.bincount(self.types[stages], self.units[stages], minlength=self.num_types)
        return np.append(used, self.further[:, stages].sum(axis=1))

    def price(self, stages: Ints) -> float:
        """Return the price of the partition of the stages at some positions, first stage first."""
        return float(self.prices[stages].sum())

    def highest_price(self) -> float:
        """Return a price that no partition within the caps exceeds."""
        per_unit = np.zeros(self.num_types)
        np.maximum.at(per_unit, self.types, self.prices / self.units)
        return float(per_unit @ self.caps[: self.num_types]) * (1 + 1e-9)

    def without_hopeless(self, scarcity: Floats, target: float) -> CappedChain:
        """Return the chain without stages that no partition below the target has, at prices of shape (R,)."""
        full = self.full_prices(scarcity)
        after = self.completions(full[None])[0]
        bounds = (
            self.reaching(full)[self.firsts, self.boundary_types]
            + full
            + after[self.lasts + 1, self.boundary_types]
            - float(scarcity @ self.caps)
        )
        is_near = bounds < target + ROUNDING * abs(target)
        return self if is_near.all() else self.take(is_near)
