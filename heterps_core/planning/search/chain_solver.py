"""The cheapest plan for a given longest stage time, over all placements of the chain.

For a fixed stage time the problem is a chain partition (`chain_partition.py`, with interruptions a few of them,
`cheapest_hull.py`). The caps on the units of a whole plan are left aside: where its optimum keeps them, it is the
optimum, and else `capped_search.py` finds it.

Shape legend: X = stage times, G = runs of layers, T = device types, L = layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.objective import Objective
from heterps_core.planning.cost_model.partition_sums import sums_over_stages
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.provisioning.stage_time_search import RateSolutions
from heterps_core.planning.search.cheapest_hull import CheapestProducts, cheapest_products

_NUMBERS_PER_PASS = 400_000
"""Table entries times stage times per vectorised pass; beyond it the arrays leave the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedRows:
    """A plan as rows of the segment table with their replica counts, in any order."""

    rows: Ints
    num_replicas: Ints


class ChainSolver:
    """Cheapest rate over all plans for given stage times, caps over the whole plan left aside; a `RateSolver`."""

    def __init__(self, table: StageTable, objective: Objective) -> None:
        self.table = table
        self.objective = objective
        self.num_types = table.price_usd_per_hour.size

    @property
    def shift_seconds(self) -> float:
        """z of the objective."""
        return self.objective.shift_seconds

    def solve(self, stage_seconds: Floats, best_product: float) -> RateSolutions[ReplicatedRows]:
        """Return rates for X stage times, in passes that fit the cache."""
        size = max(1, _NUMBERS_PER_PASS // self.table.compute_seconds.size)
        parts = []
        # From long to short: long stage times are the feasible ones, and a best plan prunes the rest.
        for start in range(0, stage_seconds.size, size):
            part = self._solve_pass(stage_seconds[::-1][start : start + size], best_product)
            best_product = min(best_product, float(part.products.min()))
            parts.append(part)
        plans = [(part, place) for part in parts for place in range(part.rates.size)][::-1]
        return RateSolutions(
            rates=np.concatenate([part.rates for part in parts])[::-1],
            reached_seconds=np.concatenate([part.reached_seconds for part in parts])[::-1],
            products=np.concatenate([part.products for part in parts])[::-1],
            plan_at=lambda index: plans[index][0].plan_at(plans[index][1]),
        )

    def _solve_pass(self, stage_seconds: Floats, best_product: float) -> RateSolutions[ReplicatedRows]:
        replicas = self.table.least_replicas(stage_seconds)  # (X, G, T)
        prices = self.table.usd_per_hour(replicas)
        interruptions = np.where(np.isfinite(replicas), replicas, 0.0) * self.table.interruptions_per_hour
        found = cheapest_products(self.objective, stage_seconds, prices, interruptions)
        is_possible = np.isfinite(found.lower_bounds)
        rows, rates, reached_seconds = found.rows, self._rates(found, stage_seconds), stage_seconds.copy()
        reached_seconds[is_possible] = self._slowest(replicas, rows)[is_possible]
        if self.objective.weighs_differently_over_time:
            # All plans of a true stage time in [y, x] are charged for y at least; which is best depends on that.
            at_reached = cheapest_products(self.objective, reached_seconds, prices, interruptions)
            rows = at_reached.rows
            rates_from_reached = self._rates(at_reached, reached_seconds)
        else:
            rates_from_reached = rates
        products = np.full(stage_seconds.size, np.inf)
        products[is_possible] = self._products(replicas[is_possible], prices[is_possible], rows[is_possible])
        return RateSolutions(
            rates=rates_from_reached,
            reached_seconds=reached_seconds,
            products=products,
            plan_at=lambda index: _replicated_rows(replicas[index], rows[index]),
        )

    def _rates(self, found: CheapestProducts, charged_seconds: Floats) -> Floats:
        """Return product / (x + z), shape (X,)."""
        if not self.objective.has_interruptions:
            return found.hourly  # (x + x0) * hourly / (x + x0), without the rounding
        return np.asarray(found.lower_bounds / (charged_seconds + self.shift_seconds))

    def _products(self, replicas: Floats, prices: Floats, rows: Ints) -> Floats:
        """Return the products of partitions at their true stage times, shape (X,)."""
        counts = np.where(np.isfinite(replicas), replicas, 0.0)
        return np.asarray(
            self.objective.product(
                self._slowest(replicas, rows),
                sums_over_stages(prices, rows),
                sums_over_stages(counts * self.table.interruptions_per_hour, rows),
                self.objective.transfers(rows),
            )
        )

    def _slowest(self, replicas: Floats, rows: Ints) -> Floats:
        """Return the longest stage time of each partition, shape (X,)."""
        stages = np.maximum(rows, 0)
        counts = np.take_along_axis(
            replicas.reshape(len(rows), self.table.compute_seconds.size), stages, axis=1
        )
        seconds = self.table.take(stages).seconds(counts)
        return np.asarray(np.where(rows >= 0, seconds, 0.0).max(axis=1))


def _replicated_rows(replicas: Floats, rows: Ints) -> ReplicatedRows:
    stages = rows[rows >= 0]
    return ReplicatedRows(rows=stages, num_replicas=replicas.reshape(-1)[stages].astype(np.int64))
