"""The cheapest partition of a chain when stages of one device type share a limited number of units.

Caps over the whole plan couple the stages, so dynamic programming alone only bounds the price. The bound is sharpened
by a price on each scarce unit (Lagrange), stages that no better partition can have are struck out by it, and what gap
stays is closed by extending partial plans from the first layer on. At most so many partial plans of the same end are
kept; the least bound of those that are dropped bounds the price too, so the search may stop anywhere.

Shape legend: n = candidate stages, T = device types, R = shared resources (T, or T + 1 with a limit on stages),
L = layers, Q = price sets, p = partial plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.partition_sums import run_layers, sums_over_changes

MAX_PARTIAL_PLANS = 16_384
"""Partial plans of the same end that are kept at most."""

_MAX_PRICE_STEPS = 40
"""Rounds of the ascent on unit prices; each tries `_STEP_SIZES` of one direction at once."""

_STEP_SIZES = np.concatenate([[0.0], 2.0 ** -np.arange(0, 12, 1.5)])

_DOMINANCE_BLOCK = 128
"""Cheapest partial plans, which are compared with all others; the rest is only checked against these."""

_NUMBERS_PER_PASS = 1_000_000
"""Partial plans times candidates that are held against each other at once; a few arrays of so many numbers."""

_ROUNDING = 1e-12


class CappedChain:
    """Candidate stages with their prices and units; finds their cheapest partition of the chain within the caps.

    Args:
        rows: Flat indices run * T + type of the candidates, ascending; shape (n,).
        prices: Shape (n,), finite.
        units: Units that each takes of its type, shape (n,).
        caps: Units of each type over the whole plan, shape (T,).
        num_layers: L.
        change_prices: Price of a boundary before a layer between two types, shape (L, T, T); None where free.
        most_stages: Of a partition; None without a limit.
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
        most_stages: int | None = None,
    ) -> None:
        self.rows, self.prices, self.units = rows, prices, units
        self.num_layers, self.num_types = num_layers, caps.size
        self.types = rows % self.num_types
        self.firsts, self.lasts = run_layers(rows // self.num_types)
        self.most_stages = most_stages
        self.caps = caps if most_stages is None else np.append(caps, float(most_stages))
        self.change_prices = change_prices
        self._forbidden = np.where(np.eye(self.num_types, dtype=bool), np.inf, 0.0)
        # In the order of first layer and type, for dynamic programming from the end.
        self._by_first = np.lexsort((self.types, self.firsts))
        keys = self.firsts[self._by_first] * self.num_types + self.types[self._by_first]
        self._groups, self._starts = np.unique(keys, return_index=True)
        self._ends = np.append(self._starts[1:], keys.size)
        self._group_bounds = np.searchsorted(self._groups // self.num_types, np.arange(num_layers + 1))
        self._next = (self.lasts[self._by_first] + 1) * self.num_types + self.types[self._by_first]

    def take(self, chosen: NDArray[np.bool_]) -> CappedChain:
        """Return the chain with some of the candidates."""
        return CappedChain(
            self.rows[chosen],
            prices=self.prices[chosen],
            units=self.units[chosen],
            caps=self.caps[: self.num_types],
            num_layers=self.num_layers,
            change_prices=self.change_prices,
            most_stages=self.most_stages,
        )

    def full_prices(self, scarcity: Floats) -> Floats:
        """Return prices with scarce units charged, shape (..., R) -> (..., n)."""
        full = self.prices + self.units * scarcity[..., self.types]
        if self.most_stages is not None:
            full = full + scarcity[..., -1:]
        return np.asarray(full)

    def completions(self, full_prices: Floats) -> Floats:
        """Return the least price of layers a.. to the end where the stage before a is on type t.

        Args:
            full_prices: Shape (Q, n).

        Returns:
            Shape (Q, L + 1, T); row L is 0.
        """
        num_sets = len(full_prices)
        after = np.zeros((num_sets, self.num_layers + 1, self.num_types))
        flat = after.reshape(num_sets, -1)
        ordered = full_prices[:, self._by_first]
        for first in range(self.num_layers - 1, -1, -1):
            beginning = self._beginnings(first, ordered, flat)
            changed = self._forbidden
            if self.change_prices is not None and first:
                changed = changed + self.change_prices[first]
            after[:, first] = (changed + beginning[:, None, :]).min(axis=2)
        return after

    def _beginnings(self, first: int, ordered: Floats, flat_after: Floats) -> Floats:
        """Return the least price of layers first.. to the end by the type of their first stage, shape (Q, T)."""
        beginning = np.full((len(ordered), self.num_types), np.inf)
        low, high = self._group_bounds[first], self._group_bounds[first + 1]
        if low < high:
            start, end = self._starts[low], self._ends[high - 1]
            totals = ordered[:, start:end] + flat_after[:, self._next[start:end]]
            beginning[:, self._groups[low:high] % self.num_types] = np.minimum.reduceat(
                totals, self._starts[low:high] - start, axis=1
            )
        return beginning

    def cheapest_of(self, full_prices: Floats) -> tuple[float, Ints]:
        """Return price and positions of the cheapest partition where the caps are left aside; shape (n,)."""
        return self.cheapest(full_prices, self.completions(full_prices[None])[0])

    def cheapest(self, full_prices: Floats, after: Floats) -> tuple[float, Ints]:
        """Return the least price of a partition and the positions of its stages, for one price set.

        Args:
            full_prices: Shape (n,).
            after: Their completions, shape (L + 1, T).
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
            types = self.types[self._by_first[start:end]]
            if before >= 0:
                totals = totals + self._forbidden[before, types]
                if self.change_prices is not None:
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
        """Return the least price of layers ..a - 1 where the stage from a on is on type t, shape (L + 1, T)."""
        before = np.full((self.num_layers + 1, self.num_types), np.inf)
        before[0] = 0.0
        flat = before.reshape(-1)
        ends = np.searchsorted(self.lasts, np.arange(self.num_layers + 1))
        keys = self.firsts * self.num_types + self.types
        for last in range(self.num_layers - 1):
            chosen = slice(ends[last], ends[last + 1])
            if chosen.start == chosen.stop:
                continue
            ending = np.full(self.num_types, np.inf)
            np.minimum.at(ending, self.types[chosen], full_prices[chosen] + flat[keys[chosen]])
            changed = self._forbidden
            if self.change_prices is not None:
                changed = changed + self.change_prices[last + 1]
            before[last + 1] = (ending[:, None] + changed).min(axis=0)
        return before

    def used(self, stages: Ints) -> Floats:
        """Return the resources that the stages at some positions take together, shape (R,)."""
        used = np.bincount(self.types[stages], self.units[stages], minlength=self.num_types).astype(
            np.float64
        )
        return used if self.most_stages is None else np.append(used, float(stages.size))

    def price(self, stages: Ints) -> float:
        """Return the price of the partition of the stages at some positions, first stage first."""
        price = float(self.prices[stages].sum())
        if self.change_prices is not None:
            price += float(sums_over_changes(self.change_prices, self.rows[stages][None, ::-1])[0])
        return price

    def highest_price(self) -> float:
        """Return a price that no partition within the caps exceeds."""
        per_unit = np.zeros(self.num_types)
        np.maximum.at(per_unit, self.types, self.prices / self.units)
        highest = float(per_unit @ self.caps[: self.num_types])
        if self.change_prices is not None:
            highest += float(self.change_prices.max(axis=(1, 2)).sum())
        return highest * (1 + 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ascent:
    """What prices on scarce units show."""

    scarcity: Floats
    """The best of them, shape (R,)."""

    lower_bound: float
    """No partition within the caps is cheaper; infinite where there is none at all."""

    best: Ints | None
    """Positions of the stages of the cheapest partition within the caps that was met."""

    best_price: float

    nearest: Ints
    """Those of the cheapest partition at the best prices, which may break caps."""


def ascend(chain: CappedChain, *, target: float, scarcity: Floats | None = None) -> Ascent:
    """Raise the Lagrangian bound D(q) = min over partitions of price + q . units - q . caps, over q >= 0.

    D is concave with supergradient units - caps. Each round tries several steps along it in one pass, the
    longest being Polyak's step to the target.

    Args:
        chain: The candidates.
        target: A bound above needs not be raised; finite.
        scarcity: q to begin with; zeros by default.
    """
    caps = chain.caps
    scarcity = np.zeros(caps.size) if scarcity is None else scarcity
    best, best_price, nearest = None, np.inf, np.empty(0, dtype=np.int64)
    lower_bound, best_scarcity = -np.inf, scarcity
    direction = np.zeros(caps.size)
    stalled = 0
    for _ in range(_MAX_PRICE_STEPS):
        trials = (
            np.maximum(0.0, scarcity + _STEP_SIZES[:, None] * direction)
            if direction.any()
            else scarcity[None]
        )
        full = chain.full_prices(trials)
        after = chain.completions(full)
        beginnings = chain._beginnings(0, full[:, chain._by_first], after.reshape(len(trials), -1)).min(
            axis=1
        )
        bounds = beginnings - trials @ caps
        index = int(bounds.argmax())
        price, stages = chain.cheapest(full[index], after[index])
        if not np.isfinite(price):
            return Ascent(
                scarcity=scarcity, lower_bound=np.inf, best=None, best_price=np.inf, nearest=nearest
            )
        used = chain.used(stages)
        if (used <= caps).all() and (plain := chain.price(stages)) < best_price:
            best, best_price = stages, plain
        bound = float(bounds[index])
        stalled = 0 if bound > lower_bound + 3e-4 * abs(lower_bound) else stalled + 1
        if bound > lower_bound:
            lower_bound, best_scarcity, nearest = bound, trials[index], stages
        goal = min(target, best_price)
        if lower_bound >= goal or stalled >= 4:
            break
        scarcity = trials[index]
        slope = used - caps
        slope[(slope < 0) & (scarcity == 0)] = 0.0
        norm = float(slope @ slope)
        if norm == 0:
            break
        direction = slope * (2 * (goal - bound) / norm)
    return Ascent(
        scarcity=best_scarcity, lower_bound=lower_bound, best=best, best_price=best_price, nearest=nearest
    )


def without_hopeless(
    chain: CappedChain, scarcity: Floats, target: float, *, most: int | None = None
) -> CappedChain:
    """Return the chain without stages that no partition below the target has; at most the `most` promising ones."""
    full = chain.full_prices(scarcity)
    after = chain.completions(full[None])[0]
    before = chain.reaching(full)
    bounds = (
        before[chain.firsts, chain.types]
        + full
        + after[chain.lasts + 1, chain.types]
        - float(scarcity @ chain.caps)
    )
    is_near = bounds < target + _ROUNDING * abs(target)
    if most is not None and most < bounds.size:
        is_near &= bounds <= np.partition(bounds, most)[most]
    return chain if is_near.all() else chain.take(is_near)


@dataclass(frozen=True, kw_only=True, slots=True)
class CappedPartition:
    """The cheapest partition within the caps, or what could be shown."""

    rows: Ints | None
    """Flat indices run * T + type, last stage first; None where no partition below the cutoff was met."""

    lower_bound: float
    """Proven: no partition within the caps is cheaper."""

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

    A partial plan ends before some layer, its last stage is on some type, and what matters of it are the resources
    that it uses and its price: with fewer or equal of all of them it is at least as good. Both stand in one row of
    `spent`: R columns of resources, then the price.

    Args:
        chain: The candidates.
        scarcity: Prices of resources whose bound is strong.
        target: Finite or infinite; only cheaper partitions are looked for.
        most_partial_plans: That are kept of the same end.
        is_over: Asked now and then; the search ends early where it is.
    """
    return _PartialPlanSearch(chain, scarcity, target, most_partial_plans, is_over).run()


class _PartialPlanSearch:
    """Arguments as in `cheapest_below`."""

    def __init__(
        self,
        chain: CappedChain,
        scarcity: Floats,
        target: float,
        most_partial_plans: int,
        is_over: Callable[[], bool],
    ) -> None:
        self.chain, self.most_partial_plans, self.is_over = chain, most_partial_plans, is_over
        self.target = target
        # Rounding must not let a plan of equal price through; a hair below the target is enough.
        self.limit = target * (1 - _ROUNDING)
        full = chain.full_prices(np.stack([scarcity, np.zeros_like(scarcity)]))
        after = chain.completions(full)
        self.after = after[0]
        # Two bounds on the price of any completion: with scarcity charged, and without.
        self.weights = np.append(scarcity, 1.0)
        self.allowance = float(scarcity @ chain.caps)
        ends = chain.lasts + 1, chain.types
        self.full_ahead = full[0] + after[0][ends]
        self.plain_ahead = full[1] + after[1][ends]
        self.dropped_bound = np.inf

    def run(self) -> CappedPartition:
        """Return the cheapest partition below the target, or the bound."""
        chain = self.chain
        waiting: list[dict[int, list[tuple[Floats, Ints]]]] = [{} for _ in range(chain.num_layers + 1)]
        waiting[0][-1] = [(np.zeros((1, chain.caps.size + 1)), np.full((1, 2), -1))]
        kept_origins: list[Ints] = []  # parent partial plan, position of the stage that was added
        num_kept = 0
        for first in range(chain.num_layers):
            if self.is_over():
                return CappedPartition(rows=None, lower_bound=-np.inf, is_settled=False)
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
            prices = np.concatenate([batch[0][:, -1] for batch in finished])
            origins = np.concatenate([batch[1] for batch in finished])
            best = int(prices.argmin())
            rows, price = self._trace(origins[best], np.concatenate(kept_origins)), float(prices[best])
        return CappedPartition(
            rows=rows, lower_bound=min(price, self.dropped_bound), is_settled=self.dropped_bound >= price
        )

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
        lasts = chain.lasts[stages]
        full_spent = spent @ self.weights - self.allowance
        left = chain.caps[: chain.num_types] - spent[:, : chain.num_types]
        size = max(1, _NUMBERS_PER_PASS // stages.size)
        for start in range(0, len(spent), size):
            some = slice(start, start + size)
            before = last_types[some, None]
            change = np.where(before == types, np.inf, 0.0)
            if chain.change_prices is not None and first > 0:
                change += chain.change_prices[first][before, types]
            is_near = full_spent[some, None] + (self.full_ahead[stages] + change) < self.limit
            is_near &= spent[some, -1, None] + (self.plain_ahead[stages] + change) < self.limit
            is_near &= units <= left[some][:, types]
            if chain.most_stages is not None:
                is_near &= (spent[some, -2] + 1 <= chain.most_stages)[:, None]
            parents, steps = np.nonzero(is_near)
            if not parents.size:
                continue
            bounds = full_spent[start + parents] + self.full_ahead[stages[steps]] + change[parents, steps]
            keys = lasts[steps] * chain.num_types + types[steps]
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
            if chain.most_stages is not None:
                grown[:, -2] += 1
            origins = np.stack([parents + start + offset, stages[steps]], axis=1)
            ends = [*starts[1:].tolist(), keys.size]
            for key, begin, end in zip(found.tolist(), starts.tolist(), ends, strict=True):
                last, device_type = divmod(key, chain.num_types)
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
            worse = (best[None] <= part[:, None]).all(axis=2)
            worse &= np.arange(len(best)) < np.arange(start, start + len(part))[:, None]
            is_worse[start : start + 4_096] = worse.any(axis=1)
        spent, origins = spent[~is_worse], origins[~is_worse]
        if len(spent) > self.most_partial_plans:
            # A lower bound of what is dropped: its price with scarcity charged, and what must follow at least.
            stage = origins[0, 1]
            ahead = float(self.after[self.chain.lasts[stage] + 1, self.chain.types[stage]])
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
