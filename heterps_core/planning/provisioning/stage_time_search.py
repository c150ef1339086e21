"""Exact minimisation of stage time x price over the longest stage time x of a plan.

For a fixed x the cheapest units cost rate(x) per hour, a step function that never rises with x; the cost of a
run is proportional to (x + z) * rate(x), with z a shift for what is charged however short x is (0 in the plain
contract). Knowing the rate at one x rules out a whole range below it, so a few dozen rates prove the minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats

_BISECTION_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSolutions:
    """The least replicas of S stages at each of X stage times."""

    rates: Floats
    """rate(x), infinite where x cannot be reached; shape (X,)."""

    reached_seconds: Floats
    """y <= x such that the rate holds on all of [y, x]: the true longest stage time of the plan; shape (X,)."""

    products: Floats
    """(y + z) * rate, infinite where x cannot be reached; shape (X,)."""

    replicas: Floats
    """Shape (X, S)."""


def minimise_stage_time_rate(
    solve: Callable[[Floats], RateSolutions],
    *,
    low_seconds: float,
    high_seconds: float,
    shift_seconds: float,
    batch_size: int,
    known_product: float = np.inf,
) -> tuple[Floats | None, float]:
    """Return the replicas of the least (x + z) * rate(x) over low <= x <= high, and that product.

    Each solved x covers [y, x], where the rate is the same. Below y the rate is at least as high, so
    everything in [best / rate - z, y] is ruled out too, and a gap between two solved points closes when
    the lower point's x + z times the upper point's rate is no better than the best. What stays open is
    solved in the next round, `batch_size` points at a time because solvers work on arrays.

    Args:
        shift_seconds: z.
        known_product: (x + z) * rate of a plan from elsewhere; only better ones are looked for, and the product is
            infinite where there is none.
    """
    if low_seconds > high_seconds:
        return None, np.inf
    best, best_product = None, known_product
    solved_x, solved_y, solved_rate = (np.empty(0) for _ in range(3))
    asked = np.unique(np.geomspace(low_seconds, high_seconds, batch_size).clip(low_seconds, high_seconds))
    while asked.size:
        found = solve(asked)
        winner = int(np.argmin(found.products))
        if found.products[winner] < best_product:
            best_product, best = float(found.products[winner]), found.replicas[winner]
        order = np.argsort(np.concatenate([solved_x, asked]))
        solved_x = np.concatenate([solved_x, asked])[order]
        solved_y = np.concatenate([solved_y, found.reached_seconds])[order]
        solved_rate = np.concatenate([solved_rate, found.rates])[order]
        asked = _open_points(solved_x, solved_y, solved_rate, best_product, batch_size, shift_seconds)
    return best, np.inf if best is None else best_product


def _open_points(
    x: Floats, y: Floats, rate: Floats, best_product: float, batch_size: int, shift_seconds: float
) -> Floats:
    """Return the next stage times to solve, in the gaps that may still hold something better."""
    low, high, high_rate = x[:-1], np.minimum(x, y)[1:], rate[1:]
    # Without any plan yet, an infinite best over an infinite rate rules nothing in or out.
    with np.errstate(invalid="ignore"):
        high = np.fmin(high, best_product / high_rate - shift_seconds)
    high = np.nextafter(high, 0.0)
    is_open = (high > low) & np.isfinite(high_rate) & ((low + shift_seconds) * high_rate < best_product)
    low, high = low[is_open], high[is_open]
    if not low.size:
        return low
    if low.size >= batch_size:
        most_promising = np.argsort((low + shift_seconds) * high_rate[is_open], kind="stable")[:batch_size]
        return np.unique(high[most_promising])
    points_per_gap = batch_size // low.size
    shares = np.arange(points_per_gap) / points_per_gap
    points = high[:, None] ** (1 - shares) * low[:, None] ** shares
    # Rounding of the powers may leave the open gap.
    return np.unique(np.maximum(np.minimum(points, high[:, None]), np.nextafter(low[:, None], np.inf)))


def least_stage_seconds(
    reached_within: Callable[[float], float], *, low_seconds: float, high_seconds: float
) -> float:
    """Return the shortest stage time in [low, high] that some plan reaches, infinite where none does.

    Feasible at x means feasible at all longer times, so the border is found by bisection.

    Args:
        reached_within: Returns the longest stage time of a plan within x, infinite where there is none.
    """
    least_seconds = np.inf
    asked = high_seconds
    while high_seconds > low_seconds * (1 + _BISECTION_TOLERANCE) or not np.isfinite(least_seconds):
        reached = reached_within(asked)
        if np.isfinite(reached):
            least_seconds = high_seconds = reached
        elif asked == high_seconds:
            break
        else:
            low_seconds = asked
        asked = float(np.sqrt(low_seconds * high_seconds))
    return least_seconds
