"""The cheapest way to cut a chain of layers into stages when every stage must keep a given time.

For a fixed stage time the price of a plan is a sum over its stages, so dynamic programming over (last layer,
device type) is exact. It is solved for many stage times, or many sets of unit prices, in one pass.

Shape legend: X = stage times (or price sets), L = layers, T = device types, G = runs of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainPartitions:
    """The cheapest partition for each of X cases."""

    prices: Floats
    """Least sum of stage prices, infinite where a case has no partition; shape (X,)."""

    rows: Ints
    """Flat indices run * T + type into a (G, T) table, last stage first, padded with -1; shape (X, L)."""


def cheapest_partitions(stage_prices: Floats, change_prices: Floats | None = None) -> ChainPartitions:
    """Return, for each case, the partition of the chain into stages with the least sum of prices.

    With F[b, t] the least price of layers 0..b whose last stage is on type t,

        F[b, t] = min over a <= b of  G[a, t] + price[a..b, t]
        G[a, t] = min over t' != t of F[a - 1, t'] + change[a, t', t],   G[0, t] = 0

    G skips t itself because neighbouring stages differ in type.

    Args:
        stage_prices: Price of each run of layers on each type, infinite where not allowed; shape (X, G, T)
            with the runs in the order of `segment_table`.
        change_prices: Price of a boundary before a layer between two types, [case, layer, before, after];
            shape (X, L, T, T), or (1, L, T, T) for all cases. None where changes are free.
    """
    num_cases, num_runs, num_types = stage_prices.shape
    num_layers = int((np.sqrt(8 * num_runs + 1) - 1) // 2)
    if change_prices is None:
        change_prices = np.broadcast_to(0.0, (1, num_layers, num_types, num_types))
    changes = np.where(np.eye(num_types, dtype=bool), np.inf, change_prices)
    before = np.zeros((num_cases, num_layers, num_types))  # G
    first_layer, previous_type = (np.zeros(before.shape, dtype=np.int64) for _ in range(2))
    for last in range(num_layers):
        start = last * (last + 1) // 2
        total = before[:, : last + 1] + stage_prices[:, start : start + last + 1]
        first_layer[:, last] = total.argmin(axis=1)
        ending = total.min(axis=1)  # F, shape (X, T)
        if last + 1 < num_layers:
            arriving = ending[..., None] + changes[:, last + 1]  # (X, T', T)
            previous_type[:, last + 1] = arriving.argmin(axis=1)
            before[:, last + 1] = arriving.min(axis=1)
    best_price = ending.min(axis=1)
    rows = _trace_back(first_layer, previous_type, ending.argmin(axis=1), np.isfinite(best_price))
    return ChainPartitions(prices=best_price, rows=rows)


def _trace_back(
    first_layer: Ints, previous_type: Ints, best_type: Ints, is_feasible: NDArray[np.bool_]
) -> Ints:
    num_cases, num_layers, num_types = first_layer.shape
    rows = np.full((num_cases, num_layers), -1, dtype=np.int64)
    cases = np.flatnonzero(is_feasible)
    last, device_type = np.full(cases.size, num_layers - 1), best_type[cases]
    for position in range(num_layers):
        first = first_layer[cases, last, device_type]
        rows[cases, position] = (last * (last + 1) // 2 + first) * num_types + device_type
        goes_on = first > 0
        cases, first, device_type = cases[goes_on], first[goes_on], device_type[goes_on]
        if not cases.size:
            break
        device_type = previous_type[cases, first, device_type]
        last = first - 1
    return rows
