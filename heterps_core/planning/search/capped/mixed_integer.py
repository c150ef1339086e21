"""The cheapest partition within the caps as a mixed-integer programme, solved by HiGHS.

Each candidate stage and each boundary between two types is an arc of a network from the first layer to the last; a
plan is a path. Boundaries tell types apart where neighbours must differ. The solver's cuts close what prices on
scarce units and partial plans leave open where caps are so tight that few plans keep them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from heterps_core.planning.cost_model.arrays import Ints
from heterps_core.planning.search.capped.capped_chain import CappedChain
from heterps_core.planning.search.capped.partial_plans import CappedPartition

if TYPE_CHECKING:
    from scipy.sparse import csr_array

TOLERANCE = 1e-6
"""By which a solver's bound may be off, relatively: its constraints are kept up to 1e-6."""

_OPTIMAL, _INFEASIBLE = 0, 2
"""Statuses of scipy; others are of a solver that was stopped, by its time limit as a rule."""


def cheapest_by_programme(
    chain: CappedChain, *, target: float, seconds: float, gap: float = 0.0
) -> CappedPartition:
    """Return the cheapest partition below the target, or a bound.

    Args:
        seconds: After which the best bound so far is returned.
        gap: Between a partition and the bound, relatively, from which on they are good enough.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if not chain.rows.size:
        return CappedPartition(rows=None, lower_bound=target, is_settled=True)
    num_stages = chain.rows.size
    flow = _network(chain)
    prices = np.pad(chain.prices, (0, flow.shape[1] - num_stages))
    # In shares of the target, so that tolerances are relative.
    unit = abs(target)
    used = np.zeros((chain.caps.size, prices.size))
    used[chain.types, np.arange(num_stages)] = chain.units
    used[chain.num_types :, :num_stages] = chain.further
    is_limited = np.isfinite(chain.caps)
    demand = np.zeros(flow.shape[0])
    demand[0] = 1.0
    found = milp(
        prices / unit,
        integrality=(np.arange(prices.size) < num_stages).astype(int),
        bounds=Bounds(0.0, 1.0),
        constraints=[
            LinearConstraint(flow, demand, demand),
            LinearConstraint(csr_array(used[is_limited]), -np.inf, chain.caps[is_limited]),
            LinearConstraint(csr_array(prices[None] / unit), -np.inf, target / unit),
        ],
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    margin = TOLERANCE * unit
    if found.status == _INFEASIBLE:
        return CappedPartition(rows=None, lower_bound=target - margin, is_settled=True)
    bound = -np.inf if found.mip_dual_bound is None else found.mip_dual_bound * unit - margin
    rows = None
    if found.x is not None:
        stages = np.flatnonzero(found.x[:num_stages] > 0.5)
        rows = chain.rows[stages[np.argsort(-chain.firsts[stages])]]
    return CappedPartition(
        rows=rows, lower_bound=min(bound, target - margin), is_settled=found.status == _OPTIMAL
    )


def _network(chain: CappedChain) -> csr_array:
    """Return the flow into less that out of every node by stage and boundary arc.

    Node 0 is the start; each other one stands for a layer that a stage on some type begins with, or for the boundary
    after one that a stage on some type ended with.
    """
    from scipy.sparse import csr_array

    num_types, num_layers, stages = chain.num_boundary_types, chain.num_layers, np.arange(chain.rows.size)
    begins = chain.firsts * num_types + chain.boundary_types
    ends = (chain.lasts + 1) * num_types + chain.boundary_types
    inner_begins = np.unique(begins[chain.firsts > 0])
    inner_ends = np.unique(ends[chain.lasts + 1 < num_layers])
    before, after = np.nonzero(inner_ends[:, None] // num_types == inner_begins // num_types)
    if chain.change_prices is not None:
        layers = inner_begins[after] // num_types
        prices = chain.change_prices[layers, inner_ends[before] % num_types, inner_begins[after] % num_types]
        before, after = before[np.isfinite(prices)], after[np.isfinite(prices)]
    arcs = chain.rows.size + np.arange(before.size)
    into, out = 1 + np.arange(inner_begins.size), 1 + inner_begins.size + np.arange(inner_ends.size)
    begun, goes_on = chain.firsts > 0, chain.lasts + 1 < num_layers
    parts: list[tuple[Ints, Ints, float]] = [
        (np.zeros(int((~begun).sum()), dtype=np.int64), stages[~begun], 1.0),
        (into[np.searchsorted(inner_begins, begins[begun])], stages[begun], -1.0),
        (out[np.searchsorted(inner_ends, ends[goes_on])], stages[goes_on], 1.0),
        (out[before], arcs, -1.0),
        (into[after], arcs, 1.0),
    ]
    nodes, columns = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    signs = np.concatenate([np.full(part[0].size, part[2]) for part in parts])
    shape = (1 + inner_begins.size + inner_ends.size, chain.rows.size + before.size)
    return csr_array((signs, (nodes, columns)), shape=shape)
