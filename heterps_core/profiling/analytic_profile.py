"""Estimates the profile of a device type that is not at hand, by a roofline calibrated on one that is.

The measured machine gives each kind of layer its factor below the published peak. Work of a core beside moving bytes
takes as long on another core. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import DeviceKind, DeviceType
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.profiling.layer_profile import (
    LOCAL_DEVICE_TYPE,
    LayerProfile,
    LayerTiming,
    Link,
    MachineSpeed,
)
from heterps_core.profiling.timing import Timing
from heterps_core.units import MS_PER_S

_NUM_OPERATIONS: Mapping[LayerKind, Mapping[str, int]] = {
    # Product and bias at once; products for the gradients of input and weight, and the sum for the bias; the step
    # count and a fused optimizer.
    LayerKind.FULLY_CONNECTED: {"forward": 1, "backward": 3, "update": 2},
    LayerKind.ELEMENTWISE: {"forward": 1, "backward": 1, "update": 0},
    # Forward: row indices, room for the output, dense features, a gather and its copy. Backward: views alone. Update:
    # a copy, two concatenations, five to sum repeated rows, and eleven of row-wise Adagrad.
    LayerKind.EMBEDDING: {"forward": 5, "backward": 0, "update": 21},
    LayerKind.OTHER: {"forward": 2, "backward": 4, "update": 2},
}
"""Operations that a layer of a kind starts in each phase, views aside; each costs one launch.

All but the last are counted by a test. Layers of other kinds differ; theirs are assumed.
"""

_FULLY_CONNECTED_BACKWARD_PRODUCTS = 2
_ADAM_PASSES = 7
"""A fused Adam reads weight, gradient and two moments, and writes weight and moments."""

_CACHED_BYTES = 2 * 1024**2
"""Activations of a layer that a core's caches hold: its second-level cache and its share of the last one are 1.5 to
5 MB on the processors of `hardware.toml`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Work of a phase of a layer on a device."""

    flops: float
    num_bytes: float
    num_operations: int

    def limit_seconds(self, speed: MachineSpeed) -> float:
        """Return the roofline: the longer of computing and moving bytes at full speed, without launches."""
        return max(self.flops / speed.flops_per_s, self.num_bytes / speed.memory_bandwidth_bytes_per_s)

    def waits_for_memory(self, speed: MachineSpeed) -> bool:
        """Tell whether moving its bytes takes at least as long as computing."""
        return self.limit_seconds(speed) == self.num_bytes / speed.memory_bandwidth_bytes_per_s

    def launch_seconds(self, speed: MachineSpeed) -> float:
        """Return the time to start the operations."""
        return self.num_operations * speed.kernel_launch_seconds


def _layer_work(layer: Layer, *, batch_size: int) -> dict[str, _Work]:
    """Return the work of each phase, from the sizes in the graph.

    Bytes are those of tensors that are read or written once, as if nothing stayed in a cache. With input x,
    output y, parameters w, looked-up rows e and batch size B:

    - forward: B (x + y + e) + w
    - backward: B (2 x + 2 y + e) + 2 w (gradients of input and of parameters each read the output's gradient),
      and twice the forward's floating point operations; nothing for an embedding, which hands a view on
    - update: 7 w for a dense layer; 4 B e for an embedding (gradients in, rows in and out, summed in between)
    """
    moved = batch_size * (layer.input_bytes_per_sample + layer.output_bytes_per_sample)
    looked_up = batch_size * layer.looked_up_bytes_per_sample
    dense_bytes = 0 if layer.is_sharded else layer.parameter_bytes
    operations = _NUM_OPERATIONS[layer.kind]
    return {
        "forward": _Work(
            flops=batch_size * layer.forward_flops_per_sample,
            num_bytes=moved + looked_up + dense_bytes,
            num_operations=operations["forward"],
        ),
        "backward": _Work(
            flops=_backward_flops(layer, batch_size=batch_size),
            num_bytes=0 if layer.is_sharded else 2 * moved + looked_up + 2 * dense_bytes,
            num_operations=operations["backward"],
        ),
        "update": _Work(
            flops=0.0,
            num_bytes=4 * looked_up if layer.is_sharded else _ADAM_PASSES * dense_bytes,
            num_operations=operations["update"] if layer.is_sharded or dense_bytes else 0,
        ),
    }


def _backward_flops(layer: Layer, *, batch_size: int) -> float:
    if layer.backward_flops_per_sample is not None:
        return batch_size * layer.backward_flops_per_sample
    return _FULLY_CONNECTED_BACKWARD_PRODUCTS * batch_size * layer.forward_flops_per_sample


def _slowdowns(graph: ModelGraph, measured: LayerProfile) -> dict[tuple[LayerKind, str], float]:
    r"""Return by how much each kind of layer misses the roofline in each phase on the measured machine.

    :math:`c = \max(1, \sum_l (t_l - n_l \lambda) / \sum_l \max(f_l / F, b_l / M))` over the layers of a kind,
    with measured time t, n operations of launch time \lambda each, f floating point operations, b bytes, and the
    machine's own rates F and M. At least 1: a tensor that stays in a cache here may not stay there, and
    no device beats its published peak. 1 where a kind has no work in a phase.

    Raises:
        ConfigurationError: The machine's rates are not known.
    """
    speed = measured.machine_speed
    if speed is None:
        raise ConfigurationError(
            f"an estimate must be calibrated on a machine whose rates are known, but those of "
            f"{measured.device_type} are not; calibrate on another device type"
        )
    measured_seconds: dict[tuple[LayerKind, str], float] = {}
    limit_seconds: dict[tuple[LayerKind, str], float] = {}
    for layer, timing in zip(graph.layers, measured.timings, strict=True):
        if layer.uncounted:
            continue
        for phase, work in _layer_work(layer, batch_size=measured.batch_size).items():
            key = (layer.kind, phase)
            seconds = getattr(timing, phase).median_ms / MS_PER_S - work.launch_seconds(speed)
            measured_seconds[key] = measured_seconds.get(key, 0.0) + seconds
            limit_seconds[key] = limit_seconds.get(key, 0.0) + work.limit_seconds(speed)
    return {
        key: max(1.0, measured_seconds[key] / limit) if limit > 0 else 1.0
        for key, limit in limit_seconds.items()
    }


def estimate_profile(graph: ModelGraph, measured: LayerProfile, device_type: DeviceType) -> LayerProfile:
    r"""Estimate the times of all layers on one unit of a device type.

    :math:`t = n \lambda' + c \max(f / F', b / M')` for each layer and phase, with the device type's published
    launch time, peak rate F' and memory bandwidth M', and the kind's slowdown c from `_slowdowns`. Where both are
    CPUs and bytes take longer than operations here, :math:`t' = t - (n \lambda + b / M) + (n \lambda' +
    \max(f / F', b / M'))`, not less than the last term: a core sorts, hashes and waits for single rows as long
    whatever its memory carries. (With 16 % less bandwidth, which another process took, an embedding took 3 % more
    time and not 19: docs/LOG.md.) Alpha follows from the estimates at the two batch sizes as it does from
    measurements.

    A core reads rows and exchanges them in the time that it takes here, also beside a card: it sorts, copies and
    enters the kernel, which no published peak speaks of. Activations that its caches hold pass an elementwise layer
    between CPUs at the rate M here: at the share of a socket's memory, a ReLU of CTR-DNN would take 4 to 6 times its
    measured time on the very processor that measured it.

    A layer that holds uncounted work takes :math:`n \lambda' + (t - n \lambda) \max(F / F', M / M')`: the measured
    time, by whichever rate gains less.

    Ignored: copies between host and accelerator (PCIe) and the preparation of input, which training overlaps with
    computation; that the host's Python may start operations more slowly than the launch time says, and that some,
    such as sorting, are several kernels on an accelerator; caches; clocks that fall under load; that a kind may
    miss the roofline by another factor on other hardware, above all embeddings on accelerators, whose random
    reads a CPU's slowdown describes badly. Links have the measured latency of this machine's software and the
    device type's published bandwidth. The link of all-reduce errs on the slow side where several units share a host:
    a ring crosses the host's link once for all of them.

    Raises:
        ConfigurationError: The profile is of another model, or is itself an estimate.
    """
    if measured.is_estimated or measured.graph_fingerprint != graph.fingerprint():
        raise ConfigurationError(
            f"an estimate for {device_type.name} must be calibrated on a measured profile of {graph.name!r}, "
            f"got one of {measured.model!r} on {measured.device_type}; profile the model on this machine first"
        )
    speed = MachineSpeed.published(device_type, measured.precision)
    factors = _slowdowns(graph, measured)
    is_alike = device_type.kind is DeviceKind.CPU and measured.device_type == LOCAL_DEVICE_TYPE
    here = measured.machine_speed
    assert here is not None  # `_slowdowns` has refused it.
    network = Link(
        latency_seconds=measured.exchange_link.latency_seconds,
        bandwidth_bytes_per_s=device_type.tensor_bandwidth_bytes_per_s,
    )

    def estimated(timings: Sequence[LayerTiming], batch_size: int) -> tuple[LayerTiming, ...]:
        return tuple(
            _estimated(layer, timing, batch_size, (here, speed), factors, device_type, is_alike=is_alike)
            for layer, timing in zip(graph.layers, timings, strict=True)
        )

    return replace(
        measured,
        device_type=device_type.name,
        hardware=f"{device_type.name} (estimated; calibrated on {measured.hardware})",
        timings=estimated(measured.timings, measured.batch_size),
        half_batch_timings=estimated(measured.half_batch_timings, measured.half_batch_size),
        exchange_link=network,
        all_reduce_link=network,
        boundary_link=network,
        machine_speed=speed,
        sum_over_step=None,
        crowding=measured.crowding if device_type.kind is DeviceKind.CPU else 1.0,
    )


def _estimated(
    layer: Layer,
    timing: LayerTiming,
    batch_size: int,
    speeds: tuple[MachineSpeed, MachineSpeed],
    factors: Mapping[tuple[LayerKind, str], float],
    device_type: DeviceType,
    *,
    is_alike: bool,
) -> LayerTiming:
    """Estimate a layer; `speeds` are those of the measured machine and of the device type."""
    measured, speed = speeds
    if layer.uncounted:
        return _scaled(layer, timing, batch_size, measured, speed)
    here = measured if is_alike else None
    is_cached = batch_size * layer.output_bytes_per_sample <= _CACHED_BYTES
    if is_alike and is_cached and layer.kind is LayerKind.ELEMENTWISE:
        speed = replace(speed, memory_bandwidth_bytes_per_s=measured.memory_bandwidth_bytes_per_s)
    estimate: dict[str, Any] = {}
    shown = []
    for phase, work in _layer_work(layer, batch_size=batch_size).items():
        limit_seconds = work.limit_seconds(speed)
        if here is not None and work.waits_for_memory(here):
            measured_seconds = getattr(timing, phase).median_ms / MS_PER_S - work.launch_seconds(here)
            beside_seconds = max(measured_seconds - work.limit_seconds(here), 0.0)
            shown.append(f"{phase} and {MS_PER_S * beside_seconds:.3g} ms beside it")
        else:
            beside_seconds = (factors[layer.kind, phase] - 1.0) * limit_seconds
            shown.append(f"{phase} times {factors[layer.kind, phase]:.2f}")
        estimate[phase] = Timing.estimated(
            MS_PER_S * (work.launch_seconds(speed) + limit_seconds + beside_seconds),
            measured=getattr(timing, phase),
        )
    source = f"roofline of {device_type.name}'s published figures, as measured here: {', '.join(shown)}"
    return replace(timing, **estimate, is_estimated=True, source=source)


def _scaled(
    layer: Layer, timing: LayerTiming, batch_size: int, here: MachineSpeed, there: MachineSpeed
) -> LayerTiming:
    """Estimate a layer whose work was not counted: its measured time, by whichever rate of the two gains less."""
    factor = max(
        here.flops_per_s / there.flops_per_s,
        here.memory_bandwidth_bytes_per_s / there.memory_bandwidth_bytes_per_s,
    )
    estimate: dict[str, Any] = {}
    for phase, work in _layer_work(layer, batch_size=batch_size).items():
        seconds = getattr(timing, phase).median_ms / MS_PER_S - work.launch_seconds(here)
        estimate[phase] = Timing.estimated(
            MS_PER_S * (work.launch_seconds(there) + factor * max(seconds, 0.0)),
            measured=getattr(timing, phase),
        )
    source = f"{', '.join(layer.uncounted)} not counted: {factor:.3g} times the measured time"
    return replace(timing, **estimate, is_estimated=True, source=source)
