"""Cuts a chain over single devices so that its slowest stage is fastest: the baseline that TAPP calls Pipe-Torch.

Of Pipe-Torch (Zhan and Zhang 2019) the TAPP paper says only that it profiles the layers and balances the stages by
dynamic programming. Here each device has its own times, it holds at most one stage, and any of them may stay idle.

Shape legend: L = layers, D = devices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.arrays import Floats

MAX_DEVICES = 10
"""The table grows with 2 to the number of devices."""


class BalancedCut(NamedTuple):
    """A partition of the chain."""

    assignment: tuple[int, ...]
    """Device of each layer."""

    slowest_seconds: float
    """Time of the slowest stage, its messages included."""


def balanced_cut(layer_seconds: Floats, cut_seconds: Floats) -> BalancedCut:
    """Return the partition into one stage per device, or fewer, with the least time of the slowest stage.

    With F[S, b] the least slowest time of layers 0..b-1 on the devices S, all of them used,

        F[S, b] = min over d in S, a < b of  max(F[S - d, a], cut[a] + sum of seconds[a..b-1, d] + cut[b])

    and cut[0] = cut[L] = 0. Of equal partitions the one with fewer devices is returned.

    Args:
        layer_seconds: Time of each layer on each device for a batch, shape (L, D).
        cut_seconds: Time to bring activations over a boundary behind each layer and their gradients back, shape
            (L - 1,); both neighbours bear it.

    Raises:
        ConfigurationError: There are more than `MAX_DEVICES` devices.
    """
    num_layers, num_devices = layer_seconds.shape
    if num_devices > MAX_DEVICES:
        raise ConfigurationError(
            f"a balanced cut is found for at most {MAX_DEVICES} devices, got {num_devices}; "
            f"use the scheduler 'exact'"
        )
    sums = np.vstack([np.zeros(num_devices), np.cumsum(layer_seconds, axis=0)])  # (L + 1, D)
    cuts = np.concatenate([[0.0], cut_seconds, [0.0]])
    slowest = np.full((1 << num_devices, num_layers + 1), np.inf)
    slowest[0, 0] = 0.0
    last_stage = np.zeros((1 << num_devices, num_layers + 1, 2), dtype=np.int64)  # (first layer, device)
    for used in range(1, 1 << num_devices):
        for device in range(num_devices):
            if not used >> device & 1:
                continue
            before = slowest[used & ~(1 << device)]
            for end in range(1, num_layers + 1):
                stages = sums[end, device] - sums[:end, device] + cuts[:end] + cuts[end]
                times = np.maximum(before[:end], stages)
                first = int(times.argmin())
                if times[first] < slowest[used, end]:
                    slowest[used, end] = times[first]
                    last_stage[used, end] = first, device
    order = sorted(range(1, 1 << num_devices), key=lambda used: (slowest[used, num_layers], used.bit_count()))
    used, end = order[0], num_layers
    assignment: list[int] = []
    while end:
        first, device = (int(value) for value in last_stage[used, end])
        assignment[:0] = [device] * (end - first)
        used, end = used & ~(1 << device), first
    return BalancedCut(tuple(assignment), float(slowest[order[0], num_layers]))
