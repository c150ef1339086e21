"""A PipeDream graph file as a chain with a profile of the one device type that it was measured on.

The file holds times, activations and parameters, but not the products of a layer, the batch size or the optimizer's
update. Products follow from the printed modules, so that the roofline can be calibrated for other device types; the
batch size follows from the activation of any Linear or LSTM; the update, and the times at half the batch, from
which alpha comes, are estimated with the device type's published figures.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterps_core.errors import ConfigurationError, DataError
from heterps_core.hardware import DeviceType
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.profiling.imported.chain_cuts import Block, cut_into_blocks
from heterps_core.profiling.imported.imported_model import OPTIMIZER_VALUES_PER_PARAMETER, ImportedModel
from heterps_core.profiling.imported.pipedream_graph import OperationGraph, OperationNode, read_graph
from heterps_core.profiling.imported.rescaling import rescaled
from heterps_core.profiling.profiles.analytic_profile import layer_work
from heterps_core.profiling.profiles.layer_profile import LayerProfile, LayerTiming, Link, MachineSpeed
from heterps_core.profiling.timing import Timing
from heterps_core.units import BYTES_PER_FLOAT32, MS_PER_S

DEFAULT_DEVICE_TYPE = "gpu-v100"
"""The files name no device. The paper's profiles come from V100 (Narayanan et al. 2019, section 5.1)."""

_CONVOLUTION = re.compile(r"Conv2d\((\d+), \d+, kernel_size=\((\d+), (\d+)\)")
_GROUPS = re.compile(r"groups=(\d+)")
_LINEAR = re.compile(r"Linear\(in_features=(\d+), out_features=(\d+)")
_LSTM = re.compile(r"LSTM\(\d+, (\d+)")


def read_pipedream(path: Path, device_type: DeviceType, *, batch_size: int | None) -> ImportedModel:
    """Read a graph file as measured on a device type.

    Args:
        path: The file; its name up to the first dot becomes the model's.
        device_type: What the times were measured on.
        batch_size: Samples of the profiled mini-batch, B_o; None to take what the activations imply.

    Raises:
        DataError: The file breaks the format, or the graph has a cycle or falls apart.
        ConfigurationError: The batch size contradicts the activations, or cannot be told from them.
    """
    operations = read_graph(path)
    try:
        blocks = cut_into_blocks(list(operations.nodes), operations.edges)
    except ConfigurationError as error:
        raise DataError(path, str(error)) from error
    batch_size = _batch_size(path, operations, batch_size)
    parts = [[operations.nodes[name] for name in block.nodes] for block in blocks]
    graph = ModelGraph(
        name=path.name.partition(".")[0], layers=_layers(operations, blocks, parts, batch_size)
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    provenance = f"{path.name} (PipeDream graph file, sha256 {digest}), as measured on {device_type.name}"
    profile = _profile(graph, parts, device_type, batch_size, provenance, digest)
    return ImportedModel(graph=graph, profiles={device_type.name: profile}, provenance=provenance)


def _batch_size(path: Path, operations: OperationGraph, given: int | None) -> int:
    implied = {
        size: node for node in operations.nodes.values() if (size := implied_batch_size(node)) is not None
    }
    if given is None and len(implied) != 1:
        found = ", ".join(f"{size:g} by {node.name}" for size, node in implied.items()) or "by no layer"
        raise ConfigurationError(
            f"{path}: the batch size must follow from the activations, but is given {found}; "
            f"say it with --profile-batch-size"
        )
    if given is None:
        (given_by_file,) = implied
        given = int(given_by_file)
    for size, node in implied.items():
        if size != given:
            raise ConfigurationError(
                f"{path}: the batch size must be that of the file, {size:g} by the activation of {node.name} "
                f"({node.text}), got {given}; leave it away"
            )
    if given < 2:
        raise ConfigurationError(f"{path}: the profiled batch must have at least 2 samples, got {given}")
    return given


def implied_batch_size(node: OperationNode) -> float | None:
    """Return the samples of the mini-batch, where an operation's output tells them; None for others.

    A Linear leaves out_features floats for each sample; the second tensor of an LSTM is its state, of one step.

    Example:
        >>> implied_batch_size(OperationNode(name="node41", text="Linear(in_features=4096, out_features=1000, "
        ...     "bias=True)", forward_ms=0, backward_ms=0, activation_bytes=(512_000.0,), parameter_bytes=0))
        128.0
    """
    linear, lstm = _LINEAR.match(node.text), _LSTM.match(node.text)
    if linear:
        return node.activation_bytes[0] / BYTES_PER_FLOAT32 / int(linear[2])
    if lstm and len(node.activation_bytes) > 1:
        return node.activation_bytes[1] / BYTES_PER_FLOAT32 / int(lstm[1])
    return None


def forward_flops(node: OperationNode) -> float:
    """Return the floating point operations of an operation's products for the whole mini-batch.

    Twice the inputs of each output value: input channels over groups times the kernel for a convolution, input
    features for a Linear. An LSTM, or a module with one, uses each parameter once a step. 0 where nothing is printed
    that has products.
    """
    num_outputs = node.activation_bytes[0] / BYTES_PER_FLOAT32
    if convolution := _CONVOLUTION.match(node.text):
        channels, height, width = (int(size) for size in convolution.groups())
        groups = _GROUPS.search(node.text)
        return 2 * num_outputs * channels * height * width / (int(groups[1]) if groups else 1)
    if lstm := _LSTM.search(node.text):
        return 2 * node.parameter_bytes / BYTES_PER_FLOAT32 * num_outputs / int(lstm[1])
    if linear := _LINEAR.search(node.text):
        return 2 * num_outputs * int(linear[1])
    return 0.0


def _layers(
    operations: OperationGraph,
    blocks: Sequence[Block],
    parts: Sequence[Sequence[OperationNode]],
    batch_size: int,
) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for block, nodes in zip(blocks, parts, strict=True):
        leaving = operations.nodes[block.leaving]
        parameter_bytes = round(sum(node.parameter_bytes for node in nodes))
        output_bytes = round(sum(leaving.activation_bytes) / batch_size)
        kind = _kind(nodes)
        layers.append(
            Layer(
                name=_name(nodes, leaving),
                kind=kind,
                # Each replica holds a whole table and all-reduces its whole gradient there, as any other layer.
                is_sharded=False,
                parameter_bytes=parameter_bytes,
                optimizer_state_bytes=OPTIMIZER_VALUES_PER_PARAMETER * parameter_bytes,
                input_bytes_per_sample=layers[-1].output_bytes_per_sample if layers else 0,
                output_bytes_per_sample=output_bytes,
                forward_flops_per_sample=sum(map(forward_flops, nodes)) / batch_size,
                looked_up_bytes_per_sample=output_bytes if kind is LayerKind.EMBEDDING else 0,
            )
        )
    return tuple(layers)


def _name(nodes: Sequence[OperationNode], leaving: OperationNode) -> str:
    if len(nodes) == 1:
        return f"{leaving.name} {leaving.operator}"
    if nodes[0] is leaving:
        return f"{leaving.name} {leaving.operator} ({len(nodes)} operations)"
    return f"{nodes[0].name}..{leaving.name} ({len(nodes)} operations)"


def _kind(nodes: Sequence[OperationNode]) -> LayerKind:
    heavy = max(nodes, key=lambda node: node.forward_ms + node.backward_ms)
    num_convolutions = sum(node.operator == "Conv2d" for node in nodes)
    if num_convolutions:
        return LayerKind.CONVOLUTION if num_convolutions == 1 else LayerKind.CONVOLUTION_BLOCK
    if heavy.operator == "Embedding":
        return LayerKind.EMBEDDING
    if _LINEAR.search(heavy.text) and not _LSTM.search(heavy.text):
        return LayerKind.FULLY_CONNECTED
    return LayerKind.OTHER if any(node.parameter_bytes for node in nodes) else LayerKind.ELEMENTWISE


def _profile(
    graph: ModelGraph,
    parts: Sequence[Sequence[OperationNode]],
    device_type: DeviceType,
    batch_size: int,
    provenance: str,
    digest: str,
) -> LayerProfile:
    speed = MachineSpeed.published(device_type)
    network = Link(latency_seconds=0.0, bandwidth_bytes_per_s=device_type.network_bandwidth_bytes_per_s)
    measured = [
        _MeasuredLayer(
            layer=layer,
            forward_ms=sum(node.forward_ms for node in nodes),
            backward_ms=sum(node.backward_ms for node in nodes),
        )
        for layer, nodes in zip(graph.layers, parts, strict=True)
    ]
    half_batch_size = batch_size // 2
    return LayerProfile(
        model=graph.name,
        graph_fingerprint=graph.fingerprint(),
        device_type=device_type.name,
        hardware=provenance,
        hardware_fingerprint=digest,
        software={},
        batch_size=batch_size,
        half_batch_size=half_batch_size,
        num_threads=1,
        ids_source=provenance,
        timings=tuple(layer.timing(batch_size, speed, provenance) for layer in measured),
        half_batch_timings=tuple(
            layer.half_batch_timing(batch_size, half_batch_size, speed) for layer in measured
        ),
        exchange_link=network,
        all_reduce_link=network,
        boundary_link=network,
        busy_message_seconds=0.0,
        machine_speed=speed,
        sum_over_step=None,
        measured_at="",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeasuredLayer:
    layer: Layer
    forward_ms: float
    backward_ms: float

    def timing(self, batch_size: int, speed: MachineSpeed, provenance: str) -> LayerTiming:
        return self._timing(
            Timing.from_repeats([self.forward_ms]),
            Timing.from_repeats([self.backward_ms]),
            self._update(batch_size, speed),
            is_estimated=False,
            source=f"{provenance}; the update is a roofline of published figures",
        )

    def half_batch_timing(self, batch_size: int, half_batch_size: int, speed: MachineSpeed) -> LayerTiming:
        """Shrink the measured times as the roofline shrinks: launches stay, and so does what reads parameters."""
        whole = layer_work(self.layer, batch_size=batch_size)
        half = layer_work(self.layer, batch_size=half_batch_size)
        forward, backward = (
            rescaled(Timing.estimated(time_ms), whole[phase], speed, new_work=half[phase], new_speed=speed)
            for phase, time_ms in (("forward", self.forward_ms), ("backward", self.backward_ms))
        )
        return self._timing(
            forward,
            backward,
            self._update(half_batch_size, speed),
            is_estimated=True,
            source="the whole batch's times, shrunk as the roofline of published figures shrinks",
        )

    def _update(self, batch_size: int, speed: MachineSpeed) -> Timing:
        work = layer_work(self.layer, batch_size=batch_size)["update"]
        return Timing.estimated(MS_PER_S * (work.launch_seconds(speed) + work.limit_seconds(speed)))

    def _timing(
        self, forward: Timing, backward: Timing, update: Timing, *, is_estimated: bool, source: str
    ) -> LayerTiming:
        return LayerTiming(
            layer=self.layer.name,
            kind=self.layer.kind.value,
            is_sharded=self.layer.is_sharded,
            forward=forward,
            backward=backward,
            update=update,
            exchanged_bytes=0.0,
            all_reduced_bytes=float(self.layer.parameter_bytes),
            is_estimated=is_estimated,
            source=source,
        )
