"""Times each layer of a chain alone on a core or the CUDA device: forward, backward, update, at two batch sizes.

Each layer gets the input that the layers before it produced, because hooks inside a running model miss what an
embedding does in autograd. Run as a program by `measuring_process`, on a folder with `request.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.compute_device import CPU, card_text, clock_of, require_cuda
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.model_graph import ModelGraph
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import BYTES_PER_ROW_NUMBER, trace_chain
from heterps_core.profiling.layer_profile import (
    LOCAL_DEVICE_TYPE,
    LOCAL_GPU_DEVICE_TYPE,
    LayerProfile,
    LayerTiming,
)
from heterps_core.profiling.link_measurement import measure_links, measure_machine_speed, second_process
from heterps_core.profiling.machine import software_versions, this_machine
from heterps_core.profiling.measuring_process import REQUEST_NAME, RESULT_NAME, ProfileRequest
from heterps_core.profiling.profiling_input import click_batches, with_fewer_rows
from heterps_core.profiling.timing import Phase, Timing, time_phases
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.pipeline.stage_layers import general_layers
from heterps_core.units import BYTES_PER_FLOAT32

LEARNING_RATE = 1e-6
"""Synthetic gradients must not drive the parameters anywhere; the time of an update does not depend on it."""

_MACHINE_SPEED_BUDGET_S = 0.4

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


def measure(request: ProfileRequest) -> LayerProfile:
    """Measure a model in this process, whose number of threads it changes.

    On a CUDA device the clock waits for what was begun. Links are the host's there too: between machines and to other
    stages rows go through its memory.
    """
    device = CPU
    if request.device == "cuda":
        require_cuda()
        device = torch.device("cuda", 0)
    torch.set_num_threads(request.num_threads)
    torch.manual_seed(request.seed)
    with tempfile.TemporaryDirectory(prefix="heterps-link-") as folder, second_process(Path(folder)) as store:
        graph = trace_model(request)
        features, chain = _bounded_chain(request)
        whole_batches = [batch.to(device) for batch in click_batches(request, features)]
        chain.to(device)
        tables = _attach_tables(request, chain, device)
        links = measure_links(store, rank=0)
    speed = measure_machine_speed(budget_s=_MACHINE_SPEED_BUDGET_S, device=device)
    half_batch_size = request.batch_size // 2
    whole = _bench_layers(request, chain, tables, whole_batches)
    half_batches = [batch.rows(0, half_batch_size) for batch in whole_batches]
    half = _bench_layers(request, chain, tables, half_batches)
    times = time_phases(
        [
            *(phase for bench in whole for phase in bench.phases("whole")),
            Phase("step", _whole_step(request, chain, tables, whole_batches)),
            *(phase for bench in half for phase in bench.phases("half")),
        ],
        budget_s=request.budget_s,
        clock=clock_of(device),
    )
    machine = this_machine()
    hardware, hardware_fingerprint, software = str(machine), machine.fingerprint(), software_versions()
    if device != CPU:
        card = card_text(device)
        hardware = f"{card}; host {machine}"
        hardware_fingerprint = f"{sha256(card.encode()).hexdigest()[:16]}-{hardware_fingerprint}"
        software = {**software, "cuda": torch.version.cuda or ""}
    source = f"measured on {hardware}, threads: {request.num_threads}"
    timings = _layer_timings(graph, whole, times, "whole", source)
    layers_ms = sum(timing.compute_ms(update_share=1.0) for timing in timings)
    return LayerProfile(
        model=request.model,
        graph_fingerprint=graph.fingerprint(),
        device_type=LOCAL_DEVICE_TYPE if device == CPU else LOCAL_GPU_DEVICE_TYPE,
        hardware=hardware,
        hardware_fingerprint=hardware_fingerprint,
        software=software,
        batch_size=request.batch_size,
        half_batch_size=half_batch_size,
        num_threads=request.num_threads,
        ids_source=request.ids_source,
        timings=timings,
        half_batch_timings=_layer_timings(graph, half, times, "half", source),
        **links,
        machine_speed=speed,
        sum_over_step=layers_ms / times["step"].median_ms,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        general_layers=general_layers(chain),
    )


class _LayerBench:
    """One layer with its captured input, ready to run forward, backward and update."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        batches: Sequence[ClickBatch],
        activation: Tensor | None,
        update: Callable[[], object] | None,
        precision: str,
    ) -> None:
        self._name = name
        self._layer = layer
        self._batches = batches
        self._update = update
        self._precision = precision
        self._activation = activation
        self._entering: Tensor | None = None
        self._round = 0
        self._prepare()
        self._forward()
        self._gradient = torch.randn_like(self._leaving) / len(self._leaving)

    def phases(self, size: str) -> list[Phase]:
        """Return what a round runs, named "size/layer/phase"."""
        prefix = f"{size}/{self._name}"
        phases = [
            Phase(None, self._prepare),
            Phase(f"{prefix}/forward", self._forward),
            Phase(f"{prefix}/backward", self._backward),
        ]
        return phases if self._update is None else [*phases, Phase(f"{prefix}/update", self._update)]

    def exchanged_bytes(self) -> float:
        """Return the bytes of one batch that replicas would exchange: row indices, rows, their gradients.

        Each distinct row of a look-up is asked for once. 0 where there is no embedding.
        """
        layer = self._layer
        if not isinstance(layer, SlotEmbedding):
            return 0.0
        num_distinct = sum(len(torch.unique(layer.row_numbers(batch))) for batch in self._batches)
        bytes_per_row = BYTES_PER_ROW_NUMBER + 2 * layer.dimension * BYTES_PER_FLOAT32
        return num_distinct / len(self._batches) * bytes_per_row

    def _prepare(self) -> None:
        self._round += 1
        if self._activation is not None:
            self._activation.grad = None
            # A copy, so that a layer may work in place; it also puts the input into the caches, where the layer
            # before leaves it in training.
            self._entering = self._activation.clone()

    def _forward(self) -> None:
        batch = self._batches[self._round % len(self._batches)]
        self._leaving = _run_layers([self._layer], batch, self._entering, self._precision)

    def _backward(self) -> None:
        self._leaving.backward(self._gradient)  # type: ignore[no-untyped-call]


def _bench_layers(
    request: ProfileRequest,
    chain: nn.Sequential,
    tables: Mapping[str, ShardedTable],
    batches: Sequence[ClickBatch],
) -> list[_LayerBench]:
    """Run the chain once and keep what entered each layer."""
    benches = []
    activation: Tensor | None = None
    for name, layer in chain.named_children():
        with torch.no_grad():
            entering = None if activation is None else activation.clone()
            leaving = _run_layers([layer], batches[0], entering, request.precision)
        update = _layer_update(request, layer, tables.get(name))
        benches.append(_LayerBench(name, layer, batches, activation, update, request.precision))
        # All layers but the first hand a gradient to the one before them.
        activation = leaving.requires_grad_()
    return benches


def _run_layers(
    layers: Iterable[nn.Module], batch: ClickBatch, activation: Tensor | None, precision: str
) -> Tensor:
    """Run layers in a precision; what leaves them is float32, as between the stages of a plan."""
    with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return run_layers(layers, batch, activation).float()


def _layer_update(
    request: ProfileRequest, layer: nn.Module, table: ShardedTable | None
) -> Callable[[], object] | None:
    if table is not None:
        return partial(table.apply_gradients, learning_rate=LEARNING_RATE)
    parameters = list(layer.parameters())
    return _dense_update(request, parameters) if parameters else None


def _dense_update(request: ProfileRequest, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    optimizer = get_dense_optimizer(request.dense_optimizer).new(parameters, LEARNING_RATE)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def _whole_step(
    request: ProfileRequest,
    chain: nn.Sequential,
    tables: Mapping[str, ShardedTable],
    batches: Sequence[ClickBatch],
) -> Callable[[], None]:
    """Return a training step as one process makes it: all layers, the loss, and all updates."""
    dense_update = _dense_update(request, list(chain.parameters()))
    in_turn = cycle(batches)

    def step() -> None:
        batch = next(in_turn)
        logits = _run_layers(chain, batch, None, request.precision)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.view_as(logits))
        loss.backward()  # type: ignore[no-untyped-call]
        dense_update()
        for table in tables.values():
            table.apply_gradients(learning_rate=LEARNING_RATE)

    return step


def _layer_timings(
    graph: ModelGraph, benches: Sequence[_LayerBench], times: Mapping[str, Timing], size: str, source: str
) -> tuple[LayerTiming, ...]:
    return tuple(
        LayerTiming(
            layer=layer.name,
            kind=layer.kind.value,
            is_sharded=layer.is_sharded,
            forward=times[f"{size}/{layer.name}/forward"],
            backward=times[f"{size}/{layer.name}/backward"],
            update=times.get(f"{size}/{layer.name}/update", Timing.estimated(0.0)),
            exchanged_bytes=bench.exchanged_bytes(),
            all_reduced_bytes=0.0 if layer.is_sharded else float(layer.parameter_bytes),
            is_estimated=False,
            source=source,
        )
        for layer, bench in zip(graph.layers, benches, strict=True)
    )


def _trace(request: ProfileRequest, chain: nn.Sequential) -> ModelGraph:
    return trace_chain(
        request.model,
        chain,
        dense_optimizer_values_per_parameter=get_dense_optimizer(
            request.dense_optimizer
        ).state_values_per_parameter,
        row_optimizer=get_row_optimizer(request.embedding_optimizer),
    )


def _bounded_chain(request: ProfileRequest) -> tuple[FeatureSpec, nn.Sequential]:
    """Return the model with tables of at most `PROFILED_TABLE_BYTES`, and its features; the longest are cut first."""
    row_optimizer = get_row_optimizer(request.embedding_optimizer)
    features, most_rows = request.features, max(request.features.slot_rows)
    while True:
        chain = build_chain(request.model, features, seed=request.seed)
        num_bytes = sum(
            layer.num_rows
            * (layer.dimension * BYTES_PER_FLOAT32 + row_optimizer.state_bytes_per_row(layer.dimension))
            for layer in chain
            if isinstance(layer, SlotEmbedding)
        )
        if num_bytes <= PROFILED_TABLE_BYTES or most_rows <= _LEAST_PROFILED_ROWS:
            return features, chain
        most_rows = most_rows * 3 // 4
        features = with_fewer_rows(features, most_rows)


def _attach_tables(
    request: ProfileRequest, chain: nn.Sequential, device: torch.device
) -> dict[str, ShardedTable]:
    tables = {}
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            optimizer = get_row_optimizer(request.embedding_optimizer)()
            tables[name] = layer.new_table(name, optimizer, seed=request.seed, device=device)
            layer.attach_table(tables[name])
    return tables


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    asked = ProfileRequest.from_json(json.loads((folder / REQUEST_NAME).read_text(encoding="utf-8")))
    (folder / RESULT_NAME).write_text(json.dumps(measure(asked).to_json()), encoding="utf-8")
