"""Measures what the workers of a plan cost this machine: all of them at once, each without the other stages.

Every worker is the trainer's, with its layers, its feed, its replicas and its update; only the stages beside it are
made up, so that passes wait for nothing and no rows travel between them. What it costs to send rows is measured
between two of the processes afterwards (`message_measurement`).

Run as a program: python -m heterps_core.profiling.worker_profiler FOLDER, with `job.json` in the folder;
`measuring_process` does that. It starts the workers itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from multiprocessing.connection import wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.data.dataset import PreparedDataset
from heterps_core.profiling.lone_worker import LoneRunner
from heterps_core.profiling.measuring_process import COSTS_NAME, JOB_NAME
from heterps_core.profiling.message_measurement import measure_messages, message_costs
from heterps_core.profiling.worker_costs import MessageCosts, StageCosts, WorkerCosts
from heterps_core.training.batch_feed import BatchFeed
from heterps_core.training.cursor import TrainingCursor
from heterps_core.training.job import TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.run_directory import RunDirectory
from heterps_core.training.shared_memory_link import SharedMemoryLink
from heterps_core.training.stage_model import build_stage_model
from heterps_core.training.stage_runner import MicroBatch
from heterps_core.units import BYTES_PER_FLOAT32

STORE_NAME = "store"
"""File in the folder by which the processes find one another."""

TIMEOUT = timedelta(seconds=120)
NUM_WARMUP_STEPS = 3
MEASURED_S = 1.0
MIN_STEPS = 6


class StepSeconds(NamedTuple):
    """What a step took; core seconds of the layers' thread where nothing else is said."""

    forward: float
    backward: float
    weight_gradients: float
    gradient_sum: float
    update: float
    other_threads: float
    """Of all other threads, since the start of the process."""


class WorkerSteps(NamedTuple):
    """What one worker measured."""

    stage: int
    num_weight_gradients: int
    """Of a step."""

    updates_together: bool
    output_bytes_per_row: int
    steps: list[StepSeconds]


def take_part(rank: int, folder: Path, job: TrainingJob, together: Barrier) -> None:
    """Measure as one of the processes; the first writes what all found."""
    torch.set_num_threads(job.config.threads_per_worker)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    num_workers = sum(job.replicas_per_stage)
    store = (folder / STORE_NAME).absolute().as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_workers, timeout=TIMEOUT)
    own = measure_worker(job, rank, together)
    by_rank: list[Any] = [None] * num_workers
    dist.all_gather_object(by_rank, own)
    ends: list[Any] = [None] * num_workers
    if len(job.stages) > 1:
        dist.all_gather_object(ends, measure_messages(rank))
    if rank == 0:
        found = WorkerCosts(
            stages=tuple(stage_costs(job, stage, by_rank) for stage in range(len(job.stages))),
            message=message_costs(ends[:2]) if len(job.stages) > 1 else MessageCosts(),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        (folder / COSTS_NAME).write_text(json.dumps(found.to_json()), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure_worker(job: TrainingJob, rank: int, together: Barrier) -> WorkerSteps:
    """Train for some seconds beside all other workers, which call this too; what is learned is thrown away.

    Args:
        job: What to train.
        rank: Of this worker.
        together: Lets all workers begin a step at the same time.
    """
    firsts = np.cumsum([0, *job.replicas_per_stage]).tolist()
    layout = RankLayout(tuple(tuple(range(*ends)) for ends in pairwise(firsts)))
    stage, replica = layout.position(rank)
    groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in layout.ranks]
    group, link = None, None
    if job.replicas_per_stage[stage] > 1:
        group = groups[stage]
        link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=TIMEOUT.total_seconds())
    dataset = PreparedDataset.open(job.dataset)
    model = build_stage_model(job.model, dataset.features, job.config, job.stages, stage, group, link)
    runner = LoneRunner(
        list(model.layers.values()),
        layout=layout,
        stage=stage,
        replica=replica,
        input_width=model.input_width,
        output_width=model.output_width,
        group=group,
        precision=job.config.precision,
        silence_limit_s=TIMEOUT.total_seconds(),
        link=link,
    )
    loop = TrainingLoop(
        runner=runner,
        model=model,
        dataset=dataset,
        config=job.config,
        run=RunDirectory(job.dataset),
        group=group,
        ids_group=group if link is None else None,
        metrics=None,
        on_step=lambda step: None,
    )
    feed = iter(BatchFeed(loop.training_batch, _cursors(dataset, job.config.batch_size)))
    started_s = time.monotonic()
    for _ in range(NUM_WARMUP_STEPS):
        train_step(loop, runner, next(feed)[1])
    own_step_seconds = (time.monotonic() - started_s) / NUM_WARMUP_STEPS
    step_seconds = [own_step_seconds] * dist.get_world_size()
    dist.all_gather_object(step_seconds, own_step_seconds)
    steps = []
    for _ in range(max(int(MEASURED_S / max(step_seconds)), MIN_STEPS)):
        # As in a pipeline, quick stages rest until slow ones are through, and leave them caches and memory.
        together.wait(TIMEOUT.total_seconds())
        steps.append(train_step(loop, runner, next(feed)[1]))
    return WorkerSteps(
        stage=stage,
        num_weight_gradients=runner.weight_gradients.num_put_off,
        updates_together=bool(model.tables) and group is not None,
        output_bytes_per_row=model.output_width * BYTES_PER_FLOAT32,
        steps=steps,
    )


def train_step(loop: TrainingLoop, runner: LoneRunner, microbatches: Sequence[MicroBatch]) -> StepSeconds:
    """Run a step as the training loop does."""
    started_s = time.thread_time()
    runner.train_step(microbatches)
    ended_s = time.thread_time()
    config = loop.config
    loop.model.apply_gradients(
        dense_learning_rate=config.dense_learning_rate, embedding_learning_rate=config.embedding_learning_rate
    )
    update = time.thread_time() - ended_s
    forward, weight_gradients, gradient_sum = (
        part.take() for part in (runner.forward, runner.weight_gradients, runner.gradient_sum)
    )
    return StepSeconds(
        forward=forward,
        backward=ended_s - started_s - forward - weight_gradients - gradient_sum,
        weight_gradients=weight_gradients,
        gradient_sum=gradient_sum,
        update=update,
        other_threads=time.process_time() - time.thread_time(),
    )


def stage_costs(job: TrainingJob, stage: int, workers: Sequence[WorkerSteps]) -> StageCosts:
    """Summarise what the replicas of a stage measured."""
    num_microbatches = job.config.num_microbatches
    replicas = [worker for worker in workers if worker.stage == stage]

    def typical(part: str) -> float:
        return fmean(median(getattr(step, part) for step in worker.steps) for worker in replicas)

    return StageCosts(
        forward_seconds=typical("forward") / num_microbatches,
        backward_seconds=typical("backward") / num_microbatches,
        weight_gradient_seconds=typical("weight_gradients") / num_microbatches,
        num_weight_gradients=replicas[0].num_weight_gradients // num_microbatches,
        gradient_sum_seconds=typical("gradient_sum"),
        update_seconds=typical("update"),
        reading_seconds=fmean(_reading_seconds(worker.steps) for worker in replicas),
        updates_together=replicas[0].updates_together,
        output_bytes_per_row=replicas[0].output_bytes_per_row,
    )


def _reading_seconds(steps: Sequence[StepSeconds]) -> float:
    """Return the core seconds of other threads in a step; there is none but the one that reads."""
    return (steps[-1].other_threads - steps[0].other_threads) / (len(steps) - 1)


def _cursors(dataset: PreparedDataset, batch_size: int) -> Iterator[TrainingCursor]:
    cursor = TrainingCursor()
    while True:
        yield cursor
        cursor = cursor.after_batch(dataset.num_batches(batch_size))


def main() -> None:
    """Measure with a process for each worker."""
    folder = Path(sys.argv[1])
    job = TrainingJob.from_json(json.loads((folder / JOB_NAME).read_text(encoding="utf-8")))
    # Forked processes have torch loaded already.
    multiprocessing.set_start_method("fork" if sys.platform == "linux" else "spawn")
    num_workers = sum(job.replicas_per_stage)
    together = multiprocessing.Barrier(num_workers)
    workers = [
        multiprocessing.Process(target=take_part, args=(rank, folder, job, together), daemon=True)
        for rank in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    while running := [worker for worker in workers if worker.is_alive()]:
        wait([worker.sentinel for worker in running])
        if any(worker.exitcode for worker in workers):
            # The others would wait for the one that failed.
            for worker in running:
                worker.kill()
            raise SystemExit(1)
    if any(worker.exitcode for worker in workers):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
