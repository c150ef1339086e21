"""The least price of carrying a number of units with whole instances: what a stage is really charged.

A plan needs one machine on-demand, as losing that of the rendezvous store ends a run. A stage on spot may have it.
Instances are sold in sizes of several units, so the price of k units is a staircase that never falls. Both the
search for a plan and the purchase read it here, so that a plan is charged what is then bought.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.problem.extra_costs import InstanceSize
from heterps_core.planning.problem.scheduling_problem import MAX_DEVICE_TYPES

NANO_USD_PER_USD = 1_000_000_000
"""Prices are added up as integers, so that equal sums compare equal."""

_MOST_COLUMNS = 2 * MAX_DEVICE_TYPES
"""Types on spot have two columns, see `search/capped/stage_columns.py`."""


class InstanceCover:
    r"""Cheapest covers of 0..n units by instances of given sizes.

    With price p_i and units u_i of size i, the least price f of covering n units is
    f(0) = 0, f(n) = min_i (p_i + f(max(0, n - u_i))). Among equal prices the fewest instances win, since
    each one is one more thing that can fail, then the first in the order given.

    Args:
        units: u_i, at least 1 each.
        prices_usd_per_hour: p_i.
        most_units: n, at least 1.
        on_demand: Units and prices of the sizes in which one instance may be bought on-demand, where the others are
            on spot. It is bought where it is the plan's one machine on-demand, or where that is cheaper.

    Raises:
        ConfigurationError: No sizes, or no units to cover.

    Example:
        >>> cover = InstanceCover([1, 8], [1.0, 5.0], most_units=10)
        >>> [cover.price_usd_per_hour(n) for n in (4, 5, 6, 9)], cover.counts(10)
        ([4.0, 5.0, 5.0, 6.0], {0: 2, 1: 1})
    """

    def __init__(
        self,
        units: Sequence[int],
        prices_usd_per_hour: Sequence[float],
        *,
        most_units: int,
        on_demand: Sequence[tuple[int, float]] = (),
    ) -> None:
        if most_units < 1 or not units:
            raise ConfigurationError(
                f"a cover needs at least 1 unit and 1 option, got {most_units} and {len(units)}"
            )
        self._units = tuple(units)
        nano_usd = [_nano_usd(price) for price in prices_usd_per_hour]
        self._on_demand = [(carried, _nano_usd(price), i) for i, (carried, price) in enumerate(on_demand)]
        sizes = list(zip(units, nano_usd, range(len(units)), strict=True))
        best_ratio = min(sizes, key=lambda size: (Fraction(size[1], size[0]), -size[0]))
        # Any u* instances hold some whose units are a multiple of u*, the units of the size with the least price
        # per unit; those are replaced by it at no higher price. So beyond this many units it is always taken.
        settled = (best_ratio[0] - 1) * max(units)
        self._best: list[tuple[int, int, int]] = [(0, 0, -1)]  # nano-USD, instances, size taken last
        for needed in range(1, most_units + 1):
            choices = sizes if needed <= settled else (best_ratio,)
            self._best.append(
                min(
                    (
                        self._best[max(0, needed - carried)][0] + price,
                        self._best[max(0, needed - carried)][1] + 1,
                        i,
                    )
                    for carried, price, i in choices
                )
            )

    @classmethod
    def of(
        cls, sizes: Sequence[InstanceSize], *, most_units: int, on_demand: Sequence[InstanceSize] = ()
    ) -> InstanceCover:
        """Return the covers by sizes that are sold."""
        return cls(
            [size.units for size in sizes],
            [size.price_usd_per_hour for size in sizes],
            most_units=most_units,
            on_demand=[(size.units, size.price_usd_per_hour) for size in on_demand],
        )

    def price_usd_per_hour(self, num_units: int) -> float:
        """Return the least price of at least so many units."""
        return min(self._best[num_units][0] / NANO_USD_PER_USD, self.steady_usd_per_hour(num_units))

    def steady_usd_per_hour(self, num_units: int) -> float:
        """Return the least price where one instance is bought on-demand; infinite where none is sold so."""
        return self._steady(num_units)[0] / NANO_USD_PER_USD

    def steady_size(self, num_units: int) -> int | None:
        """Return the index of the size that is bought on-demand then; None where none is sold so."""
        return self._steady(num_units)[2] if self._on_demand else None

    def _steady(self, num_units: int) -> tuple[float, int, int]:
        return min(
            (
                (price + self._best[left][0], self._best[left][1], index)
                for carried, price, index in self._on_demand
                for left in (max(0, num_units - carried),)
            ),
            default=(math.inf, 0, 0),
        )

    def counts(self, num_units: int) -> dict[int, int]:
        """Return how many of each size, by its index, carry at least so many units at the least price.

        None of them is bought on-demand among others on spot.
        """
        taken: Counter[int] = Counter()
        while num_units > 0:
            index = self._best[num_units][2]
            taken[index] += 1
            num_units = max(0, num_units - self._units[index])
        return dict(taken)


class PriceStairs:
    """Prices of 0..n units of some device types, side by side, as searches ask for thousands of stages at once.

    Args:
        by_type: Type index -> prices, shape (n + 1,); other types have none.
    """

    def __init__(self, by_type: Mapping[int, Floats]) -> None:
        self.by_type = by_type
        stairs = list(by_type.values())
        self.prices = np.concatenate([np.empty(0), *stairs])
        self._starts = np.full(max(_MOST_COLUMNS, *by_type, 0) + 1, -1)
        self._starts[list(by_type)] = np.cumsum([0, *map(len, stairs)])[:-1]

    def places(self, types: Ints, num_units: Floats) -> tuple[tuple[Ints, ...], Ints]:
        """Return where some stages have a finite number of units of a type with prices, and the indices of these.

        Args:
            types: Broadcasts to the shape of `num_units`.
        """
        starts = np.broadcast_to(self._starts[types], num_units.shape)
        where = np.nonzero((starts >= 0) & np.isfinite(num_units))
        return where, starts[where] + num_units[where].astype(np.int64)

    @cached_property
    def least_per_unit(self) -> Floats:
        """The least price per unit of so many units or more, at the places of `prices`."""
        least = np.full(self.prices.size, np.inf)
        for index, prices in self.by_type.items():
            start = self._starts[index]
            per_unit = prices[1:] / np.arange(1, prices.size)
            least[start + 1 : start + prices.size] = np.minimum.accumulate(per_unit[::-1])[::-1]
        return least


NO_STAIRS = PriceStairs({})


def _nano_usd(price_usd: float) -> int:
    return round(price_usd * NANO_USD_PER_USD)
