"""From profiles and prices to a planning problem: seconds, bytes and parallel fractions as the contract wants them.

The contract has one alpha and one beta for a device type and no latency, so what a profile knows is condensed
here, and each docstring says what is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import DeviceKind, DeviceType
from heterps_core.models.model_graph import Layer, ModelGraph
from heterps_core.planning.problem.extra_costs import (
    NO_EXTRA_COSTS,
    ExtraCosts,
    InstanceSize,
    Reserved,
)
from heterps_core.planning.problem.scheduling_problem import (
    LayerCosts,
    SchedulingProblem,
    StepModel,
    UnitType,
    is_cpu,
)
from heterps_core.profiling.layer_profile import NO_COST, NO_SUM_COST, LayerProfile, LayerTiming
from heterps_core.units import MS_PER_S

ROUND_TRIP_MESSAGES = 4
"""Messages of an embedding for one batch: counts, row indices and rows on the way forward, gradients back."""

_EXCHANGED_BYTES = {"float32": 8 + 2 * 64, "bfloat16": 8 + 2 * 32}
"""By the name of a wire dtype, for a row of 16 numbers: its index, the row and its gradient."""

ESTIMATE_RELATIVE_ERROR = 0.5
"""Assumed error of an estimated time, as a share of it. Models that extrapolate measurements from one GPU to another
are off by 12 % on average (Yu et al., Habitat, USENIX ATC 2021); published peaks calibrated on another machine must
be expected to do several times worse. Estimated by its own data sheet, a processor takes 0.92 to 1.14 times its
measured time for CTR-DNN and DCN v2 in float32, and 1.10 to 1.42 times in bfloat16 (embeddings 1.8 to 2.3, dense
layers 0.9 to 1.4; micro-batches of 512 and 1,024, 2 x86 cores, AMD EPYC of family 26, load 8, 2026-11-26)."""

BUSY_RELATIVE_ERROR = 0.2
"""Error of times that were measured on a busy machine, whose other processes take the caches: at a load of 8 to 18
predicted steps took 0.93 to 1.03 times the measured processor time in four models, and 0.81 and 1.23 times in the two
of less than 4 ms (2 x86 cores, AMD EPYC, 2026-11-26)."""

CACHE_BYTES = 32 * 1024**2
"""The last cache of the machine that `BEYOND_CACHES` was measured on."""

BEYOND_CACHES = 1.5
"""An embedding with tables of 1.3 GB over one with tables of 6.8 MB: 1.34 to 1.65 in six pairs, 1,024 samples of 26
ids by Zipf's law, on a core of an AMD EPYC (docs/log/2026-11.md)."""


def unit_type(
    graph: ModelGraph,
    profile: LayerProfile,
    device_type: DeviceType,
    *,
    batch_size: int,
    price_usd_per_hour: float,
    max_units: int,
    machine_units: int = 1,
    instances: tuple[InstanceSize, ...] = (),
    on_demand_instances: tuple[InstanceSize, ...] | None = None,
    interruptions_per_hour: float = 0.0,
    reserved: Reserved | None = None,
    reserved_bytes: float = 0.0,
    step_model: StepModel = StepModel.PAPERS,
    wire_dtype: str = "float32",
    decoded_share: float = 0.0,
) -> UnitType:
    """Return a device type as the planner sees it, with its published memory and network, which is not measured.

    Alpha is that of the whole chain, from its times at two batch sizes. Beta is that of all in-stage communication
    together with one boundary of average width, because the papers' step applies it to both: a stage of embeddings
    scales better than its beta says, a stage of dense layers worse. The trainer's step applies it to the exchange
    alone.
    """
    inner_cuts = [_crossing_bytes_per_sample(layer, wire_dtype=wire_dtype) for layer in graph.layers[:-1]]
    mean_boundary_bytes = sum(inner_cuts) / len(inner_cuts) if inner_cuts else 0.0
    if step_model is StepModel.TRAINER:
        beta = profile.exchange_parallel_fraction
    else:
        beta = profile.communication_parallel_fraction(
            batch_size=batch_size, boundary_bytes_per_sample=mean_boundary_bytes
        )
    is_trainers = step_model is StepModel.TRAINER
    # Beside a card the cores of its host send and receive.
    has_workers = is_trainers and is_cpu(device_type.name)
    boundary = profile.network_boundary if has_workers else NO_COST
    gradient_sum = profile.network_sum if has_workers else NO_SUM_COST
    return UnitType(
        price_usd_per_hour=price_usd_per_hour,
        max_units=max_units,
        machine_units=machine_units,
        instances=instances,
        on_demand_instances=on_demand_instances,
        interruptions_per_hour=interruptions_per_hour,
        reserved=reserved,
        memory_bytes=device_type.memory_bytes,
        reserved_bytes=reserved_bytes,
        # The contract charges both directions to one bandwidth, and a link carries both at once.
        bandwidth_bytes_per_s=2 * device_type.tensor_bandwidth_bytes_per_s,
        communication_relative_spread=ESTIMATE_RELATIVE_ERROR,
        times_from=profile.origin,
        compute_parallel_fraction=profile.compute_parallel_fraction(
            batch_size=batch_size,
            decoded_share=decoded_share if device_type.kind is DeviceKind.CPU else None,
        ),
        communication_parallel_fraction=beta,
        **(profile.replica_path.exchange_seconds() if is_trainers else {}),
        sum_seconds_per_peer=gradient_sum.peer_seconds,
        sum_seconds_per_byte=gradient_sum.byte_seconds,
        boundary_seconds=boundary.microbatch_seconds,
        boundary_seconds_per_byte=boundary.byte_seconds,
        later_reading_seconds=has_workers * profile.reading.batch_ms / MS_PER_S,
        later_reading_seconds_per_sample=has_workers * profile.reading.row_ms / MS_PER_S,
    )


def build_problem(
    graph: ModelGraph,
    profiles: Mapping[str, LayerProfile],
    device_types: Mapping[str, UnitType],
    *,
    batch_size: int,
    num_samples: float,
    num_epochs: float,
    throughput_floor_samples_per_s: float,
    extra_costs: ExtraCosts = NO_EXTRA_COSTS,
    step_model: StepModel = StepModel.PAPERS,
    drains: bool = False,
    pause_share: float = 0.0,
    wire_dtype: str = "float32",
    decoded_share: float = 0.0,
) -> SchedulingProblem:
    """Build the planning problem of a model.

    The first layer's stage reads the rows: a CPU's cores beside what they compute, and a core of the host beside what
    a card computes.

    Args:
        profiles: Device type -> profile; all of the same batch size, which becomes B_o.
        device_types: By name, in the order of the problem; each needs a profile (`unit_type`).
        pause_share: What pauses add to the time of all steps.
        wire_dtype: Name in `WIRE_DTYPES`: in what activations cross between stages, and rows between replicas.
        decoded_share: Share of the rows whose row groups are not in memory (`PreparedDataset.decoded_share`).

    Raises:
        ConfigurationError: Profiles are missing, are of another model, or have different batch sizes.
        MalformedDocumentError: A number breaks the contract.
    """
    profile_batch_size = _check_profiles(graph, profiles, device_types)
    first = next(iter(device_types))
    reading_seconds = {
        name: profiles[name].reading.seconds(
            profile_batch_size,
            num_batches=profiles[name].update_share(batch_size),
            decoded_share=decoded_share,
        )
        for name in device_types
    }
    if batch_size < 1:
        raise ConfigurationError(f"batch_size must be at least 1, got {batch_size}")
    return SchedulingProblem(
        model=graph.name,
        batch_size=batch_size,
        profile_batch_size=profile_batch_size,
        num_samples=num_samples,
        num_epochs=num_epochs,
        throughput_floor_samples_per_s=throughput_floor_samples_per_s,
        layers=tuple(
            LayerCosts(
                name=layer.name,
                kind=layer.kind.value,
                is_sharded=layer.is_sharded,
                state_bytes=layer.state_bytes,
                output_bytes_per_sample=_crossing_bytes_per_sample(layer, wire_dtype=wire_dtype),
                compute_seconds={
                    name: profiles[name].compute_seconds(index, batch_size=batch_size)
                    + (reading_seconds[name] if is_cpu(name) and index == 0 else 0.0)
                    for name in device_types
                },
                reading_seconds={
                    name: seconds
                    for name, seconds in reading_seconds.items()
                    if index == 0 and not is_cpu(name) and step_model is StepModel.TRAINER
                },
                communication_seconds={
                    name: in_stage_seconds(
                        profiles[name],
                        index,
                        batch_size=batch_size,
                        wire_dtype=wire_dtype,
                        # By the trainer's step they take the processor's time.
                        num_messages=0 if step_model is StepModel.TRAINER else ROUND_TRIP_MESSAGES,
                    )
                    for name in device_types
                },
                exchanged_bytes=_exchanged_bytes(profiles[first].timings[index], wire_dtype)
                if step_model is StepModel.TRAINER
                else 0.0,
                compute_relative_spread={
                    name: compute_relative_spread(profiles[name], index, batch_size=batch_size)
                    for name in device_types
                },
            )
            for index, layer in enumerate(graph.layers)
        ),
        device_types=device_types,
        extra_costs=extra_costs,
        single_replica_communicates=False,
        step_model=step_model,
        drains=drains,
        pause_share=pause_share,
    )


def _crossing_bytes_per_sample(layer: Layer, *, wire_dtype: str) -> int:
    """Return the bytes that cross a boundary after a layer; a graph has them in float32."""
    return layer.output_bytes_per_sample // (1 if wire_dtype == "float32" else 2)


def _exchanged_share(wire_dtype: str) -> float:
    """Return the bytes that replicas exchange for a row of 16 numbers, as a share of what float32 takes.

    Narrower rows have a larger share.

    Example:
        >>> round(_exchanged_share("bfloat16"), 3)
        0.529
    """
    return _EXCHANGED_BYTES[wire_dtype] / _EXCHANGED_BYTES["float32"]


def _exchanged_bytes(timing: LayerTiming, wire_dtype: str) -> float:
    """Return the bytes of rows, or of dense gradients, that replicas exchange for a layer."""
    return _exchanged_share(wire_dtype) * timing.exchanged_bytes + timing.all_reduced_bytes


def profiles_for_larger_tables(
    profiles: Mapping[str, LayerProfile], *, measured: ModelGraph, planned: ModelGraph
) -> dict[str, LayerProfile]:
    """Take profiles of a model for the same model with other table sizes.

    A dry run trains with tables that fit this machine; the job that it stands for has larger ones. Where caches held
    the measured ones and cannot hold the planned ones, embeddings on CPUs take `BEYOND_CACHES` times as long.

    Raises:
        ConfigurationError: The models differ in more than the rows of their tables.
    """
    if measured.without_table_sizes().layers != planned.without_table_sizes().layers:
        raise ConfigurationError(
            f"a profile may be used for the same model with other table sizes only, but the layers of "
            f"{measured.name!r} and {planned.name!r} differ; profile the model again"
        )
    measured_bytes, planned_bytes = (
        sum(layer.parameter_bytes for layer in graph.layers if layer.is_sharded)
        for graph in (measured, planned)
    )
    outgrows_caches = measured_bytes <= CACHE_BYTES < planned_bytes
    fingerprint = planned.fingerprint()
    found = {}
    for name, profile in profiles.items():
        factor = BEYOND_CACHES if outgrows_caches and is_cpu(name) else 1.0
        found[name] = replace(
            profile,
            graph_fingerprint=fingerprint,
            timings=tuple(_slower(timing, factor) for timing in profile.timings),
            half_batch_timings=tuple(_slower(timing, factor) for timing in profile.half_batch_timings),
        )
    return found


def _slower(timing: LayerTiming, factor: float) -> LayerTiming:
    return timing.scaled(factor) if timing.is_sharded else timing


def in_stage_seconds(
    profile: LayerProfile,
    layer: int,
    *,
    batch_size: int,
    wire_dtype: str = "float32",
    num_messages: int = ROUND_TRIP_MESSAGES,
) -> float:
    """Return a layer's share of ODT: in-stage communication of B_o samples in the limit of many replicas.

    An embedding exchanges its distinct rows: row indices out, rows in, gradients out, in four messages. A dense
    layer all-reduces its gradients, 2 |W| bytes over a ring, once a training batch, of which B_o of B samples
    bear B_o / B. Among k replicas only (k - 1) / k of either crosses a link, so this errs on the slow side:
    two-fold for two replicas. One replica takes none of it (`single_replica_communicates`).
    """
    timing = profile.timings[layer]
    if timing.is_sharded:
        exchanged_bytes = _exchanged_share(wire_dtype) * timing.exchanged_bytes
        return profile.exchange_link.seconds(exchanged_bytes, num_messages=num_messages)
    return profile.update_share(batch_size) * profile.all_reduce_seconds(layer)


def compute_relative_spread(profile: LayerProfile, layer: int, *, batch_size: int) -> float:
    """Return how far a layer's compute seconds may be off, as a share of them.

    Measured: half of what lies between the tenth and the ninetieth percentile of the repeats, as if forward, backward
    and update were slow together. An estimate and a busy machine add errors of their own, independent of it.
    """
    timing = profile.timings[layer]
    compute_ms = timing.compute_ms(update_share=profile.update_share(batch_size))
    return math.hypot(
        timing.spread_ms / 2 / compute_ms if compute_ms > 0 else 0.0,
        ESTIMATE_RELATIVE_ERROR if timing.is_estimated else 0.0,
        BUSY_RELATIVE_ERROR if profile.was_busy else 0.0,
    )


def _check_profiles(
    graph: ModelGraph, profiles: Mapping[str, LayerProfile], device_types: Mapping[str, UnitType]
) -> int:
    """Return the batch size that all profiles share."""
    if not device_types:
        raise ConfigurationError("a problem needs at least one device type, got none")
    missing = [name for name in device_types if name not in profiles]
    if missing:
        raise ConfigurationError(
            f"every device type needs a profile, but {', '.join(missing)} has none; "
            f"there are profiles for: {', '.join(profiles)}"
        )
    for name in device_types:
        if profiles[name].graph_fingerprint != graph.fingerprint():
            raise ConfigurationError(
                f"the profile for {name} must be of the model {graph.name!r} as it is now, but was made of "
                f"{profiles[name].model!r} with other sizes; profile it again"
            )
    sizes = {name: profiles[name].batch_size for name in device_types}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigurationError(f"all profiles must have the same batch size, got: {shown}")
    return next(iter(sizes.values()))
