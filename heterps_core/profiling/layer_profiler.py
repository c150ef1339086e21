"""Times each layer of a chain alone on this machine: forward, backward and update, at two batch sizes.

Each layer gets the input that the layers before it produced, because hooks inside a running model miss what an
embedding does in autograd. The whole step of the chain is timed in the same rounds, so a profile says how much of
the step its layers explain. Run as a program: python -m heterps_core.profiling.layer_profiler FOLDER, with
`request.json` in the folder; `measuring_process` does that.

Shapes: B = rows of a batch, S = slots, N = row numbers of a look-up, W = width of an activation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.graph.model_graph import ModelGraph
from heterps_core.graph.tracing import BYTES_PER_ROW_NUMBER, trace_chain
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.profiling.layer_profile import LOCAL_DEVICE_TYPE, LayerProfile, LayerTiming
from heterps_core.profiling.link_measurement import measure_links, second_process
from heterps_core.profiling.machine import software_versions, this_machine
from heterps_core.profiling.machine_speed import measure_machine_speed
from heterps_core.profiling.measuring_process import PROFILE_NAME, REQUEST_NAME, ProfileRequest
from heterps_core.profiling.timing import Phase, RepeatLimits, Timing, time_phases
from heterps_core.training.optimizers import get_dense_optimizer
from heterps_core.units import BYTES_PER_FLOAT32

NUM_BATCHES = 8
"""Batches that are looked up in turn: the rows of a single one would stay in the caches."""

LEARNING_RATE = 1e-6
"""Made-up gradients must not drive the parameters anywhere; the time of an update does not depend on it."""

MACHINE_SPEED_BUDGET_S = 0.4


def trace_model(request: ProfileRequest) -> ModelGraph:
    """Return the graph of the model that a request names.

    Raises:
        UnknownNameError, ConfigurationError: The model or an optimizer cannot be used; see `build_chain`.
    """
    return _trace(request, build_chain(request.model, request.features, seed=request.seed))


def measure(request: ProfileRequest) -> LayerProfile:
    """Measure a model in this process, whose number of threads it changes."""
    torch.set_num_threads(request.num_threads)
    torch.manual_seed(request.seed)
    with tempfile.TemporaryDirectory(prefix="heterps-link-") as folder, second_process(Path(folder)) as store:
        batches = profiling_batches(request)
        chain = build_chain(request.model, request.features, seed=request.seed)
        graph = _trace(request, chain)
        tables = _attach_tables(request, chain)
        links = measure_links(store, rank=0)
    speed = measure_machine_speed(budget_s=MACHINE_SPEED_BUDGET_S)
    half_batch_size = request.batch_size // 2
    half_batches = [_rows(batch, 0, half_batch_size) for batch in batches]
    whole = _bench_layers(request, chain, tables, batches)
    half = _bench_layers(request, chain, tables, half_batches)
    times = time_phases(
        [
            *(phase for bench in whole for phase in bench.phases("whole")),
            Phase("step", _whole_step(request, chain, tables, batches)),
            *(phase for bench in half for phase in bench.phases("half")),
        ],
        RepeatLimits(budget_s=request.budget_s),
    )
    machine = this_machine()
    source = f"measured on {machine}, threads: {request.num_threads}"
    timings = _layer_timings(graph, whole, times, "whole", source)
    layers_ms = sum(timing.compute_ms(update_share=1.0) for timing in timings)
    return LayerProfile(
        model=request.model,
        graph_fingerprint=graph.fingerprint(),
        device_type=LOCAL_DEVICE_TYPE,
        hardware=str(machine),
        hardware_fingerprint=machine.fingerprint(),
        software=software_versions(),
        batch_size=request.batch_size,
        half_batch_size=half_batch_size,
        num_threads=request.num_threads,
        ids_source=request.ids_source,
        timings=timings,
        half_batch_timings=_layer_timings(graph, half, times, "half", source),
        exchange_link=links.exchange,
        all_reduce_link=links.all_reduce,
        boundary_link=links.boundary,
        busy_message_seconds=links.busy_message_seconds,
        machine_speed=speed,
        sum_over_step=layers_ms / times["step"].median_ms,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def profiling_batches(request: ProfileRequest) -> list[ClickBatch]:
    """Return `NUM_BATCHES` batches: the first rows of the data set, from its start again where it ends, or drawn."""
    num_rows = NUM_BATCHES * request.batch_size
    if request.dataset is None:
        generator = np.random.default_rng(request.seed)
        ids = zipf_ids(request.features, num_rows, generator)
        dense = generator.standard_normal((num_rows, request.features.num_dense), dtype=np.float32)
        labels = generator.integers(0, 2, num_rows).astype(np.float32)
        batch = ClickBatch.from_numpy(dense, ids, labels)
    else:
        dataset = PreparedDataset.open(request.dataset)
        # Wraps around where the data set has fewer rows.
        rows = np.resize(np.arange(dataset.num_train_rows, dtype=np.int64), num_rows)
        batch = dataset.train_batch(rows)
    firsts = range(0, num_rows, request.batch_size)
    return [_rows(batch, first, first + request.batch_size) for first in firsts]


def _rows(batch: ClickBatch, first: int, stop: int) -> ClickBatch:
    return ClickBatch(
        dense=batch.dense[first:stop], ids=batch.ids[first:stop], labels=batch.labels[first:stop]
    )


def zipf_ids(features: FeatureSpec, num_rows: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw row numbers [B, S] by Zipf's law with exponent 1: the r-th most frequent value has weight 1 / r.

    Ranks are scattered over the table as hashing scatters values, so that frequent rows do not lie side by side
    in memory. Row 0, for a missing value, does not occur.
    """
    ids = np.empty((num_rows, features.num_slots), dtype=np.int64)
    for slot, table_rows in enumerate(features.slot_rows):
        num_values = table_rows - 1
        # The logarithm of a rank of weight 1 / r is uniform.
        ranks = np.floor((num_values + 1.0) ** generator.random(num_rows)).astype(np.int64)
        row_of_rank = 1 + np.random.default_rng(slot).permutation(num_values)
        ids[:, slot] = row_of_rank[np.minimum(ranks, num_values) - 1]
    return ids


class _LayerBench:
    """One layer with its captured input, ready to run forward, backward and update.

    Args:
        layer: The layer; an embedding has its table.
        batches: What an embedding reads, in turn.
        activation: Output of the layer before [B, W]; None for the first.
        update: Applies the gradients of this layer alone; None where it has no parameters.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        *,
        batches: Sequence[ClickBatch],
        activation: Tensor | None,
        update: Callable[[], object] | None,
    ) -> None:
        self._name = name
        self._layer = layer
        self._batches = batches
        self._update = update
        self._activation = None if activation is None else activation.requires_grad_()
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
        """Return the bytes of one batch that replicas would exchange: row numbers, rows, their gradients.

        Each distinct row of a look-up is asked for once. 0 where there is no embedding.
        """
        if not isinstance(self._layer, SlotEmbedding) or self._layer.table is None:
            return 0.0
        table = self._layer.table
        counter = _DistinctRows(table)
        self._layer.attach_table(counter)  # type: ignore[arg-type]
        with torch.no_grad():
            for batch in self._batches:
                run_layers([self._layer], batch, self._activation)
        self._layer.attach_table(table)
        bytes_per_row = BYTES_PER_ROW_NUMBER + 2 * table.dimension * BYTES_PER_FLOAT32
        return counter.num_distinct / len(self._batches) * bytes_per_row

    def _prepare(self) -> None:
        self._round += 1
        if self._activation is not None:
            self._activation.grad = None
            # A copy, so that a layer may work in place; it also puts the input into the caches, where the layer
            # before leaves it in training.
            self._entering = self._activation.clone()

    def _forward(self) -> None:
        batch = self._batches[self._round % len(self._batches)]
        self._leaving = run_layers([self._layer], batch, self._entering)

    def _backward(self) -> None:
        self._leaving.backward(self._gradient)  # type: ignore[no-untyped-call]


class _DistinctRows:
    """Stands in for a table and counts the distinct rows of look-ups."""

    def __init__(self, table: ShardedTable) -> None:
        self._table = table
        self.num_distinct = 0

    def lookup(self, rows_N: Tensor) -> Tensor:
        """Count, then look up."""
        self.num_distinct += len(torch.unique(rows_N))
        return self._table.lookup(rows_N)


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
            leaving = run_layers([layer], batches[0], None if activation is None else activation.clone())
        update = _layer_update(request, layer, tables.get(name))
        benches.append(_LayerBench(name, layer, batches=batches, activation=activation, update=update))
        activation = leaving
    return benches


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
    round_index = 0

    def step() -> None:
        nonlocal round_index
        batch = batches[round_index % len(batches)]
        round_index += 1
        logits_B = run_layers(chain, batch, None).squeeze(1)
        F.binary_cross_entropy_with_logits(logits_B, batch.labels).backward()  # type: ignore[no-untyped-call]
        dense_update()
        for table in tables.values():
            table.apply_gradients(learning_rate=LEARNING_RATE)

    return step


def _layer_timings(
    graph: ModelGraph,
    benches: Sequence[_LayerBench],
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


def _attach_tables(request: ProfileRequest, chain: nn.Sequential) -> dict[str, ShardedTable]:
    tables = {}
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            optimizer = get_row_optimizer(request.embedding_optimizer)()
            tables[name] = layer.new_table(name, optimizer, seed=request.seed)
            layer.attach_table(tables[name])
    return tables


def _run(folder: Path) -> None:
    request = ProfileRequest.from_json(json.loads((folder / REQUEST_NAME).read_text(encoding="utf-8")))
    (folder / PROFILE_NAME).write_text(json.dumps(measure(request).to_json()), encoding="utf-8")


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
