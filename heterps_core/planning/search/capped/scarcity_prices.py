"""The prices on scarce units whose bound on a partition within the caps is the highest.

Shape legend: R = resources with caps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.search.capped.capped_chain import CappedChain

_MAX_PRICE_STEPS = 60

_PRECISE, _WORTH_WHILE = 3e-4, 0.03
"""An ascent ends where it could be raised by less: relatively to the bound, and to its distance from the target."""

_PART_OF_THE_WAY = 0.3
"""To the highest point below all planes; 1 would be Kelley's method."""

_MOST_PLANES = 40

_FEWEST = 1e-3
"""Stands for a cap of nothing where a first price is looked for."""


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
