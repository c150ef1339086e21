"""The cheapest partition of a chain when stages of one device type share a limited number of units.

Caps over the whole plan couple the stages, so dynamic programming alone only bounds the price. The
bound is sharpened by a price on each scarce unit (Lagrange), and what gap stays is closed by extending
partial plans from the first layer on, dropping those that the bound or a better partial plan rules out.

Shape legend: G = runs of layers, T = device types, L = layers, n = partial plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.partition_sums import sums_over_changes, sums_over_stages
from heterps_core.planning.search.chain_partition import cheapest_partitions, completion_prices

MAX_PARTIAL_PLANS = 200_000
"""Partial plans kept before the search gives up its proof (seconds, tens of MB)."""

_KEPT_WITHOUT_PROOF = 256
"""Cheapest partial plans of the same end that are still extended then, so that a plan is met where one exists."""

_MAX_PRICE_STEPS = 40
"""Rounds of the ascent on unit prices; each tries `_STEP_SIZES` of one direction at once."""

_STEP_SIZES = np.concatenate([[0.0], 2.0 ** -np.arange(0, 15)])
_REACHES = (0.001, 0.005, 0.025)
"""Relative distances above the lower bound that are searched first."""

_DOMINANCE_BLOCK = 128
"""Cheapest partial plans, which are compared with all others; the rest is only checked against these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CappedPartition:
    """The cheapest partition within the caps, or what could be shown."""

    rows: Ints | None
    """Flat indices run * T + type; None where no partition below the cutoff was met."""

    lower_bound: float
    """Proven: no partition within the caps is cheaper."""

    is_settled: bool
    """Whether `rows` is the optimum, or none below the cutoff exists."""


def cheapest_capped_partition(
    replicas: Floats,
    *,
    stage_prices: Floats,
    max_units: Floats,
    cutoff: float,
    change_prices: Floats | None = None,
) -> CappedPartition:
    """Return the cheapest partition whose replicas keep the caps, if it is cheaper than the cutoff.

    Args:
        replicas: Units that each run takes on each type, infinite where not allowed; shape (G, T).
        stage_prices: Price of each run on each type, positive, infinite where not allowed; shape (G, T).
        max_units: Caps over the whole plan, shape (T,).
        cutoff: Only partitions below this price are of interest; may be infinite.
        change_prices: Price of a boundary before a layer between two types, shape (L, T, T); None where free.
    """
    problem = _CappedProblem(
        units=np.where(np.isfinite(stage_prices), replicas, 0.0),
        stage_prices=stage_prices,
        max_units=max_units,
        change_prices=change_prices,
    )
    # No plan within the caps costs more than all units together: a bound above that proves there is none.
    everything = problem.dearest_price() * (1 + 1e-9)
    cutoff_price = min(cutoff, everything)
    ascent = _ascend_scarcity_prices(problem, cutoff_price)
    if ascent.lower_bound >= cutoff_price:
        bound = np.inf if cutoff_price == everything else ascent.lower_bound
        return CappedPartition(rows=None, lower_bound=bound, is_settled=True)
    search = _PartialPlanSearch(problem, ascent.scarcity_prices)
    rows = search.run(ascent.lower_bound, min(cutoff_price, ascent.best_price))
    if search.gave_up:
        rows = ascent.best_rows if rows is None else rows
        return CappedPartition(rows=rows, lower_bound=ascent.lower_bound, is_settled=False)
    if rows is None and ascent.best_price < cutoff_price:
        rows = ascent.best_rows  # nothing is below its price
    if rows is None:
        bound = np.inf if cutoff_price == everything else cutoff_price
        return CappedPartition(rows=None, lower_bound=bound, is_settled=True)
    return CappedPartition(rows=rows, lower_bound=float(problem.prices(rows[None])[0]), is_settled=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CappedProblem:
    units: Floats
    """0 where a stage is not allowed, which its infinite price says; shape (G, T)."""

    stage_prices: Floats
    max_units: Floats
    change_prices: Floats | None

    @property
    def num_types(self) -> int:
        return self.max_units.size

    def prices(self, rows: Ints) -> Floats:
        """Return the prices of partitions, shape (X, L) -> (X,)."""
        prices = sums_over_stages(self.stage_prices, rows)
        if self.change_prices is not None:
            prices = prices + sums_over_changes(self.change_prices, rows)
        return prices

    def dearest_price(self) -> float:
        """Return a price that no partition within the caps exceeds."""
        is_allowed = np.isfinite(self.stage_prices)
        per_unit = np.where(is_allowed, self.stage_prices, 0.0) / np.where(is_allowed, self.units, 1.0)
        dearest = float(per_unit.max(axis=0) @ self.max_units)
        if self.change_prices is not None:
            dearest += float(self.change_prices.max(axis=(1, 2)).sum())
        return dearest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ascent:
    scarcity_prices: Floats
    lower_bound: float
    best_rows: Ints | None
    best_price: float


def _ascend_scarcity_prices(problem: _CappedProblem, target: float) -> _Ascent:
    """Raise the Lagrangian bound D(q) = min over partitions of price + q . units - q . caps, over q >= 0.

    D is concave with supergradient units - caps. Each round tries several steps along it in one pass, the
    longest being Polyak's step to the target.
    """
    max_units = problem.max_units
    changes = None if problem.change_prices is None else problem.change_prices[None]
    scarcity = np.zeros(problem.num_types)
    lower_bound, best_rows, best_price = -np.inf, None, np.inf
    direction = np.zeros(problem.num_types)
    stalled = 0
    for _ in range(_MAX_PRICE_STEPS):
        trials = np.maximum(0.0, scarcity + _STEP_SIZES[:, None] * direction)
        found = cheapest_partitions(problem.stage_prices + problem.units * trials[:, None, :], changes)
        if not np.isfinite(found.prices[0]):
            return _Ascent(scarcity_prices=scarcity, lower_bound=np.inf, best_rows=None, best_price=np.inf)
        units = used_units(problem.units, found.rows, problem.num_types)
        bounds = found.prices - trials @ max_units
        prices = np.where((units <= max_units).all(axis=1), problem.prices(found.rows), np.inf)
        cheapest = int(prices.argmin())
        if prices[cheapest] < best_price:
            best_price = float(prices[cheapest])
            best_rows = found.rows[cheapest][found.rows[cheapest] >= 0]
        best = int(bounds.argmax())
        gain = bounds[best] - lower_bound
        lower_bound = max(lower_bound, float(bounds[best]))
        stalled = 0 if gain > 1e-4 * abs(lower_bound) else stalled + 1
        goal = min(target, best_price)
        if lower_bound >= goal or stalled >= 4:
            break
        scarcity = trials[best]
        slope = units[best] - max_units
        slope[(slope < 0) & (scarcity == 0)] = 0.0
        norm = float(slope @ slope)
        if norm == 0:
            break
        direction = slope * (2 * (goal - bounds[best]) / norm)
    return _Ascent(
        scarcity_prices=scarcity, lower_bound=lower_bound, best_rows=best_rows, best_price=best_price
    )


def used_units(replicas: Floats, rows: Ints, num_types: int) -> Floats:
    """Return the units of each type that partitions use.

    Args:
        replicas: Shape (G, T), or (X, G, T) with one table per partition.
        rows: Padded with -1, shape (X, L).

    Returns:
        Shape (X, T).
    """
    is_stage = rows >= 0
    tables = replicas.reshape(*replicas.shape[:-2], -1)
    taken = tables[rows] if replicas.ndim == 2 else np.take_along_axis(tables, np.maximum(rows, 0), axis=1)
    counts = np.where(is_stage, taken, 0.0)
    types = np.where(is_stage, rows % num_types, -1)
    return np.stack([(counts * (types == index)).sum(axis=1) for index in range(num_types)], axis=1)


class _PartialPlanSearch:
    """Extends partial plans layer by layer; exact unless it gives up, and then a beam search.

    A partial plan ends before some layer, its last stage is on some type, and what matters of it are the units
    it uses per type and its price: with fewer or equal of all of them it is at least as good. Both stand in
    one row of `spent`: T columns of units, then the price.
    """

    def __init__(self, problem: _CappedProblem, scarcity_prices: Floats) -> None:
        self.problem = problem
        self.full_weights = np.append(scarcity_prices, 1.0)
        self.allowance = float(scarcity_prices @ problem.max_units)
        self.full_prices = problem.stage_prices + problem.units * scarcity_prices
        self.full_completion = completion_prices(self.full_prices, problem.change_prices)
        self.plain_completion = completion_prices(problem.stage_prices, problem.change_prices)
        self.num_layers = self.full_completion.shape[0] - 1
        self.num_types = problem.num_types
        self.gave_up = False

    def run(self, lower_bound: float, target: float) -> Ints | None:
        """Return the rows of the cheapest partition below the target, or None.

        The first looks reach only a little above the lower bound, where few partial plans survive and the
        optimum mostly is.
        """
        for reach in _REACHES:
            near_target = min(lower_bound * (1 + reach), target)
            rows = self._cheapest_below(near_target)
            if rows is not None or near_target == target:
                return rows
            if self.gave_up:
                break
        return self._cheapest_below(target)

    def _cheapest_below(self, target: float) -> Ints | None:
        # Rounding must not let a plan of equal price through; a hair below the target is enough.
        limit = target * (1 - 1e-12)
        waiting: dict[tuple[int, int], list[tuple[Floats, Ints]]] = {
            (0, -1): [(np.zeros((1, self.num_types + 1)), np.full((1, 2), -1))]
        }
        kept_origins: list[Ints] = []  # parent partial plan, row of the stage that was added
        num_kept = 0
        for first in range(self.num_layers):
            for last_type in range(-1, self.num_types):
                batch = waiting.pop((first, last_type), None)
                if batch is None:
                    continue
                spent, origins = self._not_dominated(batch)
                self.gave_up |= num_kept + len(spent) > MAX_PARTIAL_PLANS
                if self.gave_up:
                    spent, origins = spent[:_KEPT_WITHOUT_PROOF], origins[:_KEPT_WITHOUT_PROOF]
                kept_origins.append(origins)
                offset, num_kept = num_kept, num_kept + len(spent)
                self._extend(spent, offset, first, last_type, limit, waiting)
        finished = [batch for key in sorted(waiting) for batch in waiting[key]]
        if not finished:
            return None
        prices = np.concatenate([batch[0][:, -1] for batch in finished])
        origins = np.concatenate([batch[1] for batch in finished])
        return self._trace(origins[int(prices.argmin())], np.concatenate(kept_origins))

    def _extend(
        self,
        spent: Floats,
        offset: int,
        first: int,
        last_type: int,
        limit: float,
        waiting: dict[tuple[int, int], list[tuple[Floats, Ints]]],
    ) -> None:
        lasts = np.arange(first, self.num_layers)
        runs = lasts * (lasts + 1) // 2 + first
        full_spent = spent @ self.full_weights - self.allowance
        changes = self.problem.change_prices
        for device_type in range(self.num_types):
            if device_type == last_type:
                continue
            change = 0.0 if changes is None or first == 0 else float(changes[first, last_type, device_type])
            added_units = self.problem.units[runs, device_type]
            added_prices = self.problem.stage_prices[runs, device_type] + change
            # Two bounds on the price of any completion: with scarcity charged, and without.
            full_ahead = (
                self.full_prices[runs, device_type] + change + self.full_completion[lasts + 1, device_type]
            )
            plain_ahead = added_prices + self.plain_completion[lasts + 1, device_type]
            is_near = (full_spent[:, None] + full_ahead < limit) & (spent[:, -1, None] + plain_ahead < limit)
            fits = spent[:, device_type, None] + added_units <= self.problem.max_units[device_type]
            parents, steps = np.nonzero(fits & is_near)
            for step in np.unique(steps):
                chosen = parents[steps == step]
                grown = spent[chosen]
                grown[:, device_type] += added_units[step]
                grown[:, -1] += added_prices[step]
                row = runs[step] * self.num_types + device_type
                origins = np.stack([chosen + offset, np.full(chosen.size, row)], axis=1)
                waiting.setdefault((int(lasts[step]) + 1, device_type), []).append((grown, origins))

    def _not_dominated(self, batch: list[tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        spent = np.concatenate([part[0] for part in batch])
        origins = np.concatenate([part[1] for part in batch])
        spent, firsts = np.unique(spent, axis=0, return_index=True)
        origins = origins[firsts]
        order = np.argsort(spent @ self.full_weights, kind="stable")
        spent, origins = spent[order], origins[order]
        best = spent[:_DOMINANCE_BLOCK]
        is_worse = (best[None] <= spent[:, None]).all(axis=2)
        # In the order of price only a later plan can be dominated; equal ones have been joined above.
        is_worse &= np.arange(len(best)) < np.arange(len(spent))[:, None]
        keep = ~is_worse.any(axis=1)
        return spent[keep], origins[keep]

    def _trace(self, origin: Ints, kept_origins: Ints) -> Ints:
        rows = []
        parent, row = origin
        while row >= 0:
            rows.append(row)
            parent, row = kept_origins[parent]
        return np.array(rows, dtype=np.int64)
