"""What rows of a shared table cost a worker: processor time of a step without its dense layers, 1 to 24 replicas.

Each replica is a process; they exchange rows by messages, connected as replicas of different machines are (TCP over
loopback), and 16 as those of one machine too (Unix sockets). A step is that of a pipeline's first stage: the feed
thread requests rows, all micro-batches look them up and hand gradients back, and rows are updated. Ids are drawn
evenly, the hardest case for caches and for distinct rows. More processes than cores take turns, so clocks say
nothing: a figure is the processor time that the kernel counts for a worker, median of rounds, then of workers.
"Others" are all threads but the main one and the feed's. All models and numbers of replicas take turns round after
round, so that a busy second slows all of them; the law of a plan is measured before and after, as the machine may
get busier meanwhile.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.models.chain import build_chain
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.planning.cost_model.run_tables import plan_table
from heterps_core.planning.problem.scheduling_problem import (
    LayerCosts,
    SchedulingProblem,
    StepModel,
    UnitType,
)
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.measurement.replica_measurement import processor_seconds
from heterps_core.profiling.measuring_process import measure_replica_path
from heterps_core.profiling.replica_path import PathSample, ReplicaPath, fitted_path
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig, batches_at_once, default_microbatches
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.replica_batches import BatchFeed, ReplicaBatches
from heterps_core.transport import token_connections
from heterps_core.transport.rank_layout import RankLayout
from tests.benchmarks.planner import figure, show
from tests.benchmarks.training_engine import BATCH_SIZE, make_batches, make_features
from tests.worker_processes import run_in_processes

MODELS = ("ctrdnn", "wide-deep", "lr")
"""One table of 16 columns, that and one of a single column, one of a single column."""

NUM_REPLICAS = (1, 2, 4, 8, 16, 24)
ROWS_ALONE = (BATCH_SIZE, BATCH_SIZE // 2, BATCH_SIZE // 4, BATCH_SIZE // 8)
NUM_ROWS = 1_000_000
NUM_ROUNDS, LEAST_STEPS, WARMUP_STEPS = 10, 6, 2
LEARNING_RATE = 0.05
ENDLESS = 10**9


class Setting(NamedTuple):
    """One of the things that are measured."""

    model: str
    num_replicas: int
    batch_size: int
    is_one_machine: bool = False


class Seconds(NamedTuple):
    """Processor seconds of one worker's threads since they began."""

    all: float
    main: float
    feed: float

    def __sub__(self, before: Seconds) -> Seconds:
        return Seconds(*(now - then for now, then in zip(self, before, strict=True)))


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure all models and numbers of replicas, print a table and return its figures.

    They have the form of the benchmark contract.
    """
    before = measure_replica_path()
    by_worker = run_in_processes(measure, max(NUM_REPLICAS), seed)
    path = mean_path(before, measure_replica_path())
    seconds: dict[str, dict[int, Seconds]] = {model: {} for model in MODELS}
    alone: dict[str, dict[int, Seconds]] = {model: {} for model in MODELS}
    of_one_machine = {}
    for setting in by_worker[0]:
        steps = [worker[setting] for worker in by_worker[: setting.num_replicas]]
        step = Seconds(*(statistics.median(each) for each in zip(*steps, strict=True)))
        if setting.is_one_machine:
            of_one_machine[setting.model] = step
        elif setting.batch_size == BATCH_SIZE:
            seconds[setting.model][setting.num_replicas] = step
        if setting.num_replicas == 1:
            alone[setting.model][setting.batch_size] = step
    figures = []
    for model, of_model in seconds.items():
        for count, step in of_model.items():
            others = step.all - step.main - step.feed
            for part, value in (
                ("all", step.all),
                ("main", step.main),
                ("feed", step.feed),
                ("others", others),
            ):
                figures.append(figure(f"{model}_{part}_ms_{count}", 1e3 * value, "ms", higher=False))
    figures += planned_figures(path, seconds, alone, seed=seed)
    for model, step in of_one_machine.items():
        ratio = step.all / seconds[model][1].all
        figures.append(figure(f"{model}_one_machine_16_over_1", ratio, "ratio", higher=False))
    for model, of_model in seconds.items():
        ratio = of_model[16].all / of_model[1].all
        figures.append(figure(f"{model}_processor_time_16_over_1", ratio, "ratio", higher=False))
    worst = max(entry["value"] for entry in figures[-len(MODELS) :])
    figures.append(figure("processor_time_16_over_1", worst, "ratio", higher=False))
    show(figures, f"batch {BATCH_SIZE}, {NUM_ROWS:,} rows, seed {seed}, load {os.getloadavg()[0]:.1f}")
    return figures


def mean_path(before: ReplicaPath, after: ReplicaPath) -> ReplicaPath:
    """Return the law with terms between those of two."""
    names = ("message_seconds", "peer_seconds", "table_seconds", "byte_seconds", "relative_error")
    return replace(before, **{name: (getattr(before, name) + getattr(after, name)) / 2 for name in names})


def planned_figures(
    path: ReplicaPath,
    seconds: Mapping[str, Mapping[int, Seconds]],
    alone: Mapping[str, Mapping[int, Seconds]],
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """Return what a plan has over what was measured, and how near the law comes that fits these steps best.

    Args:
        path: The law that was measured on its own, as for a profile.
        seconds: Model -> replicas -> a measured step.
        alone: Model -> rows of a batch -> a step of one process.
    """
    figures, misses, samples = [], [], []
    for model, of_model in seconds.items():
        problem = planned_problem(
            model, path, {rows: step.all for rows, step in alone[model].items()}, seed=seed
        )
        beta = problem.device_types["core"].communication_parallel_fraction
        for count, step in of_model.items():
            compute_s, exchange_s = planned_seconds(problem, count)
            ratio = (compute_s + exchange_s) / step.all
            misses.append(abs(ratio - 1))
            figures.append(figure(f"{model}_planned_over_measured_{count}", ratio, "ratio"))
            num_bytes = sum(layer.exchanged_bytes for layer in problem.layers) * (1 - beta + beta / count)
            if count > 1:
                samples.append(
                    PathSample(BATCH_SIZE, count, problem.num_layers, num_bytes, compute_s, step.all)
                )
    fitted = fitted_path(samples, measured_at="")
    return [
        *figures,
        figure("planned_over_measured_worst", max(misses), "share", higher=False),
        figure("replica_path_relative_error", path.relative_error, "share", higher=False),
        figure("law_fitted_to_these_steps_worst", fitted.relative_error, "share", higher=False),
    ]


def planned_problem(
    model: str, path: ReplicaPath, alone: Mapping[int, float], *, seed: int
) -> SchedulingProblem:
    """Return the embeddings of a model as a planning problem of one core, on a network that takes no time.

    Args:
        path: Of this machine.
        alone: Rows of a batch -> processor time of a step of one process. A plan has a straight line.
    """
    rows, step_s = np.array(list(alone)), np.array(list(alone.values()))
    row_s, start_s = np.polyfit(rows, step_s, 1, w=1 / step_s)
    whole_s = start_s + BATCH_SIZE * row_s
    features = make_features(NUM_ROWS)
    drawn = make_batches(NUM_ROWS, seed=seed)
    chain = build_chain(model, features, seed=seed)
    embeddings = [layer for layer in chain if isinstance(layer, SlotEmbedding)]
    whole, half = (
        [
            float(np.mean([len(torch.unique(layer.row_numbers(batch.rows(0, rows)))) for batch in drawn]))
            for layer in embeddings
        ]
        for rows in (BATCH_SIZE, BATCH_SIZE // 2)
    )
    return SchedulingProblem(
        model=model,
        batch_size=BATCH_SIZE,
        profile_batch_size=BATCH_SIZE,
        num_samples=1e9,
        num_epochs=1,
        throughput_floor_samples_per_s=0.0,
        step_model=StepModel.TRAINER,
        single_replica_communicates=False,
        layers=tuple(
            LayerCosts(
                name=f"embedding_{index}",
                kind="embedding",
                is_sharded=True,
                state_bytes=0.0,
                output_bytes_per_sample=0.0,
                compute_seconds={"core": float(whole_s) / len(embeddings)},
                communication_seconds={"core": 0.0},
                exchanged_bytes=whole[index] * (8 + 8 * layer.dimension),
            )
            for index, layer in enumerate(embeddings)
        ),
        device_types={
            "core": UnitType(
                price_usd_per_hour=1.0,
                max_units=max(NUM_REPLICAS),
                memory_bytes=1.0,
                bandwidth_bytes_per_s=1.0,
                compute_parallel_fraction=float(np.clip(BATCH_SIZE * row_s / whole_s, 0.0, 1.0)),
                communication_parallel_fraction=min(2 * (1 - sum(half) / sum(whole)), 1.0),
                exchange_seconds=path.message_seconds,
                exchange_seconds_per_peer=path.peer_seconds,
                exchange_seconds_per_table=path.table_seconds,
                exchange_seconds_per_byte=path.byte_seconds,
            )
        },
    )


def planned_seconds(problem: SchedulingProblem, num_replicas: int) -> tuple[float, float]:
    """Return the processor time of a step that a plan has for each of some replicas: computing, and exchanging."""
    stage = Stage(0, problem.num_layers - 1, "core", num_replicas)
    table = plan_table(problem, [stage])
    terms = table.terms(table.pacing(np.array([float(num_replicas)])))
    return float(np.squeeze(terms.compute)), float(np.squeeze(terms.exchange))


def measure(rank: int, seed: int) -> dict[Setting, Seconds]:
    """Return for each setting that has this replica the processor seconds of a step, the median of the rounds."""
    replicas: dict[Setting, Replica] = {}
    of_one_machine = [Setting(model, 16, BATCH_SIZE, is_one_machine=True) for model in MODELS]
    others = [
        Setting(model, count, batch_size)
        for count in NUM_REPLICAS
        for batch_size in (ROWS_ALONE if count == 1 else (BATCH_SIZE,))
        for model in MODELS
    ]
    name = token_connections.this_machine()
    for setting in (*others, *of_one_machine):
        members = tuple(range(setting.num_replicas))
        group = dist.new_group(list(members)) if len(members) > 1 else None
        if rank in members:
            machine = name if setting.is_one_machine else f"{name}, {rank}"
            token_connections.this_machine = lambda machine=machine: machine  # type: ignore[misc]
            place = StagePlace(layout=RankLayout((members,)), replica=rank, group=group)
            drawn = make_batches(NUM_ROWS, seed=seed, batch_size=setting.batch_size)
            replicas[setting] = Replica(setting.model, place, drawn, seed=seed)
    rounds = [[replica.seconds_of_step() for replica in replicas.values()] for _ in range(NUM_ROUNDS)]
    return {
        setting: Seconds(*(statistics.median(each) for each in zip(*steps, strict=True)))
        for setting, steps in zip(replicas, zip(*rounds, strict=True), strict=True)
    }


class Replica:
    """Takes the steps of the embeddings of one replica of a stage."""

    def __init__(self, model: str, place: StagePlace, drawn: list[ClickBatch], *, seed: int) -> None:
        config = TrainingConfig(
            batch_size=drawn[0].num_rows,
            num_microbatches=default_microbatches(BATCH_SIZE, num_stages=2),
            num_epochs=1,
            seed=seed,
        )
        features = make_features(NUM_ROWS)
        stages = [Stage(0, len(build_chain(model, features, seed=seed)) - 1, "cpu", place.num_replicas)]
        self._part = build_stage_model(model, features, config, stages, place)
        runner = StageRunner(self._part, config, place)
        batches = ReadBatches(runner, drawn, config)
        source = ReplicaBatches(batches, config, self._part, runner)  # type: ignore[arg-type]
        # Rows are requested for several batches at once: all rounds have as many requests.
        at_once = batches_at_once(config.batch_size // place.num_replicas)
        self._num_steps = at_once * max(1, LEAST_STEPS // at_once)
        num_steps = NUM_ROUNDS * (WARMUP_STEPS + self._num_steps)
        cursors = [TrainingCursor(0, step, step) for step in range(num_steps)]
        self._feed = iter(BatchFeed(source.training_batch, cursors))
        self._gradients: dict[torch.Size, Tensor] = {}
        self._group = place.group

    def seconds_of_step(self) -> Seconds:
        """Return the mean over a round's steps, after some that warm up."""
        if self._group is not None:
            # A slow machine works on steps alone for longer than replicas wait for rows.
            dist.barrier(self._group)
        self._take_steps(WARMUP_STEPS)
        started = threads_seconds()
        self._take_steps(self._num_steps)
        return Seconds(*(seconds / self._num_steps for seconds in threads_seconds() - started))

    def _take_steps(self, num_steps: int) -> None:
        for _, microbatches in islice(self._feed, num_steps):
            train(self._part, microbatches, self._gradients)


class ReadBatches:
    """Stands for a prepared data set of endless epochs; a replica's rows are in memory already, in turns."""

    def __init__(self, runner: StageRunner, drawn: list[ClickBatch], config: TrainingConfig) -> None:
        slices = runner.row_slices(config.batch_size, config.num_microbatches)
        rows = np.concatenate([np.arange(mine.first, mine.stop) for _, mine in slices])
        # As many as are read together follow each batch.
        turns = [*drawn, *islice(cycle(drawn), batches_at_once(len(rows)))]
        self._batches = ClickBatch(
            dense=torch.cat([batch.dense[rows] for batch in turns]),
            ids=torch.cat([batch.ids[rows] for batch in turns]),
            labels=torch.cat([batch.labels[rows] for batch in turns]),
        )
        self._size, self._num_turns, self._next = len(rows), len(drawn), 0

    def num_batches(self, batch_size: int) -> int:
        """Return the batches of an epoch."""
        return ENDLESS

    def batch_rows(self, epoch: int, batch_indices: object, **others: Any) -> npt.NDArray[np.int64]:
        """Return row indices, of which only the number counts."""
        return np.asarray(others["positions"])

    def batch(self, rows: npt.NDArray[np.int64]) -> ClickBatch:
        """Return the next batches."""
        first = self._size * self._next
        self._next = (self._next + len(rows) // self._size) % self._num_turns
        return self._batches.rows(first, first + len(rows))


def train(part: StageModel, microbatches: list[MicroBatch], gradients: dict[torch.Size, Tensor]) -> None:
    """Run a step of the embeddings of a stage; gradients are kept by their shape."""
    leaving = []
    for microbatch in microbatches:
        for table, looked_up in microbatch.announced:
            table.expect(looked_up)
        embeddings = [layer for layer in part.layers.values() if isinstance(layer, SlotEmbedding)]
        leaving.append([layer(microbatch.batch) for layer in embeddings])
    for found in leaving:
        for rows_BW in found:
            if rows_BW.shape not in gradients:
                gradients[rows_BW.shape] = torch.full(rows_BW.shape, 1e-5)
        torch.autograd.backward(found, [gradients[rows_BW.shape] for rows_BW in found])
    part.update_rows(LEARNING_RATE)


def threads_seconds() -> Seconds:
    """Return the processor time of this process and of its two threads of Python."""
    feeds = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("batches")]
    times = [Path(f"/proc/self/task/{feed}/schedstat").read_text(encoding="utf-8") for feed in feeds]
    of_feed = sum(int(each.split()[0]) for each in times) / 1e9
    return Seconds(processor_seconds(), time.thread_time(), of_feed)
