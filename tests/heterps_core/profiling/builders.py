"""A small graph and profiles of it with round numbers, for tests that need no clock."""

from __future__ import annotations

from datetime import UTC, datetime

from heterps_core.machine import software_versions, this_machine
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.profiling.layer_profile import (
    BoundaryCost,
    LayerProfile,
    LayerTiming,
    Link,
    MachineSpeed,
    SumCost,
)
from heterps_core.profiling.profile_cache import keep_profile, replica_path_name
from heterps_core.profiling.replica_path import ReplicaPath
from heterps_core.profiling.timing import Timing

BATCH_SIZE = 100

EMBEDDING = Layer(
    name="embedding",
    kind=LayerKind.EMBEDDING,
    is_sharded=True,
    parameter_bytes=8_000,
    optimizer_state_bytes=500,
    input_bytes_per_sample=20,
    output_bytes_per_sample=60,
    forward_flops_per_sample=0.0,
    looked_up_bytes_per_sample=40,
)
DENSE = Layer(
    name="fc",
    kind=LayerKind.FULLY_CONNECTED,
    is_sharded=False,
    parameter_bytes=1_000,
    optimizer_state_bytes=2_000,
    input_bytes_per_sample=60,
    output_bytes_per_sample=4,
    forward_flops_per_sample=500.0,
    looked_up_bytes_per_sample=0,
)
GRAPH = ModelGraph(name="small", layers=(EMBEDDING, DENSE))

SPEED = MachineSpeed(flops_per_s=1e6, memory_bandwidth_bytes_per_s=1e5, kernel_launch_seconds=0.001)
LINK = Link(latency_seconds=0.001, bandwidth_bytes_per_s=10_000.0)


def make_timing(
    layer: Layer, forward_ms: float, backward_ms: float, update_ms: float, *, exchanged_bytes: float = 0.0
) -> LayerTiming:
    """Return a timing without spread."""
    forward, backward, update = (
        Timing(median_ms=time_ms, low_ms=time_ms, high_ms=time_ms, num_repeats=5)
        for time_ms in (forward_ms, backward_ms, update_ms)
    )
    return LayerTiming(
        layer=layer.name,
        kind=layer.kind.value,
        is_sharded=layer.is_sharded,
        forward=forward,
        backward=backward,
        update=update,
        exchanged_bytes=exchanged_bytes,
        all_reduced_bytes=0.0 if layer.is_sharded else float(layer.parameter_bytes),
        is_estimated=False,
        source="written by hand",
    )


def make_profile(
    timings: tuple[LayerTiming, ...] = (
        make_timing(EMBEDDING, 300.0, 200.0, 500.0, exchanged_bytes=3_000.0),
        make_timing(DENSE, 1_000.0, 2_000.0, 400.0),
    ),
    half_batch_timings: tuple[LayerTiming, ...] = (
        make_timing(EMBEDDING, 160.0, 100.0, 260.0, exchanged_bytes=2_000.0),
        make_timing(DENSE, 500.0, 1_000.0, 400.0),
    ),
    graph: ModelGraph = GRAPH,
    device_type: str = "local-cpu",
) -> LayerProfile:
    """Return a measured profile of `GRAPH` for `BATCH_SIZE` and half of it."""
    return LayerProfile(
        model=graph.name,
        graph_fingerprint=graph.fingerprint(),
        device_type=device_type,
        hardware="a machine, 2 cores",
        hardware_fingerprint="0123",
        software={"torch": "2.13.0"},
        batch_size=BATCH_SIZE,
        half_batch_size=BATCH_SIZE // 2,
        num_threads=1,
        ids_source="written by hand",
        timings=timings,
        half_batch_timings=half_batch_timings,
        exchange_link=LINK,
        all_reduce_link=LINK,
        boundary_link=LINK,
        network_boundary=BoundaryCost(microbatch_seconds=0.004, byte_seconds=2e-6),
        memory_boundary=BoundaryCost(microbatch_seconds=0.002, byte_seconds=1e-6),
        network_sum=SumCost(peer_seconds=0.003, byte_seconds=3e-6),
        memory_sum=SumCost(peer_seconds=0.001, byte_seconds=1e-6),
        machine_speed=SPEED,
        sum_over_step=0.95,
        measured_at="2026-07-01T00:00:00+00:00",
    )


def keep_replica_path(folder, *, measured_at="", relative_error=0.1):
    """Keep the law of an exchange of rows for this machine, measured now by default, and return it."""
    path = ReplicaPath(
        message_seconds=2e-4,
        peer_seconds=5e-5,
        table_seconds=4e-4,
        byte_seconds=6e-10,
        relative_error=relative_error,
        measured_at=measured_at or datetime.now(UTC).isoformat(),
    )
    keep_profile(folder / replica_path_name(this_machine().fingerprint(), software_versions()), path)
    return path
