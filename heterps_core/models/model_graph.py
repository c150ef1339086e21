"""A model as the planner sees it: a chain of layers with sizes, but no tensors; and the memory of its workers.

All constants of what a worker reserves stand here, each with its source.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import StrEnum

from heterps_core.data.features import BUFFER_BYTES
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import DeviceKind, DeviceType
from heterps_core.json_codec import JsonDocument, JsonForm


class LayerKind(StrEnum):
    """Main work of a layer; estimates are calibrated per kind."""

    EMBEDDING = "embedding"
    FULLY_CONNECTED = "fully_connected"
    ELEMENTWISE = "elementwise"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer(JsonDocument):
    """One layer of the chain."""

    json_form = JsonForm(omits_defaults=True)

    name: str
    kind: LayerKind

    is_sharded: bool
    """Rows of its state are divided among the replicas of its stage; otherwise each replica holds all of it."""

    parameter_bytes: int
    optimizer_state_bytes: int

    input_bytes_per_sample: int
    """Activation that enters, in float32, plus the row indices that an embedding reads."""

    output_bytes_per_sample: int
    """Activation that leaves, in float32; what crosses a boundary after this layer."""

    forward_flops_per_sample: float
    """Matrix products alone."""

    looked_up_bytes_per_sample: int
    """Rows that an embedding reads for one sample; 0 for other kinds."""

    backward_flops_per_sample: float | None = None
    """None for twice the forward ones."""

    uncounted: tuple[str, ...] = ()
    """Operations and functions whose work is not in the counts: estimates take the measured time as their base."""

    @property
    def state_bytes(self) -> int:
        """Parameters and optimizer state."""
        return self.parameter_bytes + self.optimizer_state_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGraph(JsonDocument):
    """A chain of layers; layer i feeds layer i + 1 with one tensor."""

    json_form = JsonForm(version=1)

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigurationError(f"the model {self.name!r} must have at least one layer")
        names = [layer.name for layer in self.layers]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigurationError(f"layer names must differ, but {', '.join(repeated)} occur twice")

    @property
    def state_bytes(self) -> int:
        """Parameters and optimizer state of all layers."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def uncounted_text(self) -> str:
        """The layers that hold work without a count, and which; empty for none."""
        named = [f"{layer.name} ({', '.join(layer.uncounted)})" for layer in self.layers if layer.uncounted]
        if not named:
            return ""
        return (
            f"work that could not be counted: {'; '.join(named)}; on device types that are not at hand these layers "
            f"are planned with the time measured here, by whichever of arithmetic and memory gains less there"
        )

    def without_table_sizes(self) -> ModelGraph:
        """Return the graph as it would be of the same model with any number of rows in its tables."""
        layers = (
            replace(layer, parameter_bytes=0, optimizer_state_bytes=0) if layer.is_sharded else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def fingerprint(self) -> str:
        """Return a short hash that changes with any size or name in the graph."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


WORKER_BYTES = 0.55e9
"""Resident size of an idle worker, with torch, a gloo group, the checkpoint writer and a small network, 361 MB, of
Arrow's reader, 70 MB, and of the counts by which models are judged, 100 MB; measured on 2 cores, Python 3.11, torch
2.13.0+cpu, 2026-11-22; rounded up. Each run tells the most that its workers had beside what was counted for them."""

ROW_BUFFER_BYTES_PER_SAMPLE = 200
"""Row groups in memory: 157 with Criteo's columns, and what is read, hashed and copied meanwhile."""

CHECKPOINT_BYTES = 0.31e9
"""Most that a worker copies for a checkpoint and has not written yet; a smaller model has no more to copy."""

CARD_BYTES = 1.0e9
"""Reserved on a card: the context of CUDA, NCCL's buffers and the allocator's rounding. Assumed: the order of what
PyTorch takes on a card before any tensor; not measured, as there was no card."""

FREE_SHARE = 0.03
"""Share of all memory for page tables and fragments. Assumed."""

HOST_BYTES = 0.4e9
"""Memory of a host beside its workers: 66 MB of the node's process (measured, Python 3.11, 2026-11-26), and the
kernel, system services and the process that workers are forked from, assumed."""


def host_bytes_of_worker(num_samples: float) -> float:
    """Return the host memory that one worker takes before any table, for training rows of one epoch."""
    return WORKER_BYTES + min(ROW_BUFFER_BYTES_PER_SAMPLE * num_samples, 1.25 * BUFFER_BYTES)


def reserved_bytes(
    device_type: DeviceType, graph: ModelGraph, *, batch_size: int, num_samples: float, units_per_host: int
) -> float:
    """Return what is not free for tables and weights in the memory of one unit.

    The worker, on the host or on its card, copies for checkpoints, which are on the host, a free share, and the
    activations in flight: at most those of a whole batch in all layers, with their gradients. A core also bears its
    part of what its host takes, in the smallest host that is sold.
    """
    activation_bytes = 2 * batch_size * sum(layer.output_bytes_per_sample for layer in graph.layers)
    is_cpu = device_type.kind is DeviceKind.CPU
    host_bytes = host_bytes_of_worker(num_samples) + min(graph.state_bytes, CHECKPOINT_BYTES)
    host_bytes += HOST_BYTES / units_per_host
    worker_bytes = host_bytes if is_cpu else CARD_BYTES
    return worker_bytes + activation_bytes + FREE_SHARE * device_type.memory_bytes
