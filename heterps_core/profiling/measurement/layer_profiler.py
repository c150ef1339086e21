"""Measures a model on a core or the CUDA device: each layer's forward, backward and update, at two batch sizes.

The times of layers alone are scaled to those of the trainer's step, where layers are fused and a thread reads the
next batches. On one core all are in processor time, which other processes hardly lengthen; by how much a worker on
another core does, by its use of memory and the last cache, is measured too. Run as a program by `measuring_process`,
on a folder with `request.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from heterps_core.compute_device import CPU, card_text, clock_of, require_cuda
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.machine import software_versions, this_machine
from heterps_core.models.chain import build_chain
from heterps_core.models.model_graph import ModelGraph
from heterps_core.models.slot_embedding import SlotEmbedding, share_sequences
from heterps_core.models.tracing import BYTES_PER_ROW_NUMBER, trace_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.layer_profile import (
    LOCAL_DEVICE_TYPE,
    LOCAL_GPU_DEVICE_TYPE,
    LayerProfile,
    LayerTiming,
    RowReading,
)
from heterps_core.profiling.measurement.link_measurement import measure_links
from heterps_core.profiling.measurement.machine_speed import measure_machine_speed
from heterps_core.profiling.measurement.neighbour import Neighbour, neighbour_process
from heterps_core.profiling.measurement.profiling_input import (
    click_batches,
    decoded_row_ms,
    with_fewer_rows,
)
from heterps_core.profiling.measurement.timed_layers import WorkerSteps, layer_phases, training_config
from heterps_core.profiling.measuring_process import REQUEST_NAME, RESULT_NAME, ProfileRequest
from heterps_core.profiling.timing import Timing, time_phases
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.pipeline.stage_layers import general_layers
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.replica_batches import BATCHES_AHEAD
from heterps_core.units import BYTES_PER_FLOAT32, MS_PER_S

_MACHINE_SPEED_BUDGET_S = 0.2

_NUM_TURNS = 3
"""Turns in which a worker trains alone and beside another one."""

PROFILED_TABLE_BYTES = 384 * 1024**2
"""Most bytes of tables, with optimizer state, that are made to be measured: a look-up waits for memory, not for the
size of the table. Almost four times the largest last cache of the CPU types that are sold (105 MB), so that rows miss
the caches as those of larger tables do. The same look-ups over 2 GB took 8 % longer than over 0.5 GB (more misses of
page translations), over 0.2 GB 4 % less (2 shared AMD cores, 32 MiB last cache, 2026-11-26)."""

_NEIGHBOUR_TABLE_BYTES = 32 * 1024**2
"""Most bytes of tables of the worker beside: those of the last cache, and little memory."""

_LEAST_PROFILED_ROWS = 1_024
"""Least rows of each column: a model whose own tables are larger than the bound is measured with these."""


def trace_model(request: ProfileRequest) -> ModelGraph:
    """Return the graph of the model that a request names.

    Raises:
        UnknownNameError, ConfigurationError: The model or an optimizer cannot be used; see `build_chain`.
    """
    return _trace(request, build_chain(request.model, request.features, seed=request.seed))


def measure(requests: Sequence[ProfileRequest]) -> list[LayerProfile]:
    """Measure a model in this process, whose number of threads it changes; requests differ in batch size alone.

    On a CUDA device the clock waits for all work that was begun. Its links are the host's too: rows to other machines
    and other stages go through the host's memory.
    """
    first = requests[0]
    device = CPU
    if first.device == "cuda":
        require_cuda()
        device = torch.device("cuda", 0)
    torch.set_num_threads(first.num_threads)
    torch.manual_seed(first.seed)
    with tempfile.TemporaryDirectory(prefix="heterps-link-") as folder:
        store = Path(folder) / "store"
        with neighbour_process(partial(_second_worker, first, store)) as neighbour:
            graph = trace_model(first)
            features = _bounded_features(first, PROFILED_TABLE_BYTES)
            model = _trained_model(first, features, device)
            links = measure_links(store, rank=0)
            times = [_times(request, graph, model, features, neighbour) for request in requests]
    # Now that the second process has given its memory back: the large copies take 140 MB.
    speed = measure_machine_speed(budget_s=_MACHINE_SPEED_BUDGET_S, device=device, precision=first.precision)
    hardware, hardware_fingerprint, software = _described(device)
    return [
        LayerProfile(
            model=request.model,
            graph_fingerprint=graph.fingerprint(),
            device_type=LOCAL_DEVICE_TYPE if device == CPU else LOCAL_GPU_DEVICE_TYPE,
            hardware=hardware,
            hardware_fingerprint=hardware_fingerprint,
            software=software,
            batch_size=request.batch_size,
            half_batch_size=request.batch_size // 2,
            num_threads=request.num_threads,
            ids_source=request.ids_source,
            precision=request.precision,
            **links,
            machine_speed=speed,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            general_layers=general_layers(build_chain(request.model, features, seed=request.seed)),
            **measured,
        )
        for request, measured in zip(requests, times, strict=True)
    ]


def _second_worker(request: ProfileRequest, store: Path) -> Callable[[], object]:
    """Measure links with the first process; return a function that takes a step of the model, on a core."""
    measure_links(store, rank=1)
    request = replace(request, device="cpu")
    features = _bounded_features(request, _NEIGHBOUR_TABLE_BYTES)
    model = _trained_model(request, features, CPU)
    shares = share_sequences(model.layers.values())
    return WorkerSteps(request, model, features, click_batches(request, features, shares=shares)).take


def _described(device: torch.device) -> tuple[str, str, Mapping[str, str]]:
    """Return the hardware for people and its fingerprint, and the versions of the software."""
    machine, software = this_machine(), software_versions()
    if device == CPU:
        return str(machine), machine.fingerprint(), software
    card = card_text(device)
    fingerprint = f"{sha256(card.encode()).hexdigest()[:16]}-{machine.fingerprint()}"
    return f"{card}; host {machine}", fingerprint, {**software, "cuda": torch.version.cuda or ""}


def _times(
    request: ProfileRequest,
    graph: ModelGraph,
    model: StageModel,
    features: FeatureSpec,
    neighbour: Neighbour,
) -> dict[str, Any]:
    """Return the fields of a `LayerProfile` that differ between batch sizes."""
    shares = share_sequences(model.layers.values())
    whole_batches = [batch.to(model.device) for batch in click_batches(request, features, shares=shares)]
    half_size = request.batch_size // 2
    batches = {"half": [batch.rows(0, half_size) for batch in whole_batches], "whole": whole_batches}
    is_on_one_core = model.device == CPU and request.num_threads == 1
    times: dict[str, Timing] = {}
    steps: dict[str, _StepTimes] = {}
    # The last size decides: with the first one another process may compile the kernels of rows.
    for size, parts in batches.items():
        started_s, used_s = time.perf_counter(), time.process_time()
        layers, clock = layer_phases(request, model, parts, size), clock_of(model.device)
        times |= time_phases(layers, budget_s=request.budget_s / 4, clock=clock)
        clock_s, processor_s = time.perf_counter() - started_s, time.process_time() - used_s
        worker = WorkerSteps(request, model, features, parts)
        is_beside = size == "whole" and is_on_one_core
        steps[size] = _step_times(worker, clock, request.budget_s / 4, neighbour if is_beside else None)
        worker.close()
    timings: dict[str, tuple[LayerTiming, ...]] = {}
    sums: dict[str, float] = {}
    hardware, _, _ = _described(model.device)
    source = f"measured on {hardware}, threads: {request.num_threads}"
    for size, parts in batches.items():
        alone = _layer_timings(graph, model, parts, times, size, source)
        sums[size] = sum(timing.compute_ms(update_share=1.0) for timing in alone) / steps[size].step_ms
        timings[size] = tuple(timing.scaled(1 / sums[size]) for timing in alone)
    return {
        "reading": _row_reading(request, {size: step.feed_ms for size, step in steps.items()}),
        "timings": timings["whole"],
        "half_batch_timings": timings["half"],
        "sum_over_step": sums["whole"],
        "crowding": max(steps["whole"].crowding, 1.0),
        "clock_over_processor": clock_s / processor_s if is_on_one_core else 1.0,
    }


class _StepTimes(NamedTuple):
    step_ms: float
    """Time of the thread that computes."""

    feed_ms: float
    """Time of the thread that reads, for a batch."""

    crowding: float


def _step_times(
    worker: WorkerSteps, clock: Callable[[], float], budget_s: float, neighbour: Neighbour | None
) -> _StepTimes:
    """Time steps of a worker alone and, with a neighbour, in turns beside it."""

    def step_ms() -> float:
        timings = time_phases(worker.phases("step"), budget_s=budget_s / _NUM_TURNS, clock=clock)
        return sum(timing.median_ms for timing in timings.values())

    for _ in range(1 + BATCHES_AHEAD):
        worker.take()
    num_before, read_before_s = worker.read_so_far()
    alone_ms, beside_ms = [], []
    for _ in range(_NUM_TURNS):
        alone_ms.append(step_ms())
        if neighbour is not None:
            with neighbour.working():
                beside_ms.append(step_ms())
    num_read, read_s = worker.read_so_far()
    return _StepTimes(
        step_ms=statistics.median(alone_ms),
        feed_ms=MS_PER_S * (read_s - read_before_s) / max(num_read - num_before, 1),
        crowding=statistics.median(beside_ms) / statistics.median(alone_ms) if beside_ms else 1.0,
    )


def _row_reading(request: ProfileRequest, feed_ms: Mapping[str, float]) -> RowReading:
    """Return the part of reading a batch that grows with its rows, and the rest."""
    if request.dataset is None:
        return RowReading()
    whole_ms, half_ms, num_rows = feed_ms["whole"], feed_ms["half"], request.batch_size
    row_ms = min(max((whole_ms - half_ms) / (num_rows - num_rows // 2), 0.0), whole_ms / num_rows)
    return RowReading(
        batch_ms=whole_ms - num_rows * row_ms, row_ms=row_ms, decoded_row_ms=decoded_row_ms(request.dataset)
    )


def _layer_timings(
    graph: ModelGraph,
    model: StageModel,
    batches: Sequence[ClickBatch],
    times: Mapping[str, Timing],
    size: str,
    source: str,
) -> tuple[LayerTiming, ...]:
    return tuple(
        LayerTiming(
            layer=layer.name,
            kind=layer.kind.value,
            is_sharded=layer.is_sharded,
            forward=times[f"{size}/{layer.name}/forward"],
            backward=times[f"{size}/{layer.name}/backward"],
            update=times.get(f"{size}/{layer.name}/update", Timing.estimated(0.0)),
            exchanged_bytes=exchanged_bytes(model.layers[layer.name], batches),
            all_reduced_bytes=0.0 if layer.is_sharded else float(layer.parameter_bytes),
            is_estimated=False,
            source=source,
        )
        for layer in graph.layers
    )


def exchanged_bytes(layer: nn.Module, batches: Sequence[ClickBatch]) -> float:
    """Return the bytes of one batch that replicas would exchange: row indices, rows, their gradients.

    Each distinct row of a look-up is asked for once. 0 where there is no embedding.
    """
    if not isinstance(layer, SlotEmbedding):
        return 0.0
    num_distinct = sum(len(torch.unique(layer.row_numbers(batch))) for batch in batches)
    bytes_per_row = BYTES_PER_ROW_NUMBER + 2 * layer.dimension * BYTES_PER_FLOAT32
    return num_distinct / len(batches) * bytes_per_row


def _trace(request: ProfileRequest, chain: nn.Sequential) -> ModelGraph:
    return trace_chain(
        request.model,
        chain,
        dense_optimizer_values_per_parameter=len(get_dense_optimizer(request.dense_optimizer).state_names),
        row_optimizer=get_row_optimizer(request.embedding_optimizer),
        mean_lengths=request.mean_lengths,
        rows_per_list=request.rows_per_list,
    )


def _bounded_features(request: ProfileRequest, most_bytes: int) -> FeatureSpec:
    """Return the features with tables of at most so many bytes in the model; the longest are cut first."""
    row_optimizer = get_row_optimizer(request.embedding_optimizer)
    features, most_rows = request.features, max(request.features.slot_rows)
    while True:
        num_bytes = sum(
            layer.num_rows * (layer.dimension * BYTES_PER_FLOAT32 + layer.state_bytes_per_row(row_optimizer))
            for layer in build_chain(request.model, features, seed=request.seed)
            if isinstance(layer, SlotEmbedding)
        )
        if num_bytes <= most_bytes or most_rows <= _LEAST_PROFILED_ROWS:
            return features
        most_rows = most_rows * 3 // 4
        features = with_fewer_rows(features, most_rows)


def _trained_model(request: ProfileRequest, features: FeatureSpec, device: torch.device) -> StageModel:
    """Return the model as a single worker trains it, and prepare this process as its own."""
    num_layers = len(build_chain(request.model, features, seed=request.seed))
    whole = Stage(0, num_layers - 1, LOCAL_DEVICE_TYPE, 1)
    config = training_config(request, num_rows=request.batch_size)
    return build_stage_model(request.model, features, config, [whole], StagePlace(device=device))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    documents = json.loads((folder / REQUEST_NAME).read_text(encoding="utf-8"))
    profiles = measure([ProfileRequest.from_json(document) for document in documents])
    result = json.dumps([profile.to_json() for profile in profiles])
    (folder / RESULT_NAME).write_text(result, encoding="utf-8")
