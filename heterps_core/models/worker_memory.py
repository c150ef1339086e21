"""What a worker takes of its unit's memory before any table: the plan may fill what is left.

All constants of the reserve stand here, each with its source.
"""

from __future__ import annotations

from heterps_core.hardware import DeviceKind, DeviceType
from heterps_core.models.model_graph import ModelGraph

WORKER_BYTES = 0.4e9
"""Resident size of an idle worker, with torch, a gloo group, the checkpoint writer and a small network: 361 MB
measured on 2 cores, Python 3.11, torch 2.13.0+cpu, 2026-11-22; rounded up."""

ROW_ORDER_BYTES_PER_SAMPLE = 4.1
"""Order in which an epoch visits the training rows, of which each worker holds all: 32 bits a row, 4.0 at its peak
and 4.1 held for 100 M rows, measured on the same machine and day."""

CARD_BYTES = 1.0e9
"""Of a card: the context of CUDA, NCCL's buffers and the allocator's rounding. Assumed: the order of what PyTorch
takes on a card before any tensor; not measured, as there was no card."""

FREE_SHARE = 0.03
"""Of all memory, for the operating system and fragments. Assumed."""


def host_bytes_of_worker(num_samples: float) -> float:
    """Return the host memory that one worker takes before any table, for training rows of one epoch."""
    return WORKER_BYTES + ROW_ORDER_BYTES_PER_SAMPLE * num_samples


def reserved_bytes(
    device_type: DeviceType, graph: ModelGraph, *, batch_size: int, num_samples: float
) -> float:
    """Return what is not free for tables and weights in the memory of one unit.

    The worker, on the host or on its card, a free share, and the activations in flight: at most those of a whole
    batch in all layers, with their gradients.
    """
    activation_bytes = 2 * batch_size * sum(layer.output_bytes_per_sample for layer in graph.layers)
    is_cpu = device_type.kind is DeviceKind.CPU
    worker_bytes = host_bytes_of_worker(num_samples) if is_cpu else CARD_BYTES
    return worker_bytes + activation_bytes + FREE_SHARE * device_type.memory_bytes
