"""The cheapest partition within the caps, by extending partial plans from the first layer on.

At most so many partial plans of the same end are kept; the least bound of those that are dropped bounds the price as
well, so the search may stop anywhere.

Shape legend: p = partial plans, R = resources with caps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.search.capped.capped_chain import ROUNDING, CappedChain

MAX_PARTIAL_PLANS = 16_384

_DOMINANCE_BLOCK = 128
"""Cheapest partial plans, which are compared with all others; the rest is only checked against these."""

_NUMBERS_PER_PASS = 1_000_000
"""Partial plans times candidates that are held against each other at once; a few arrays of so many numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CappedPartition:
    """The cheapest partition within the caps, or what could be shown."""

    rows: Ints | None
    """Flat indices run * T + type, last stage first; None where no partition below the cutoff was met."""

    lower_bound: float
    is_settled: bool
    """Whether `rows` is the optimum, or none below the cutoff exists."""


def cheapest_below(
    chain: CappedChain,
    scarcity: Floats,
    *,
    target: float,
    most_partial_plans: int = MAX_PARTIAL_PLANS,
    is_over: Callable[[], bool] = lambda: False,
) -> CappedPartition:
    """Return the cheapest partition below the target by extending partial plans, or a bound.

    A partial plan ends before some layer, its last stage is on some type where boundaries have prices, and the rest
    that matters are the resources that it uses and its price: with fewer or equal of all of them it is at least as
    good. Both stand in one row of
    `spent`: R columns of resources, then the price. Resources without a price are left aside first, so that one
    partial plan stands for many; where the cheapest partition takes too much of one, it is counted as well.

    Args:
        scarcity: Prices of resources whose bound is strong.
        most_partial_plans: That are kept of the same end.
        is_over: Asked now and then; the search ends early where it is.
    """
    is_counted = scarcity > 0
    while True:
        search = _PartialPlanSearch(chain, scarcity, is_counted, target, most_partial_plans, is_over)
        found, is_over_cap = search.run()
        if not is_over_cap.any():
            return found
        is_counted = is_counted | is_over_cap


class _PartialPlanSearch:
    """Arguments as in `cheapest_below`; caps hold for the resources that are counted."""

    def __init__(
        self,
        chain: CappedChain,
        scarcity: Floats,
        is_counted: NDArray[np.bool_],
        target: float,
        most_partial_plans: int,
        is_over: Callable[[], bool],
    ) -> None:
        self.chain, self.most_partial_plans, self.is_over = chain, most_partial_plans, is_over
        self.target = target
        # Rounding must not let a plan of equal price through; a hair below the target is enough.
        self.limit = target * (1 - ROUNDING)
        full = chain.full_prices(np.stack([scarcity, np.zeros_like(scarcity)]))
        after = chain.completions(full)
        self.after = after[0]
        # Two bounds on the price of any completion: with scarcity charged, and without.
        self.weights = np.append(scarcity, 1.0)
        self.allowance = float(scarcity @ chain.caps)
        self.caps = np.where(is_counted, chain.caps, np.inf)
        self.compared = [*np.flatnonzero(is_counted).tolist(), chain.caps.size]
        ends = chain.lasts + 1, chain.boundary_types
        self.full_ahead = full[0] + after[0][ends]
        self.plain_ahead = full[1] + after[1][ends]
        self.dropped_bound = np.inf

    def run(self) -> tuple[CappedPartition, NDArray[np.bool_]]:
        """Return the cheapest partition below the target, or the bound, and of what it takes too much."""
        chain = self.chain
        waiting: list[dict[int, list[tuple[Floats, Ints]]]] = [{} for _ in range(chain.num_layers + 1)]
        waiting[0][-1] = [(np.zeros((1, chain.caps.size + 1)), np.full((1, 2), -1))]
        kept_origins: list[Ints] = []  # parent partial plan, position of the stage that was added
        num_kept = 0
        is_over_cap = np.zeros(chain.caps.size, dtype=bool)
        for first in range(chain.num_layers):
            if self.is_over():
                return CappedPartition(rows=None, lower_bound=-np.inf, is_settled=False), is_over_cap
            kept = [
                (last_type, *self._not_dominated(waiting[first][last_type])) for last_type in waiting[first]
            ]
            waiting[first] = {}
            if not kept:
                continue
            spent = np.concatenate([part[1] for part in kept])
            last_types = np.repeat([part[0] for part in kept], [len(part[1]) for part in kept])
            kept_origins += [part[2] for part in kept]
            self._extend(spent, last_types, num_kept, first, waiting)
            num_kept += len(spent)
        finished = [batch for batches in waiting[chain.num_layers].values() for batch in batches]
        rows, price = None, self.target
        if finished:
            spent = np.concatenate([batch[0] for batch in finished])
            origins = np.concatenate([batch[1] for batch in finished])
            best = int(spent[:, -1].argmin())
            rows, price = self._trace(origins[best], np.concatenate(kept_origins)), float(spent[best, -1])
            is_over_cap = spent[best, :-1] > chain.caps
        found = CappedPartition(
            rows=rows, lower_bound=min(price, self.dropped_bound), is_settled=self.dropped_bound >= price
        )
        return found, is_over_cap

    def _extend(
        self,
        spent: Floats,
        last_types: Ints,
        offset: int,
        first: int,
        waiting: list[dict[int, list[tuple[Floats, Ints]]]],
    ) -> None:
        chain = self.chain
        low, high = chain._group_bounds[first], chain._group_bounds[first + 1]
        if low == high:
            return
        stages = chain._by_first[chain._starts[low] : chain._ends[high - 1]]
        types, units, prices = chain.types[stages], chain.units[stages], chain.prices[stages]
        reached = chain.lasts[stages] * chain.num_boundary_types + chain.boundary_types[stages]
        full_spent = spent @ self.weights - self.allowance
        left = self.caps[: chain.num_types] - spent[:, : chain.num_types]
        size = max(1, _NUMBERS_PER_PASS // stages.size)
        for start in range(0, len(spent), size):
            some = slice(start, start + size)
            change = np.zeros((len(spent[some]), stages.size))
            if chain.change_prices is not None and first > 0:
                change = chain.change_prices[first][last_types[some, None], types]
            is_near = full_spent[some, None] + (self.full_ahead[stages] + change) < self.limit
            is_near &= spent[some, -1, None] + (self.plain_ahead[stages] + change) < self.limit
            is_near &= units <= left[some][:, types]
            for index, each in enumerate(chain.further, start=chain.num_types):
                is_near &= spent[some, index, None] + each[stages] <= self.caps[index]
            parents, steps = np.nonzero(is_near)
            if not parents.size:
                continue
            bounds = full_spent[start + parents] + self.full_ahead[stages[steps]] + change[parents, steps]
            keys = reached[steps]
            order = np.lexsort((bounds, keys))
            parents, steps, keys = parents[order], steps[order], keys[order]
            found, starts = np.unique(keys, return_index=True)
            rank = np.arange(keys.size) - np.repeat(starts, np.diff(starts, append=keys.size))
            is_kept = rank < 2 * self.most_partial_plans
            if not is_kept.all():
                self.dropped_bound = min(self.dropped_bound, float(bounds[order][~is_kept].min()))
                parents, steps, keys = parents[is_kept], steps[is_kept], keys[is_kept]
                found, starts = np.unique(keys, return_index=True)
            grown = spent[start + parents]
            grown[np.arange(parents.size), types[steps]] += units[steps]
            grown[:, -1] += prices[steps] + change[parents, steps]
            grown[:, chain.num_types : -1] += chain.further[:, stages[steps]].T
            origins = np.stack([parents + start + offset, stages[steps]], axis=1)
            ends = [*starts[1:].tolist(), keys.size]
            for key, begin, end in zip(found.tolist(), starts.tolist(), ends, strict=True):
                last, device_type = divmod(key, chain.num_boundary_types)
                batch = waiting[last + 1].setdefault(device_type, [])
                batch.append((grown[begin:end], origins[begin:end]))
                if sum(len(part[0]) for part in batch) > 8 * self.most_partial_plans:
                    batch[:] = [self._not_dominated(batch)]

    def _not_dominated(self, batch: list[tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        spent = np.concatenate([part[0] for part in batch])
        origins = np.concatenate([part[1] for part in batch])
        if len(spent) == 1:
            return spent, origins
        weighed = spent @ self.weights
        # By price and then by units, so that of equal ones the first stays.
        order = np.argsort(weighed, kind="stable")
        spent, origins = spent[order], origins[order]
        best = spent[:_DOMINANCE_BLOCK]
        # In the order of price only a later plan can be dominated, or an equal one.
        is_worse = np.zeros(len(spent), dtype=bool)
        for start in range(0, len(spent), 4_096):
            part = spent[start : start + 4_096]
            worse = np.arange(len(best)) < np.arange(start, start + len(part))[:, None]
            for column in self.compared:
                worse &= best[:, column] <= part[:, column, None]
            is_worse[start : start + 4_096] = worse.any(axis=1)
        spent, origins = spent[~is_worse], origins[~is_worse]
        if len(spent) > self.most_partial_plans:
            # A lower bound of what is dropped: its price with scarcity charged, and what must follow at least.
            stage = origins[0, 1]
            ahead = float(self.after[self.chain.lasts[stage] + 1, self.chain.boundary_types[stage]])
            self.dropped_bound = min(
                self.dropped_bound,
                float(spent[self.most_partial_plans] @ self.weights) - self.allowance + ahead,
            )
            spent, origins = spent[: self.most_partial_plans], origins[: self.most_partial_plans]
        return spent, origins

    def _trace(self, origin: Ints, kept_origins: Ints) -> Ints:
        rows = []
        parent, stage = origin
        while stage >= 0:
            rows.append(self.chain.rows[stage])
            parent, stage = kept_origins[parent]
        return np.array(rows, dtype=np.int64)
