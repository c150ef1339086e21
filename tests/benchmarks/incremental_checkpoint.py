"""What a checkpoint of changed rows writes and holds up: CTR-DNN, ids by Zipf's law, one worker, a local folder.

Each of the 26 columns has as many rows as the table gives it, and draws its ids with probabilities 1 / rank^s; ranks
are spread over the rows. The interval is counted in steps: what matters is how many look-ups there are for each row
of the table. The README's night has 0.11 in ten minutes (55,000 samples/s of 26 columns, 7.8e9 rows); three times as
many are taken here. Shares of the processor's time are those of the training's own thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.data.batch import ClickBatch
from heterps_core.embeddings.row_kernels import row_kernels
from heterps_core.training.checkpoint import TrainingCursor, complete_checkpoints, read_checkpoint
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.storage.run_directory import RunDirectory
from tests.benchmarks.training_engine import (
    BATCH_SIZE,
    LEARNING_RATES,
    NUM_DENSE,
    NUM_SLOTS,
    _make_replica,
)
from tests.one_step import train_one_step

NUM_ROWS = 26_000_000
SKEW = 1.05
INTERVAL_STEPS = 80
"""8.5 M look-ups, 0.33 for each row."""

NUM_CHECKPOINTS = 3
NUM_ROUNDS = 5
"""Of marking: steps with it and without, in turns."""

STEPS_PER_ROUND = 10


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Train with checkpoints, print a table and return its figures in the form of the benchmark contract."""
    torch.set_num_threads(1)
    row_kernels()
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(minutes=5))
        try:
            found = measure(RunDirectory(f"{folder}/run"), seed)
        finally:
            dist.destroy_process_group()
    for name, (value, unit) in found.items():
        print(f"{name:<44}{value:>14.4f} {unit}")
    return [
        {"name": name, "value": round(value, 5), "unit": unit, "higher_is_better": False}
        for name, (value, unit) in found.items()
    ]


def measure(run_directory: RunDirectory, seed: int) -> dict[str, tuple[float, str]]:
    """Return figures with their units."""
    model, runner = _make_replica(NUM_ROWS, "float32", seed, 0, None, 1, False)
    batches = zipf_batches(seed)
    marking = marking_share(model, runner, batches)
    writer = CheckpointWriter(run_directory, model, group=None, world=None)
    writer.begin(0)
    started_s, started_core_s = time.perf_counter(), time.thread_time()
    blocked_s, blocked_core_s = [], []
    for step in range(1, NUM_CHECKPOINTS * INTERVAL_STEPS + 1):
        train(model, runner, batches[step % len(batches)])
        writer.check()
        if step % INTERVAL_STEPS == 0:
            before_s, before_core_s = writer.blocked_s, time.thread_time()
            writer.save(TrainingCursor(step=step))
            blocked_s.append(writer.blocked_s - before_s)
            blocked_core_s.append(time.thread_time() - before_core_s)
    total_s, total_core_s = time.perf_counter() - started_s, time.thread_time() - started_core_s
    writer.finish()
    newest = read_checkpoint(run_directory, complete_checkpoints(run_directory)[-1])
    whole = next(layer.tensors.num_bytes for layer in newest.layers if layer.folder.endswith("-whole"))
    written = [layer.tensors.num_bytes for layer in newest.layers if not layer.folder.endswith("-whole")]
    return {
        "table_rows": (float(NUM_ROWS), "rows"),
        "interval_lookups_over_rows": (INTERVAL_STEPS * BATCH_SIZE * NUM_SLOTS / NUM_ROWS, "ratio"),
        "whole_checkpoint_bytes": (float(whole), "bytes"),
        "incremental_bytes_over_whole": (statistics.median(written) / whole, "ratio"),
        "training_blocked_seconds": (statistics.median(blocked_s), "s"),
        "training_blocked_share": (sum(blocked_s) / total_s, "ratio"),
        "training_blocked_core_seconds": (statistics.median(blocked_core_s), "s"),
        "training_blocked_core_share": (sum(blocked_core_s) / total_core_s, "ratio"),
        "marking_changed_rows_over_step": (marking, "ratio"),
    }


def zipf_batches(seed: int) -> list[ClickBatch]:
    """Return the batches of all steps; each rank has a row of its own in each column."""
    drawn = np.random.default_rng(seed)
    rows = NUM_ROWS // NUM_SLOTS
    cumulated = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -SKEW)
    spread = [drawn.permutation(rows) for _ in range(NUM_SLOTS)]

    def ids() -> torch.Tensor:
        ranks = np.searchsorted(cumulated, drawn.random((NUM_SLOTS, BATCH_SIZE)) * cumulated[-1])
        return torch.from_numpy(np.stack([spread[slot][ranks[slot]] for slot in range(NUM_SLOTS)], 1))

    return [
        ClickBatch(
            dense=torch.randn(BATCH_SIZE, NUM_DENSE),
            ids=ids(),
            labels=torch.randint(0, 2, (BATCH_SIZE,)).float(),
        )
        for _ in range(NUM_CHECKPOINTS * INTERVAL_STEPS)
    ]


def train(model: StageModel, runner: StageRunner, batch: ClickBatch) -> None:
    """Train one step."""
    train_one_step(model, runner, [MicroBatch(BATCH_SIZE, batch)], **LEARNING_RATES)


def marking_share(model: StageModel, runner: StageRunner, batches: list[ClickBatch]) -> float:
    """Return by how much of a step's processor time the marks of changed rows make it longer; medians in turns."""
    (table,) = model.tables.values()
    marks = table._changed_R
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(NUM_ROUNDS):
        for marked in (True, False):
            table._changed_R = marks if marked else None  # type: ignore[assignment]
            begun_s = time.process_time()
            for batch in batches[number * STEPS_PER_ROUND : (number + 1) * STEPS_PER_ROUND]:
                train(model, runner, batch)
            taken[marked].append(time.process_time() - begun_s)
    table._changed_R = marks
    return statistics.median(taken[True]) / statistics.median(taken[False]) - 1
