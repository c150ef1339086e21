"""The laws that every part of the planner computes a stage by; arguments are numbers or arrays."""

from __future__ import annotations

from typing import Any

COMPARISON_TOLERANCE = 1e-12
"""Relative slack of `time <= limit` and `memory <= limit`: a few units of rounding, no more."""


def replicated_seconds(unit_seconds: Any, parallel_fraction: Any, num_replicas: Any) -> Any:
    """Return the time with k replicas by Amdahl's law: s * (1 - f + f / k).

    Args:
        unit_seconds: s, time on one unit.
        parallel_fraction: f, in [0, 1].
        num_replicas: k, at least 1.

    Example:
        >>> replicated_seconds(10.0, 0.5, 5)
        6.0
    """
    return unit_seconds * (1 - parallel_fraction + parallel_fraction / num_replicas)


def replica_memory_bytes(replicated_bytes: Any, sharded_bytes: Any, num_replicas: Any) -> Any:
    """Return the state that one of k replicas holds: all replicated bytes and 1/k of the sharded ones."""
    return replicated_bytes + sharded_bytes / num_replicas


def is_within(value: Any, limit: Any) -> Any:
    """Return whether a quantity keeps its limit, up to rounding."""
    return value <= limit * (1 + COMPARISON_TOLERANCE)
