"""Rates of this machine's products, as the trainer makes them, and of its copies."""

from __future__ import annotations

import torch
from torch import nn

from heterps_core.compute_device import CPU, clock_of, precision_on
from heterps_core.data.batch import ClickBatch
from heterps_core.profiling.layer_profile import MachineSpeed
from heterps_core.profiling.timing import Phase, time_phases
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.units import BYTES_PER_FLOAT32, MS_PER_S

_MATRIX_SIZE = {"cpu": 768, "cuda": 8192}
"""Large enough that a product runs at the rate of much larger ones, small enough for 10 ms on one core, and for a
tenth of a second on the slowest cards."""

COPIED_FLOATS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""64 MiB, beyond the last cache of the machines at hand; 256 MiB on a card, whose cache may hold 64."""

_TINY_OPERATIONS = 100
"""Timed together, because one is near the resolution of the clock."""


def measure_machine_speed(
    *, budget_s: float, device: torch.device = CPU, precision: str = "float32"
) -> MachineSpeed:
    """Measure matrix products, copies and tiny operations on a device, with the threads that torch is set to."""
    size, num_copied = _MATRIX_SIZE[device.type], COPIED_FLOATS[device.type]
    linear = nn.Linear(size, size, bias=False, device=device)
    product = StageLayers([linear], precision=precision_on(device, precision))
    nothing = torch.empty(0, device=device)
    batch = ClickBatch(dense=nothing, ids=nothing, labels=nothing)
    matrix = torch.rand(size, size, device=device)
    original = torch.rand(num_copied, device=device)
    copy = torch.empty_like(original)
    tiny = torch.ones(1, requires_grad=True, device=device)

    def run_tiny_operations() -> None:
        for _ in range(_TINY_OPERATIONS):
            torch.relu(tiny)

    timings = time_phases(
        [
            Phase("product", lambda: product(batch, matrix)),
            Phase("copy", lambda: copy.copy_(original)),
            Phase("tiny", run_tiny_operations),
        ],
        budget_s=budget_s,
        max_repeats=30,
        clock=clock_of(device),
    )
    return MachineSpeed(
        flops_per_s=2 * size**3 / timings["product"].median_ms * MS_PER_S,
        memory_bandwidth_bytes_per_s=(
            2 * BYTES_PER_FLOAT32 * num_copied / timings["copy"].median_ms * MS_PER_S
        ),
        kernel_launch_seconds=timings["tiny"].median_ms / MS_PER_S / _TINY_OPERATIONS,
    )
