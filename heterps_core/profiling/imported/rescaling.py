"""Estimates from times that were measured on an accelerator: for half the batch, and for other device types.

`analytic_profile` shares one slowdown among all layers of a kind, and never lets it fall below 1, because it goes
from a CPU to a GPU, where a layer's own distance from the peak says little. These times come from an accelerator. How
far a layer is from the peak there, for its shape or its library, holds on others too; and it may be beyond the peak,
since libraries compute convolutions with fewer products than are counted (Lavin and Gray, Fast Algorithms for
Convolutional Neural Networks, 2016). So each layer keeps its own ratio to the roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import DeviceType
from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling.profiles.analytic_profile import Work, layer_work
from heterps_core.profiling.profiles.layer_profile import LayerProfile, LayerTiming, Link, MachineSpeed
from heterps_core.profiling.timing import Timing
from heterps_core.units import MS_PER_S


def rescaled(
    time: Timing, work: Work, speed: MachineSpeed, *, new_work: Work, new_speed: MachineSpeed
) -> Timing:
    r"""Return the time of other work at another speed: launches scale like launches, the rest like the roofline.

    :math:`t' = \min(t, l) l'/l + \max(t - l, 0) r'/r` with the time l of all launches and the roofline r. A part
    without a limit to compare with stays as it is.

    Args:
        time: Measured.
        work: What was measured, at `speed`.
        new_work: What is asked for, at `new_speed`.
    """
    launch_ms = MS_PER_S * work.launch_seconds(speed)
    launch_ratio = _ratio(new_work.launch_seconds(new_speed), work.launch_seconds(speed))
    limit_ratio = _ratio(new_work.limit_seconds(new_speed), work.limit_seconds(speed))
    return Timing.estimated(
        min(time.median_ms, launch_ms) * launch_ratio + max(time.median_ms - launch_ms, 0.0) * limit_ratio
    )


def estimate_each_layer(graph: ModelGraph, measured: LayerProfile, device_type: DeviceType) -> LayerProfile:
    """Estimate the times on one unit of a device type, layer by layer.

    All links, the all-reduce's too, have the device type's published network: nobody measured a loopback.

    Raises:
        ConfigurationError: The rates of the measured machine are not known.
    """
    speed = measured.machine_speed
    if speed is None:
        raise ConfigurationError(
            f"an estimate must be calibrated on a machine whose rates are known, but those of "
            f"{measured.device_type} are not; calibrate on another device type"
        )
    network = Link(latency_seconds=0.0, bandwidth_bytes_per_s=device_type.network_bandwidth_bytes_per_s)

    def estimated(timings: Sequence[LayerTiming], batch_size: int) -> tuple[LayerTiming, ...]:
        return tuple(
            _on_device_type(timing, layer_work(layer, batch_size=batch_size), speed, device_type)
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
        machine_speed=MachineSpeed.published(device_type),
    )


def _on_device_type(
    timing: LayerTiming, works: dict[str, Work], speed: MachineSpeed, device_type: DeviceType
) -> LayerTiming:
    new_speed = MachineSpeed.published(device_type)
    forward, backward, update = (
        rescaled(time, works[phase], speed, new_work=works[phase], new_speed=new_speed)
        for phase, time in (
            ("forward", timing.forward),
            ("backward", timing.backward),
            ("update", timing.update),
        )
    )
    return replace(
        timing,
        forward=forward,
        backward=backward,
        update=update,
        is_estimated=True,
        source=f"the layer's ratio to the roofline, times the roofline of {device_type.name}'s published figures",
    )


def _ratio(new: float, old: float) -> float:
    return new / old if old > 0 else 1.0
