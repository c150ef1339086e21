"""From how many replicas on a stage keeps a limit of its time, in closed form.

All times of a stage are a + b / k - c / k^2 + d k of its replicas k. They keep a limit x where

    g(k) = d k^3 - s k^2 + b k - c <= 0,   s = x - a,

up to the smallest root and, where s > 0, between the two others; without d from the larger root of two on. No root is
near another's digits: the quadratic ones are taken in the form that does not cancel, and the middle one of three by
Laguerre's method from the gap before it, which passes no root as all of them are real.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats

_ROUNDING = 1e-12
"""A limit is raised by so much of it: a time equal to the least one of all counts keeps its limit."""

_SAME_ROOT = 1e-10
"""Relative step at which an iteration ends."""

_MOST_STEPS = 60
"""The distance from two equal roots falls to a quarter in each step, from a simple one with its third power."""


class KeptCounts(NamedTuple):
    """Counts of at least 1, not whole, that may keep a limit: up to `last_before`, and from `first_after` on."""

    last_before: Floats
    """Infinite where no count is excluded by it."""

    first_after: Floats
    """Infinite where no larger count keeps the limit."""


def kept_counts(limit: Floats, fixed: Any, shared: Any, saved: Any, per_peer: Any) -> KeptCounts:
    """Return the counts k where fixed + shared / k - saved / k^2 + per_peer k <= limit; all broadcast.

    Between the two results the limit is broken. After `first_after` it may be again, where peers take their time.
    """
    slack = limit - fixed
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        apart = np.sqrt(np.maximum(shared * shared - 4 * slack * saved, 0.0))
        smaller = np.where(shared >= 0, 2 * saved / (shared + apart), (shared - apart) / (2 * slack))
        root = (shared + apart) / (2 * slack)
    larger = np.where(slack > 0, np.maximum(root, 1.0), np.inf)
    where = np.nonzero(np.broadcast_to(per_peer, larger.shape) > 0)
    if where[0].size:
        raised, s, b, c, d = (
            np.broadcast_to(each, larger.shape)[where]
            for each in (slack + _ROUNDING * limit, slack, shared, saved, per_peer)
        )
        # Without a gap by two roots there may be one by three, whose beginning is not sought.
        smaller[where] = np.where(b * b >= 4 * s * c, smaller[where], np.inf)
        larger[where] = _middle_roots(np.stack([raised, b, c, d]), larger[where])
    return KeptCounts(smaller, larger)


def _middle_roots(terms: Floats, without_peers: Floats) -> Floats:
    """Return the middle root of g, at least 1; 1 where g is never above 0 before, infinite where never below after.

    Args:
        terms: s, b, c and d of N cubics, shape (4, N).
        without_peers: The larger root without d, at least 1.
    """
    s, b, _, d = terms
    bend = np.sqrt(np.maximum(s * s - 3 * d * b, 0.0))
    falls = (s > 0) & (bend > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        highest, lowest = np.maximum(b / (s + bend), 1.0), (s + bend) / (3 * d)
    has_gap, ends = _cubic(terms, highest) > 0, (_cubic(terms, lowest) <= 0) & (lowest >= 1)
    found = np.where(falls & ~has_gap, 1.0, np.inf)
    where = np.flatnonzero(falls & has_gap & ends)
    root = np.where(without_peers <= lowest, np.maximum(without_peers, highest), highest)[where]
    terms, moving = terms[:, where], np.arange(where.size)
    for _ in range(_MOST_STEPS):
        if not moving.size:
            break
        step = _laguerre_step(terms[:, moving], root[moving])
        root[moving] += step
        moving = moving[step > _SAME_ROOT * root[moving]]
    found[where] = root
    return found


def _cubic(terms: Floats, k: Floats) -> Floats:
    s, b, c, d = terms
    return np.asarray(((d * k - s) * k + b) * k - c)


def _laguerre_step(terms: Floats, k: Floats) -> Floats:
    """Return the distance to a point nearer to the root above k, where g falls."""
    s, b, _, d = terms
    value = np.maximum(_cubic(terms, k), 0.0)
    slope, curve = b - (2 * s - 3 * d * k) * k, 6 * d * k - 2 * s
    under = np.maximum(2 * (2 * slope * slope - 3 * value * curve), 0.0)
    steepness = np.maximum(np.sqrt(under) - slope, np.finfo(np.float64).tiny)
    return np.where(value > 0, 3 * value / steepness, 0.0)
