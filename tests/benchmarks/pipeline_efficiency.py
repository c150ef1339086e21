"""What a model loses by being cut into stages, by replicas of unequal speeds, and by reading its data from disk.

A pipeline cannot be faster than its slowest stage. So each stage also runs alone, in the same process on the same
data: the same passes over the same layers and the same update, but for the whole batch at once, with activations and
gradients made up instead of sent. The limit is the slower one of

- the slowest stage's own speed, and
- the speed at which the cores would do the work of all stages, where there are fewer cores than stages.

The first lets every stage run while the others rest. Processors also share memory bandwidth and, on a busy machine,
cores with other programs; so all stages run alone at the same time as well, and the speed of the slowest of them then
is the second reference ("side by side"). On a busy machine both ratios say as much of the other programs as of the
pipeline: a stage that waited for a message waits for a core once more. What cutting adds to the work itself is in the
core time of a step, all threads included, over that of the stages side by side.

The pipeline runs in both update modes: with `sync` it drains at the end of each step, with `delayed` it does not.

Of two replicas of one stage, the second is stopped for two of each three 4 ms by signals, so it has a third of the
other's speed, whatever it does. Each trains on its own beside the other, then both together: first with equal shares
of each batch, then with those that the training has measured. Their samples/s are held against the sum of their own.

Ways alternate within each round; each figure is the median of the rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training import loop as training_loop
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.job import DELAYED, UPDATE_MODES, TrainingConfig, default_microbatches
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import (
    ALONE,
    StagePlace,
    connect_neighbours,
    join_stage,
    world_group,
)
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.replica_batches import BatchFeed
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.one_step import train_one_step
from tests.worker_processes import run_in_processes

LEARNING_RATES = {"dense_learning_rate": 1e-3, "embedding_learning_rate": 0.05}
MODEL = "ctrdnn"
FIRST_LAYERS = {"two_stages": (0, 3), "three_stages": (0, 1, 3)}
"""Embedding and first hidden layer before the other two; the embedding alone, then one, then two."""

NUM_LAYERS = 8
BATCH_SIZE = 4_096
BUCKETS_PER_SLOT = 40_000
NUM_ROUNDS = 15
NUM_READING_ROUNDS = 5
STEPS_PER_ROUND = 10
NUM_CLICKS = 100_000
NUM_UNEQUAL_RUNS = 3
STEPS_PER_CHECKPOINT, STEPS_TOGETHER, SETTLED_PARTS = 64, 256, 2
FIRST_STEP, LAST_STEP, LAST_EQUAL_STEP = 3, 62, 31
"""Of those after a checkpoint, without the steps that fill the pipeline; and the last before shares may change."""
ALONE_S = 10.0


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    figures = []
    for name, first_layers in FIRST_LAYERS.items():
        rounds = measure_pipeline(first_layers, seed)
        num_microbatches = default_microbatches(BATCH_SIZE, num_stages=len(first_layers))
        print(f"{name}: layers from {first_layers}, {num_microbatches} micro-batches")
        print_rounds(rounds)
        figures += [
            figure(f"{name}_over_slowest", [r["delayed"] / own_limit(r) for r in rounds]),
            figure(f"{name}_over_slowest_sync", [r["sync"] / own_limit(r) for r in rounds]),
            figure(f"{name}_over_slowest_side_by_side", [r["delayed"] / r["side_by_side"] for r in rounds]),
            figure(f"{name}_over_slowest_side_by_side_sync", [r["sync"] / r["side_by_side"] for r in rounds]),
            figure(f"{name}_delayed_over_sync", [r["delayed"] / r["sync"] for r in rounds]),
            figure(
                f"{name}_core_time_over_uncut",
                [r["core_s_delayed"] / r["core_s_side_by_side"] for r in rounds],
                higher_is_better=False,
            ),
        ]
    runs = [measure_unequal_replicas(seed + number) for number in range(NUM_UNEQUAL_RUNS)]
    by_shares = {
        "equal": [run[0] for run in runs],
        "measured": [part for run in runs for part in run[SETTLED_PARTS:]],
    }
    for way, parts in by_shares.items():
        print(f"two replicas, {way} shares")
        print_rounds(parts)
        ratios = [part["together"] / (part["fast"] + part["slow"]) for part in parts]
        figures.append(figure(f"{way}_shares_over_sum_of_replicas", ratios))
    for name, shares in measure_reading(seed).items():
        figures.append(figure(name, shares, higher_is_better=False))
    print(
        f"{MODEL}, batch {BATCH_SIZE}, medians of {NUM_ROUNDS} rounds of {STEPS_PER_ROUND} steps, seed {seed}, "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    )
    for entry in figures:
        print(f"{entry['name']:<44}{entry['value']:>8.3f}")
    return figures


def own_limit(speeds: dict[str, float]) -> float:
    """Return the samples/s that no cut of this kind can pass, from the stages' speeds alone."""
    seconds = [1 / speed for name, speed in speeds.items() if name.startswith("stage_")]
    return 1 / max(*seconds, sum(seconds) / (os.cpu_count() or 1))


def measure_pipeline(first_layers: tuple[int, ...], seed: int) -> list[dict[str, float]]:
    """Return for each round samples/s of each stage alone, of all side by side, and of the pipeline."""
    by_rank = run_in_processes(run_stage, len(first_layers), first_layers, seed)
    rounds = []
    for parts in zip(*by_rank, strict=True):
        speeds = {f"stage_{stage}": part["alone"] for stage, part in enumerate(parts)}
        for way in ("side_by_side", *UPDATE_MODES):
            speeds[way] = min(part[way] for part in parts)
            speeds[f"core_s_{way}"] = sum(part[f"core_s_{way}"] for part in parts)
        rounds.append(speeds)
    return rounds


def run_stage(rank: int, first_layers: tuple[int, ...], seed: int) -> list[dict[str, float]]:
    """Measure one stage; one process for each."""
    lasts = [*(first - 1 for first in first_layers[1:]), NUM_LAYERS - 1]
    stages = [Stage(first, last, "cpu", 1) for first, last in zip(first_layers, lasts, strict=True)]
    config = TrainingConfig(
        batch_size=BATCH_SIZE,
        num_microbatches=default_microbatches(BATCH_SIZE, num_stages=len(stages)),
        num_epochs=1,
        seed=seed,
    )
    features = FeatureSpec(num_dense=13, slot_rows=(BUCKETS_PER_SLOT,) * 26)
    layout = RankLayout(tuple((stage,) for stage in range(len(stages))))
    # The lone stage has neighbours without replicas, which `unplug` replaces.
    place = StagePlace(layout=layout, stage=rank, neighbours={number: [] for number in range(len(stages))})
    model = build_stage_model(MODEL, features, config, stages, place)
    batches = [draw_batch(features, np.random.default_rng([seed, index])) for index in range(4)]
    piped = {
        mode: StageRunner(
            model,
            replace(config, update_mode=mode),
            replace(place, neighbours=connect_neighbours(layout, rank=rank)),
        )
        for mode in UPDATE_MODES
    }
    lone = StageRunner(model, config, place)
    unplug(lone, model)

    def measure(runner: StageRunner, num_microbatches: int) -> tuple[float, float]:
        """Return samples/s and core seconds per step, those of the threads that send and receive included."""
        started_s, started_core_s = time.perf_counter(), time.process_time()
        for step in range(STEPS_PER_ROUND):
            batch = batches[step % len(batches)]
            microbatches = cut(runner, batch, num_microbatches)
            is_followed = step + 1 < STEPS_PER_ROUND
            following = microbatches if is_followed else []
            train_one_step(model, runner, microbatches, following=following, **LEARNING_RATES)
        elapsed_s, core_s = time.perf_counter() - started_s, time.process_time() - started_core_s
        return STEPS_PER_ROUND * BATCH_SIZE / elapsed_s, core_s / STEPS_PER_ROUND

    rounds = []
    for _ in range(NUM_ROUNDS + 1):
        speeds = {}
        for stage in range(len(stages)):
            dist.barrier()
            if stage == rank:
                speeds["alone"], _ = measure(lone, 1)
        dist.barrier()
        speeds["side_by_side"], speeds["core_s_side_by_side"] = measure(lone, 1)
        for mode, runner in piped.items():
            dist.barrier()
            speeds[mode], speeds[f"core_s_{mode}"] = measure(runner, config.num_microbatches)
        rounds.append(speeds)
    return rounds[1:]


class MadeUp:
    """Stands where a neighbouring stage would be: what comes from it is always there."""

    silence_limit_s = 0.0
    packed = None

    def __init__(self, width: int) -> None:
        self._rows_BW = torch.randn(BATCH_SIZE, width) / BATCH_SIZE

    def receive(self, num_rows: int) -> MadeUp:
        """Begin to receive nothing."""
        assert num_rows == BATCH_SIZE
        return self

    def is_there(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> Tensor:
        """Return the same rows again."""
        return self._rows_BW.detach()

    def send(self, rows_BW: Tensor, num_rows: int, counts_BS: Tensor | None) -> None:
        """Send nothing."""

    def end_step(self, *, is_drained: bool) -> None:
        """Wait for nothing."""


def unplug(runner: StageRunner, model: StageModel) -> None:
    """Put synthetic neighbours beside a stage, so that it does all of its own work and no other."""
    if runner._before is not None:
        runner._before = MadeUp(model.input_width)  # type: ignore[assignment]
    if runner._after is not None:
        runner._after = MadeUp(model.output_width)  # type: ignore[assignment]


def draw_batch(features: FeatureSpec, random: np.random.Generator) -> ClickBatch:
    """Return synthetic clicks; squared, so that low row indices come more often."""
    return ClickBatch.from_numpy(
        random.standard_normal((BATCH_SIZE, features.num_dense), dtype=np.float32),
        (random.random((BATCH_SIZE, features.num_slots)) ** 2 * BUCKETS_PER_SLOT).astype(np.int64),
        random.integers(0, 2, BATCH_SIZE).astype(np.float32),
    )


def cut(runner: StageRunner, batch: ClickBatch, num_microbatches: int) -> list[MicroBatch]:
    """Cut a batch into micro-batches."""
    return [
        MicroBatch(size, batch.rows(rows.first, rows.stop))
        for size, rows in runner.row_slices(batch.num_rows, num_microbatches)
    ]


def measure_unequal_replicas(seed: int) -> list[dict[str, float]]:
    """Return samples/s of two replicas alone and together: in parts, the first with equal shares of batches."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), seed)
        by_rank = run_in_processes(train_unequal_replica, 2, folder, seed)
    return [
        {"fast": fast["alone"], "slow": slow["alone"], "together": fast["together"]}
        for fast, slow in zip(*by_rank, strict=True)
    ]


def train_unequal_replica(rank: int, folder: str, seed: int) -> list[dict[str, float]]:
    """Train with the other replica; after each checkpoint train alone for some seconds, beside the other."""
    # Speeds are compared between machines; here each process is one.
    training_loop.machine_name = lambda: f"machine {rank}"  # type: ignore[attr-defined]
    dataset, run = PreparedDataset.open(f"{folder}/prepared"), RunDirectory(folder)
    config = TrainingConfig(
        batch_size=BATCH_SIZE,
        num_microbatches=1,
        num_epochs=STEPS_TOGETHER,
        max_steps=STEPS_TOGETHER,
        seed=seed,
        checkpoint_interval_steps=STEPS_PER_CHECKPOINT,
        update_mode=DELAYED,
    )
    stages = [Stage(0, NUM_LAYERS - 1, "cpu", 2)]
    place = join_stage(RankLayout(((0, 1),)), rank, new_group=world_group, is_on_one_node=False)
    alone = new_loop(dataset, run, seed)
    batches = iter(BatchFeed(alone.batches.training_batch, endless(alone)))
    train(alone, next(batches)[1])
    parts: list[dict[str, float]] = []
    begun_s = [0.0]

    def after_step(step: int) -> None:
        at = step % STEPS_PER_CHECKPOINT
        if at == FIRST_STEP:
            parts.append({"alone": speed_alone(alone, batches)})
            begun_s[0] = time.perf_counter()
        elif step == LAST_EQUAL_STEP or at == LAST_STEP:
            num_rows = (at - FIRST_STEP) * BATCH_SIZE
            parts[-1].setdefault("together", num_rows / (time.perf_counter() - begun_s[0]))

    together = TrainingLoop.of(MODEL, dataset, config, stages, place, run=run, on_step=after_step)
    writer = CheckpointWriter(run, together.model, group=place.group, world=place.checkpoint_group)
    with throttled() if rank == 1 else nullcontext():
        replace(together, checkpoints=writer).train(TrainingCursor())
        dist.barrier()
    batches.close()
    return parts


def speed_alone(loop: TrainingLoop, batches: Iterator[tuple[TrainingCursor, list[MicroBatch]]]) -> float:
    """Return samples/s of a replica on its own, while the other trains on its own."""
    dist.barrier()
    started_s, num_steps, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < ALONE_S:
        train(loop, next(batches)[1])
        num_steps, elapsed_s = num_steps + 1, time.perf_counter() - started_s
    dist.barrier()
    return num_steps * BATCH_SIZE / elapsed_s


def endless(loop: TrainingLoop) -> Iterator[TrainingCursor]:
    """Yield batches without end."""
    while True:
        yield from cursors(loop)


@contextmanager
def throttled() -> Iterator[None]:
    """Stop this process for two thirds of the time while the block runs."""
    command = [sys.executable, "-c", THROTTLE, str(os.getpid())]
    with subprocess.Popen(command) as throttle:
        try:
            yield
        finally:
            throttle.terminate()


THROTTLE = """
import os, signal, sys, time
process, ended = int(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
try:
    while not ended:
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.008)
        os.kill(process, signal.SIGCONT)
        time.sleep(0.004)
except ProcessLookupError:
    pass
"""


def prepare(folder: Path, seed: int) -> PreparedDataset:
    """Return synthetic clicks as a training reads them."""
    stream = write_click_stream(folder / "clicks.tsv", num_rows=NUM_CLICKS, seed=seed)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=BUCKETS_PER_SLOT, out_dir=folder / "prepared"
    )


def measure_reading(seed: int) -> dict[str, list[float]]:
    """Return shares of the time of one process that trains from disk: waiting for batches, and reading inline."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            loop = new_loop(prepare(Path(folder), seed), RunDirectory(folder), seed)
            shares: dict[str, list[float]] = {
                "share_of_time_waiting_for_data": [],
                "share_of_time_reading_inline": [],
            }
            for _ in range(NUM_READING_ROUNDS + 1):
                shares["share_of_time_waiting_for_data"].append(share_waiting(loop))
                shares["share_of_time_reading_inline"].append(share_reading(loop))
    finally:
        torch.set_num_threads(threads_before)
    return {name: values[1:] for name, values in shares.items()}


def new_loop(dataset: PreparedDataset, run: RunDirectory, seed: int) -> TrainingLoop:
    """Return the loop of a run with one worker."""
    config = TrainingConfig(batch_size=BATCH_SIZE, num_microbatches=1, num_epochs=1, seed=seed)
    stages = [Stage(0, NUM_LAYERS - 1, "cpu", 1)]
    return TrainingLoop.of(MODEL, dataset, config, stages, ALONE, run=run)


def share_waiting(loop: TrainingLoop) -> float:
    """Train an epoch from the feed; return the share of the time in which there was no batch."""
    started_s = time.perf_counter()
    feed = BatchFeed(loop.batches.training_batch, cursors(loop))
    for _, microbatches in feed:
        train(loop, microbatches)
    return feed.waited_s / (time.perf_counter() - started_s)


def share_reading(loop: TrainingLoop) -> float:
    """Train an epoch and read each batch when it is needed; return the share of the time for that."""
    started_s, reading_s = time.perf_counter(), 0.0
    for cursor in cursors(loop):
        before_s = time.perf_counter()
        microbatches = loop.batches.training_batch(cursor)
        reading_s += time.perf_counter() - before_s
        train(loop, microbatches)
    return reading_s / (time.perf_counter() - started_s)


def train(loop: TrainingLoop, microbatches: Sequence[MicroBatch]) -> None:
    """Run one step."""
    train_one_step(loop.model, loop.runner, microbatches, **LEARNING_RATES)


def cursors(loop: TrainingLoop) -> Iterator[TrainingCursor]:
    """Yield the batches of one epoch."""
    num_batches = loop.dataset.num_batches(BATCH_SIZE)
    cursor = TrainingCursor()
    while cursor.epoch == 0:
        yield cursor
        cursor = cursor.after_batch(num_batches)


def print_rounds(rounds: list[dict[str, float]]) -> None:
    """Print thousands of samples/s by way and round."""
    for way in rounds[0]:
        unit, scale = ("ms a step", 1e3) if way.startswith("core_s") else ("k samples/s", 1e-3)
        values = [scale * speeds[way] for speeds in rounds]
        print(
            f"  {way:<20}{statistics.median(values):>8.1f} {unit:<12}", *(f"{value:6.1f}" for value in values)
        )


def figure(name: str, values: Sequence[float], *, higher_is_better: bool = True) -> dict[str, Any]:
    """Return the median as one figure in the form of the benchmark contract."""
    value = float(np.round(statistics.median(values), 4))
    return {"name": name, "value": value, "unit": "ratio", "higher_is_better": higher_is_better}
