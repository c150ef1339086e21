"""The cheapest partition of a chain when stages of one device type share a limited number of units.

Caps over the whole plan couple the stages, so dynamic programming alone only bounds the price. The bound is sharpened
by a price on each scarce unit (Lagrange), stages that no better partition can have are struck out by it, and what gap
stays is closed by extending partial plans from the first layer on. At most so many partial plans of the same end are
kept; the least bound of those that are dropped bounds the price too, so the search may stop anywhere.

Shape legend: n = candidate stages, T = device types, E = further resources (a limit on stages, on interruptions),
R = T + E, L = layers, Q = price sets, p = partial plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.partition_sums import run_layers, sums_over_changes

MAX_PARTIAL_PLANS = 16_384
"""Partial plans of the same end that are kept at most."""

_MAX_PRICE_STEPS = 60
"""Rounds of the ascent on unit prices."""

_PRECISE, _WORTH_WHILE = 3e-4, 0.03
"""An ascent ends where it could be raised by less: relatively to the bound, and to its distance from the target."""

_PART_OF_THE_WAY = 0.3
"""To the highest point below all planes; 1 would be Kelley's method."""

_MOST_PLANES = 40
"""That are handed on to the next ascent."""

_DOMINANCE_BLOCK = 128
"""Cheapest partial plans, which are compared with all others; the rest is only checked against these."""

_NUMBERS_PER_PASS = 1_000_000
"""Partial plans times candidates that are held against each other at once; a few arrays of so many numbers."""

_ROUNDING = 1e-12

_FEWEST = 1e-3
"""Stands for a cap of nothing where a first price is looked for."""


class CappedChain:
    """Candidate stages with their prices and units; finds their cheapest partition of the chain within the caps.

    Args:
        rows: Flat indices run * T + type of the candidates, ascending; shape (n,).
        prices: Shape (n,), finite.
        units: Units that each takes of its type, shape (n,).
        caps: Units of each type over the whole plan, shape (T,).
        num_layers: L.
        change_prices: Price of a boundary before a layer between two types, shape (L, T, T); None where free.
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
        self.forbidden = np.where(np.eye(self.num_types, dtype=bool), np.inf, 0.0)
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
            changed = self.forbidden
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
                totals = totals + self.forbidden[before, types]
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
            changed = self.forbidden
            if self.change_prices is not None:
                changed = changed + self.change_prices[last + 1]
            before[last + 1] = (ending[:, None] + changed).min(axis=0)
        return before

    def used(self, stages: Ints) -> Floats:
        """Return the resources that the stages at some positions take together, shape (R,)."""
        used = np.bincount(self.types[stages], self.units[stages], minlength=self.num_types)
        return np.append(used, self.further[:, stages].sum(axis=1))

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

    nearest: Ints
    """Those of the cheapest partition at the best prices, which may break caps."""

    partitions: tuple[Ints, ...]
    """Positions of the stages of those that were met last."""


def ascend(
    chain: CappedChain, *, target: float, scarcity: Floats | None = None, known: Sequence[Ints] = ()
) -> Ascent:
    """Raise the Lagrangian bound D(q) = min over partitions of price + q . units - q . caps, over q >= 0.

    D is concave, and every partition is a plane above it. The highest point below all planes that are known is a
    linear programme; the next q lies a part of the way there from the best one, which keeps it from leaping between
    far corners (in-out separation: Ben-Ameur and Neto, Networks 49(1), 2007). What D is at any q is a bound, whatever
    the programme's precision.

    Args:
        chain: The candidates.
        target: A bound above needs not be raised; finite.
        scarcity: q to begin with; zeros by default.
        known: Positions of the stages of partitions whose planes are worth while from the start.
    """
    caps = chain.caps
    scarcity = np.zeros(caps.size) if scarcity is None else scarcity
    planes = [(chain.price(stages), chain.used(stages)) for stages in known]
    partitions = list(known)
    best, best_price, nearest = None, np.inf, np.empty(0, dtype=np.int64)
    lower_bound, best_scarcity = -np.inf, scarcity
    box = np.zeros(caps.size)
    for _ in range(_MAX_PRICE_STEPS):
        price, stages = chain.cheapest_of(chain.full_prices(scarcity))
        if not np.isfinite(price):
            return Ascent(scarcity=scarcity, lower_bound=np.inf, best=None, nearest=nearest, partitions=())
        used, plain = chain.used(stages), chain.price(stages)
        if (used <= caps).all() and plain < best_price:
            best, best_price = stages, plain
        bound = price - float(scarcity @ caps)
        if bound > lower_bound:
            lower_bound, best_scarcity, nearest = bound, scarcity, stages
        goal = min(target, best_price)
        if lower_bound >= goal:
            break
        planes.append((plain, used))
        partitions.append(stages)
        box = np.maximum(box, np.maximum(2 * best_scarcity, abs(plain) / np.maximum(caps, _FEWEST)))
        highest, corner = _highest_below(planes, caps, box)
        is_cut_off = corner > 0.99 * box
        box[is_cut_off] *= 4
        if not is_cut_off.any() and highest - lower_bound <= max(
            _PRECISE * abs(lower_bound), _WORTH_WHILE * min(goal - lower_bound, 0.3 * abs(lower_bound))
        ):
            break
        scarcity = best_scarcity + _PART_OF_THE_WAY * (corner - best_scarcity)
    return Ascent(
        scarcity=best_scarcity,
        lower_bound=lower_bound,
        best=best,
        nearest=nearest,
        partitions=tuple(partitions[-_MOST_PLANES:]),
    )


def _highest_below(planes: Sequence[tuple[float, Floats]], caps: Floats, box: Floats) -> tuple[float, Floats]:
    """Return the highest value below all planes price + q . (units - caps) with 0 <= q <= box, and its q."""
    from scipy.optimize import linprog  # a fifth of a second, for problems with scarce units alone

    prices = np.array([price for price, _ in planes])
    unit = np.abs(prices).max()
    slopes = np.array([used for _, used in planes]) - caps
    # In shares of the box and of the highest price, so that all numbers are of the same order.
    found = linprog(
        np.append(np.zeros(caps.size), -1.0),
        A_ub=np.column_stack([-slopes * box / unit, np.ones(len(planes))]),
        b_ub=prices / unit,
        bounds=[(0.0, 1.0)] * caps.size + [(None, None)],
    )
    if found.x is None:
        return -np.inf, np.zeros(caps.size)
    return float(found.x[-1]) * unit, np.clip(found.x[:-1], 0.0, 1.0) * box


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
    `spent`: R columns of resources, then the price. Resources without a price are left aside first, so that one
    partial plan stands for many; where the cheapest partition takes too much of one, it is counted as well.

    Args:
        chain: The candidates.
        scarcity: Prices of resources whose bound is strong.
        target: Finite or infinite; only cheaper partitions are looked for.
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
        self.limit = target * (1 - _ROUNDING)
        full = chain.full_prices(np.stack([scarcity, np.zeros_like(scarcity)]))
        after = chain.completions(full)
        self.after = after[0]
        # Two bounds on the price of any completion: with scarcity charged, and without.
        self.weights = np.append(scarcity, 1.0)
        self.allowance = float(scarcity @ chain.caps)
        self.caps = np.where(is_counted, chain.caps, np.inf)
        self.compared = [*np.flatnonzero(is_counted).tolist(), chain.caps.size]
        ends = chain.lasts + 1, chain.types
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
        lasts = chain.lasts[stages]
        full_spent = spent @ self.weights - self.allowance
        left = self.caps[: chain.num_types] - spent[:, : chain.num_types]
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
            for index, each in enumerate(chain.further, start=chain.num_types):
                is_near &= spent[some, index, None] + each[stages] <= self.caps[index]
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
            grown[:, chain.num_types : -1] += chain.further[:, stages[steps]].T
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
            worse = np.arange(len(best)) < np.arange(start, start + len(part))[:, None]
            for column in self.compared:
                worse &= best[:, column] <= part[:, column, None]
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
