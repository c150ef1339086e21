"""The cost of one pipeline stage: its work on one unit, and its time and memory with k replicas.

The formulas are those of the planning contract; the arithmetic is written so that it takes plain numbers
and NumPy arrays alike, and every part of the planner computes a stage's time by these same operations.
"""

from __future__ import annotations

from typing import Any

COMPARISON_TOLERANCE = 1e-12
"""Relative slack of `time <= limit` and `memory <= limit`: a few units of rounding, no more."""


def boundary_seconds(
    input_bytes_per_sample: Any,
    output_bytes_per_sample: Any,
    *,
    profile_batch_size: int,
    bandwidth_bytes_per_s: Any,
) -> Any:
    """Return the time in which one unit moves a profiling batch across the stage's two boundaries.

    2 * B_o * (input cut + output cut) / bandwidth; the factor 2 is for activations forward and their
    gradients back. The cuts are 0 at the ends of the chain.
    """
    return 2 * profile_batch_size * (input_bytes_per_sample + output_bytes_per_sample) / bandwidth_bytes_per_s


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
