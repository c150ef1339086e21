"""Prices of the boundaries of partitions that are given as rows of a stage table.

Shape legend: L = layers, T = device types, G = runs of layers as in `segment_table`, X = partitions. A partition is a
row of flat indices run * T + type, last stage first, padded with -1.
"""

from __future__ import annotations

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints


def sums_over_changes(change_prices: Floats, rows: Ints) -> Floats:
    """Return the sum of the prices of all boundaries of each partition, (L, T, T) and (X, L) -> (X,)."""
    num_types = change_prices.shape[-1]
    after, before = np.maximum(rows[:, :-1], 0), np.maximum(rows[:, 1:], 0)
    first_layer, _ = run_layers(after // num_types)
    prices = change_prices[first_layer, before % num_types, after % num_types]
    return np.asarray(np.where(rows[:, 1:] >= 0, prices, 0.0).sum(axis=1))


def run_layers(runs: Ints) -> tuple[Ints, Ints]:
    """Return first and last layers of runs, numbered b (b + 1) / 2 + a for layers a..b."""
    last_layers = ((np.sqrt(8 * runs + 1) - 1) // 2).astype(np.int64)
    return runs - last_layers * (last_layers + 1) // 2, last_layers
