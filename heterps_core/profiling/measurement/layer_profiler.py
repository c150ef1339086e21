"""Measures a model on a core or the CUDA device: each layer's forward, backward and update, at two batch sizes.

The times of layers alone are scaled to those of the trainer's step, where layers are fused. On one core all are in
processor time, which other processes do not lengthen. Run as a program by `measuring_process`, on a folder with
`request.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heterps_core.compute_device import CPU, card_text, clock_of, require_cuda
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.models.chain import build_chain
from heterps_core.models.model_graph import ModelGraph
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import BYTES_PER_ROW_NUMBER, trace_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.layer_profile import (
    LOCAL_DEVICE_TYPE,
    LOCAL_GPU_DEVICE_TYPE,
    LayerProfile,
    LayerTiming,
    RowReading,
)
from heterps_core.profiling.machine import software_versions, this_machine
from heterps_core.profiling.measurement.link_measurement import measure_links, second_process
from heterps_core.profiling.measurement.machine_speed import measure_machine_speed
from heterps_core.profiling.measurement.profiling_input import (
    RowFeed,
    click_batches,
    decoded_row_ms,
    with_fewer_rows,
)
from heterps_core.profiling.measurement.timed_layers import layer_phases, step_phases, training_config
from heterps_core.profiling.measuring_process import REQUEST_NAME, RESULT_NAME, ProfileRequest
from heterps_core.profiling.timing import Phase, Timing, time_phases
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.pipeline.stage_layers import general_layers
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.units import BYTES_PER_FLOAT32

_MACHINE_SPEED_BUDGET_S = 0.2

_FEED_BUDGET_S = 0.05

PROFILED_TABLE_BYTES = 512 * 1024**2
"""Most bytes of tables, with optimizer state, that are made to be measured: a look-up waits for memory, not for the
size of the table. Five times the largest last cache of the CPU types that are sold (105 MB), so that rows miss the
caches as those of larger tables do. The same look-ups over 2 GB took 8 % longer than over 0.5 GB (more misses of
page translations), over 0.2 GB 4 % less (2 shared AMD cores, 32 MiB last cache, 2026-11-26)."""

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

    On a CUDA device the clock waits for what was begun. Links are the host's there too: between machines and to other
    stages rows go through its memory.
    """
    first = requests[0]
    device = CPU
    if first.device == "cuda":
        require_cuda()
        device = torch.device("cuda", 0)
    torch.set_num_threads(first.num_threads)
    torch.manual_seed(first.seed)
    with tempfile.TemporaryDirectory(prefix="heterps-link-") as folder, second_process(Path(folder)) as store:
        graph = trace_model(first)
        features = _bounded_features(first)
        model = _trained_model(first, features, device)
        links = measure_links(store, rank=0)
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
            **_times(
                request, graph, model, features, f"measured on {hardware}, threads: {request.num_threads}"
            ),
        )
        for request in requests
    ]


def _described(device: torch.device) -> tuple[str, str, Mapping[str, str]]:
    """Return the hardware for people and its fingerprint, and the versions of the software."""
    machine, software = this_machine(), software_versions()
    if device == CPU:
        return str(machine), machine.fingerprint(), software
    card = card_text(device)
    fingerprint = f"{sha256(card.encode()).hexdigest()[:16]}-{machine.fingerprint()}"
    return f"{card}; host {machine}", fingerprint, {**software, "cuda": torch.version.cuda or ""}


def _times(
    request: ProfileRequest, graph: ModelGraph, model: StageModel, features: FeatureSpec, source: str
) -> dict[str, Any]:
    """Return the fields of a `LayerProfile` that differ between batch sizes."""
    whole_batches = [batch.to(model.device) for batch in click_batches(request, features)]
    half_size = request.batch_size // 2
    batches = {"whole": whole_batches, "half": [batch.rows(0, half_size) for batch in whole_batches]}
    times: dict[str, Timing] = {}
    feed_ms: dict[str, float] = {}
    for size, parts in batches.items():
        # The last size decides: with the first one another process may compile the kernels of rows.
        started_s, used_s = time.perf_counter(), time.process_time()
        layers, steps = layer_phases(request, model, parts, size), step_phases(request, model, parts, size)
        # Steps follow each other, as in training: other phases in between would take the caches.
        for phases in (layers, steps):
            times |= time_phases(phases, budget_s=request.budget_s / 4, clock=clock_of(model.device))
        if request.dataset is not None:
            feed = RowFeed(request, len(parts[0].labels))
            read = time_phases([Phase("read", feed.read)], budget_s=_FEED_BUDGET_S, clock=clock_of(CPU))
            feed_ms[size] = read["read"].median_ms / feed.num_at_once
    clock_s, processor_s = time.perf_counter() - started_s, time.process_time() - used_s
    timings: dict[str, list[LayerTiming]] = {}
    sums: dict[str, float] = {}
    for size, parts in batches.items():
        alone = _layer_timings(graph, model, parts, times, size, source)
        step_ms = times[f"{size}/passes"].median_ms + times[f"{size}/updates"].median_ms
        sums[size] = sum(timing.compute_ms(update_share=1.0) for timing in alone) / step_ms
        timings[size] = [timing.scaled(1 / sums[size]) for timing in alone]
    is_on_one_core = model.device == CPU and request.num_threads == 1
    return {
        "reading": _row_reading(request, feed_ms),
        "timings": tuple(timings["whole"]),
        "half_batch_timings": tuple(timings["half"]),
        "sum_over_step": sums["whole"],
        "clock_over_processor": clock_s / processor_s if is_on_one_core else 1.0,
    }


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
    )


def _bounded_features(request: ProfileRequest) -> FeatureSpec:
    """Return the features with tables of at most `PROFILED_TABLE_BYTES` in the model; the longest are cut first."""
    row_optimizer = get_row_optimizer(request.embedding_optimizer)
    features, most_rows = request.features, max(request.features.slot_rows)
    while True:
        num_bytes = sum(
            layer.num_rows
            * (layer.dimension * BYTES_PER_FLOAT32 + row_optimizer.state_bytes_per_row(layer.dimension))
            for layer in build_chain(request.model, features, seed=request.seed)
            if isinstance(layer, SlotEmbedding)
        )
        if num_bytes <= PROFILED_TABLE_BYTES or most_rows <= _LEAST_PROFILED_ROWS:
            return features
        most_rows = most_rows * 3 // 4
        features = with_fewer_rows(features, most_rows)


def _trained_model(request: ProfileRequest, features: FeatureSpec, device: torch.device) -> StageModel:
    """Return the model as a single worker trains it, and prepare this process as its own."""
    num_layers = len(build_chain(request.model, features, seed=request.seed))
    whole = Stage(0, num_layers - 1, LOCAL_DEVICE_TYPE, 1)
    return build_stage_model(
        request.model, features, training_config(request), [whole], StagePlace(device=device)
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    documents = json.loads((folder / REQUEST_NAME).read_text(encoding="utf-8"))
    profiles = measure([ProfileRequest.from_json(document) for document in documents])
    result = json.dumps([profile.to_json() for profile in profiles])
    (folder / RESULT_NAME).write_text(result, encoding="utf-8")
