"""A model as the planner sees it: a chain of layers with sizes and work, but no tensors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import StrEnum

from heterps_core.errors import ConfigurationError
from heterps_core.json_codec import JsonDocument, JsonForm


class LayerKind(StrEnum):
    """What a layer mostly does; estimates are calibrated per kind."""

    EMBEDDING = "embedding"
    FULLY_CONNECTED = "fully_connected"
    ELEMENTWISE = "elementwise"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer of the chain."""

    name: str
    kind: LayerKind

    is_sharded: bool
    """Rows of its state are divided among the replicas of its stage; otherwise each replica holds all of it."""

    parameter_bytes: int
    optimizer_state_bytes: int

    input_bytes_per_sample: int
    """Activation that enters, in float32, plus the row indices that an embedding reads."""

    output_bytes_per_sample: int
    """Activation that leaves, in float32; what crosses a boundary behind this layer."""

    forward_flops_per_sample: float
    """Of matrix products alone; the backward pass takes twice as many."""

    looked_up_bytes_per_sample: int
    """Rows that an embedding reads for one sample; 0 for other kinds."""

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
