"""The cheapest partition of a chain when stages of one device type share a limited number of units.

Caps over the whole plan couple the stages, so dynamic programming alone only bounds the price. The
bound is sharpened by a price on each scarce unit (Lagrange), and what gap stays is closed by extending
partial plans from the first layer on, dropping those that the bound or a better partial plan rules out.

Shape legend: G = runs of layers, T = device types, L = layers, n = partial plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_core.cost_model.stage_table import Floats, Ints
from heterps_core.scheduling.chain_partition import cheapest_partitions, completion_prices

MAX_PARTIAL_PLANS = 200_000
"""Partial plans kept before the search gives up and returns the bound alone (seconds, tens of MB)."""

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
    replicas: Floats, *, unit_prices: Floats, max_units: Floats, cutoff: float
) -> CappedPartition:
    """Return the cheapest partition whose replicas keep the caps, if it is cheaper than the cutoff.

    Args:
        replicas: Units that each run takes on each type, infinite where not allowed; shape (G, T).
        unit_prices: Shape (T,), positive.
        max_units: Caps over the whole plan, shape (T,).
        cutoff: Only partitions below this price are of interest; may be infinite.
    """
    # No plan within the caps costs more than all units together: a bound above that proves there is none.
    everything = float(unit_prices @ max_units) * (1 + 1e-9)
    cutoff_price = min(cutoff, everything)
    ascent = _ascend_scarcity_prices(replicas, unit_prices, max_units, cutoff_price)
    if ascent.lower_bound >= cutoff_price:
        bound = np.inf if cutoff_price == everything else ascent.lower_bound
        return CappedPartition(rows=None, lower_bound=bound, is_settled=True)
    search = _PartialPlanSearch(replicas, unit_prices, max_units, ascent.scarcity_prices)
    rows = search.run(ascent.lower_bound, min(cutoff_price, ascent.best_price))
    if search.gave_up:
        return CappedPartition(rows=ascent.best_rows, lower_bound=ascent.lower_bound, is_settled=False)
    if rows is None:
        rows = ascent.best_rows
    if rows is None:
        bound = np.inf if cutoff_price == everything else cutoff_price
        return CappedPartition(rows=None, lower_bound=bound, is_settled=True)
    price = float((replicas.reshape(-1)[rows] * unit_prices[rows % unit_prices.size]).sum())
    return CappedPartition(rows=rows, lower_bound=price, is_settled=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ascent:
    scarcity_prices: Floats
    lower_bound: float
    best_rows: Ints | None
    best_price: float


def _ascend_scarcity_prices(
    replicas: Floats, unit_prices: Floats, max_units: Floats, target: float
) -> _Ascent:
    """Raise the Lagrangian bound D(q) = min over partitions of (p + q) . units - q . caps, over q >= 0.

    D is concave with supergradient units - caps. Each round tries several steps along it in one pass, the
    longest being Polyak's step to the target.
    """
    num_types = unit_prices.size
    scarcity = np.zeros(num_types)
    lower_bound, best_rows, best_price = -np.inf, None, np.inf
    direction = np.zeros(num_types)
    stalled = 0
    for _ in range(_MAX_PRICE_STEPS):
        trials = np.maximum(0.0, scarcity + _STEP_SIZES[:, None] * direction)
        found = cheapest_partitions(replicas * (unit_prices + trials)[:, None, :])
        if not np.isfinite(found.prices[0]):
            return _Ascent(scarcity_prices=scarcity, lower_bound=np.inf, best_rows=None, best_price=np.inf)
        units = used_units(replicas, found.rows, num_types)
        bounds = found.prices - trials @ max_units
        prices = np.where((units <= max_units).all(axis=1), units @ unit_prices, np.inf)
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
    """Extends partial plans layer by layer; exact unless it gives up.

    A partial plan ends before some layer, its last stage is on some type, and what matters of it is the
    units it uses per type: with fewer or equal units of every type it is at least as good.
    """

    def __init__(
        self, replicas: Floats, unit_prices: Floats, max_units: Floats, scarcity_prices: Floats
    ) -> None:
        self.replicas = replicas
        self.unit_prices = unit_prices
        self.max_units = max_units
        self.full_prices = unit_prices + scarcity_prices
        self.allowance = float(scarcity_prices @ max_units)
        self.full_completion = completion_prices(replicas * self.full_prices)
        self.plain_completion = completion_prices(replicas * unit_prices)
        self.num_layers = self.full_completion.shape[0] - 1
        self.num_types = unit_prices.size
        self.gave_up = False

    def run(self, lower_bound: float, target: float) -> Ints | None:
        """Return the rows of the cheapest partition below the target, or None.

        The first looks reach only a little above the lower bound, where few partial plans survive and the
        optimum mostly is.
        """
        for reach in _REACHES:
            near_target = min(lower_bound * (1 + reach), target)
            rows = self._cheapest_below(near_target)
            if rows is not None or near_target == target or self.gave_up:
                return rows
        return self._cheapest_below(target)

    def _cheapest_below(self, target: float) -> Ints | None:
        # Rounding must not let a plan of equal price through; a hair below the target is enough.
        limit = target * (1 - 1e-12)
        waiting: dict[tuple[int, int], list[tuple[Floats, Ints]]] = {
            (0, -1): [(np.zeros((1, self.num_types)), np.full((1, 2), -1))]
        }
        kept_units: list[Floats] = []
        kept_origins: list[Ints] = []  # parent partial plan, row of the stage that was added
        num_kept = 0
        for first in range(self.num_layers):
            for last_type in range(-1, self.num_types):
                batch = waiting.pop((first, last_type), None)
                if batch is None:
                    continue
                units, origins = self._not_dominated(batch)
                kept_units.append(units)
                kept_origins.append(origins)
                offset, num_kept = num_kept, num_kept + len(units)
                if num_kept > MAX_PARTIAL_PLANS:
                    self.gave_up = True
                    return None
                self._extend(units, offset, first, last_type, limit, waiting)
        finished = [batch for key in sorted(waiting) for batch in waiting[key]]
        if not finished:
            return None
        units = np.concatenate([batch[0] for batch in finished])
        origins = np.concatenate([batch[1] for batch in finished])
        return self._trace(origins[int((units @ self.unit_prices).argmin())], np.concatenate(kept_origins))

    def _extend(
        self,
        units: Floats,
        offset: int,
        first: int,
        last_type: int,
        limit: float,
        waiting: dict[tuple[int, int], list[tuple[Floats, Ints]]],
    ) -> None:
        lasts = np.arange(first, self.num_layers)
        runs = lasts * (lasts + 1) // 2 + first
        full_spent = units @ self.full_prices - self.allowance
        plain_spent = units @ self.unit_prices
        for device_type in range(self.num_types):
            if device_type == last_type:
                continue
            added = self.replicas[runs, device_type]
            # Two bounds on the price of any completion: with scarcity charged, and without.
            full_ahead = added * self.full_prices[device_type] + self.full_completion[lasts + 1, device_type]
            plain_ahead = (
                added * self.unit_prices[device_type] + self.plain_completion[lasts + 1, device_type]
            )
            is_near = (full_spent[:, None] + full_ahead < limit) & (
                plain_spent[:, None] + plain_ahead < limit
            )
            fits = units[:, device_type, None] + added <= self.max_units[device_type]
            parents, steps = np.nonzero(fits & is_near)
            for step in np.unique(steps):
                chosen = parents[steps == step]
                grown = units[chosen]
                grown[:, device_type] += added[step]
                row = runs[step] * self.num_types + device_type
                origins = np.stack([chosen + offset, np.full(chosen.size, row)], axis=1)
                waiting.setdefault((int(lasts[step]) + 1, device_type), []).append((grown, origins))

    def _not_dominated(self, batch: list[tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        units = np.concatenate([part[0] for part in batch])
        origins = np.concatenate([part[1] for part in batch])
        units, firsts = np.unique(units, axis=0, return_index=True)
        origins = origins[firsts]
        order = np.argsort(units @ self.full_prices, kind="stable")
        units, origins = units[order], origins[order]
        best = units[:_DOMINANCE_BLOCK]
        is_worse = (best[None] <= units[:, None]).all(axis=2)
        # In the order of price only a later plan can be dominated; equal ones have been joined above.
        is_worse &= np.arange(len(best)) < np.arange(len(units))[:, None]
        keep = ~is_worse.any(axis=1)
        return units[keep], origins[keep]

    def _trace(self, origin: Ints, kept_origins: Ints) -> Ints:
        rows = []
        parent, row = origin
        while row >= 0:
            rows.append(row)
            parent, row = kept_origins[parent]
        return np.array(rows, dtype=np.int64)
