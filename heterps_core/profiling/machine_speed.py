"""How fast one core of this machine computes and copies: the limits that a roofline is drawn with."""

from __future__ import annotations

import torch

from heterps_core.profiling.layer_profile import MachineSpeed
from heterps_core.profiling.timing import Phase, RepeatLimits, time_phases
from heterps_core.units import BYTES_PER_FLOAT32, MS_PER_S

MATRIX_SIZE = 768
"""Large enough that a product runs at the rate of much larger ones, small enough for 10 ms on one core."""

COPIED_FLOATS = 1 << 24
"""64 MiB, beyond the last cache of the machines at hand."""

TINY_OPERATIONS = 100
"""Timed together, because one is near the resolution of the clock."""


def measure_machine_speed(*, budget_s: float) -> MachineSpeed:
    """Measure matrix products, copies and tiny operations with the threads that torch is set to."""
    left, right, product = (torch.rand(MATRIX_SIZE, MATRIX_SIZE) for _ in range(3))
    original = torch.rand(COPIED_FLOATS)
    copy = torch.empty_like(original)
    tiny = torch.ones(1, requires_grad=True)

    def run_tiny_operations() -> None:
        for _ in range(TINY_OPERATIONS):
            torch.relu(tiny)

    timings = time_phases(
        [
            Phase("product", lambda: torch.mm(left, right, out=product)),
            Phase("copy", lambda: copy.copy_(original)),
            Phase("tiny", run_tiny_operations),
        ],
        RepeatLimits(budget_s=budget_s, max_repeats=30),
    )
    return MachineSpeed(
        flops_per_s=2 * MATRIX_SIZE**3 / timings["product"].median_ms * MS_PER_S,
        memory_bandwidth_bytes_per_s=(
            2 * BYTES_PER_FLOAT32 * COPIED_FLOATS / timings["copy"].median_ms * MS_PER_S
        ),
        kernel_launch_seconds=timings["tiny"].median_ms / MS_PER_S / TINY_OPERATIONS,
    )
