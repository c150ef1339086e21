"""Measures what the workers of a plan cost this machine: all of them train for a second, as they will.

The same layers cost up to a third more where stages share cores and caches. What is measured is core time, which
waits do not change; `dry_run_workers` simulates how the parts fit together. Run by `measuring_process`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.data.dataset import PreparedDataset
from heterps_core.profiling.measuring_process import REQUEST_NAME, RESULT_NAME, StageCosts, WorkerCosts
from heterps_core.profiling.timed_runner import TimedRunner
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.shared_memory_neighbours import connect_neighbours
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink

STORE_NAME = "store"

_FAILURE = "failure-"
"""Before the rank, the name of a file in which a worker says why it failed."""

TIMEOUT = timedelta(seconds=120)
NUM_WARMUP_STEPS = 3
MEASURED_S = 1.0
MIN_STEPS = 8
ENDLESS = 1_000_000


class StepSeconds(NamedTuple):
    """What a step took; core seconds of the layers' thread where nothing else is said."""

    forward: float
    backward: float
    weight_gradients: float
    gradient_sum: float
    update: float
    other_threads: float
    """Of all other threads, since the start of the process."""

    whole: float
    """By the clock, with waits."""


class WorkerSteps(NamedTuple):
    """What one worker measured."""

    stage: int
    num_weight_gradients: int
    updates_together: bool
    steps: list[StepSeconds]


class EnoughError(Exception):
    """Ends the training when enough was measured."""


class StepTimer:
    """Told after each step, it notes what the parts of the step took.

    All workers agree behind the warm-up on how many steps are measured.
    """

    def __init__(self, runner: TimedRunner) -> None:
        self.steps: list[StepSeconds] = []
        self._runner = runner
        self._started_s = time.monotonic()
        self._num_steps = 0
        self._ended_core_s = 0.0
        self._ended_s = self._started_s

    def __call__(self, step: int) -> None:
        """Note step number `step`, counted from 1.

        Raises:
            EnoughError: It was the last one.
        """
        runner = self._runner
        step_seconds, forward, weight_gradients, gradient_sum = (
            part.take()
            for part in (runner.step, runner.forward, runner.weight_gradients, runner.gradient_sum)
        )
        ended_core_s, ended_s = time.thread_time(), time.monotonic()
        if step > NUM_WARMUP_STEPS:
            self.steps.append(
                StepSeconds(
                    forward=forward,
                    backward=step_seconds - forward - weight_gradients - gradient_sum,
                    weight_gradients=weight_gradients,
                    gradient_sum=gradient_sum,
                    update=ended_core_s - self._ended_core_s - step_seconds,
                    other_threads=time.process_time() - time.thread_time(),
                    whole=ended_s - self._ended_s,
                )
            )
        if step == NUM_WARMUP_STEPS:
            own_seconds = (time.monotonic() - self._started_s) / NUM_WARMUP_STEPS
            of_all = [own_seconds] * dist.get_world_size()
            dist.all_gather_object(of_all, own_seconds)
            self._num_steps = max(int(MEASURED_S / max(of_all)), MIN_STEPS)
            ended_core_s, ended_s = time.thread_time(), time.monotonic()
        if len(self.steps) == self._num_steps > 0:
            raise EnoughError
        self._ended_core_s, self._ended_s = ended_core_s, ended_s


def take_part(rank: int, folder: Path, job: TrainingJob) -> None:
    """Measure as one of the processes; the first writes what all found."""
    torch.set_num_threads(job.config.num_threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_workers = sum(job.replicas_per_stage)
    store = (folder / STORE_NAME).absolute().as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_workers, timeout=TIMEOUT)
    own = measure_worker(job, rank)
    by_rank: list[Any] = [None] * num_workers
    dist.all_gather_object(by_rank, own)
    if rank == 0:
        found = WorkerCosts(
            stages=tuple(stage_costs(job, stage, by_rank) for stage in range(len(job.stages))),
            step_seconds=max(median(step.whole for step in worker.steps) for worker in by_rank),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        (folder / RESULT_NAME).write_text(json.dumps(found.to_json()), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure_worker(job: TrainingJob, rank: int) -> WorkerSteps:
    """Train for some seconds with all other workers, which call this too; what is learned is thrown away."""
    firsts = np.cumsum([0, *job.replicas_per_stage]).tolist()
    layout = RankLayout(tuple(tuple(range(*ends)) for ends in pairwise(firsts)))
    stage, replica = layout.position(rank)
    groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in layout.ranks]
    ids_groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in layout.ranks]
    group, ids_group, link = None, None, None
    if job.replicas_per_stage[stage] > 1:
        group = groups[stage]
        link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=TIMEOUT.total_seconds())
        ids_group = ids_groups[stage]
    dataset = PreparedDataset.open(job.dataset)
    config = replace(job.config, num_epochs=ENDLESS)
    model = build_stage_model(job.model, dataset.features, config, job.stages, stage, group, link)
    runner = TimedRunner(
        list(model.layers.values()),
        layout=layout,
        stage=stage,
        replica=replica,
        input_width=model.input_width,
        output_width=model.output_width,
        group=group,
        precision=config.precision,
        wire_dtype=config.wire_dtype,
        silence_limit_s=TIMEOUT.total_seconds(),
        link=link,
        neighbours=connect_neighbours(layout, rank=rank),
    )
    timer = StepTimer(runner)
    loop = TrainingLoop(
        runner=runner,
        model=model,
        dataset=dataset,
        config=config,
        run=RunDirectory(job.dataset),
        group=group,
        ids_group=ids_group,
        checkpoints=None,
        metrics=None,
        on_step=timer,
    )
    dist.barrier()
    with suppress(EnoughError):
        loop.train(TrainingCursor())
    return WorkerSteps(
        stage=stage,
        num_weight_gradients=runner.weight_gradients.num_put_off,
        updates_together=bool(model.tables) and group is not None,
        steps=timer.steps,
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
        # Of the thread that reads, and of messages over sockets.
        reading_seconds=fmean(
            (worker.steps[-1].other_threads - worker.steps[0].other_threads) / (len(worker.steps) - 1)
            for worker in replicas
        ),
        updates_together=replicas[0].updates_together,
    )


def main() -> None:
    """Measure with a process for each worker."""
    folder = Path(sys.argv[1])
    job = TrainingJob.from_json(json.loads((folder / REQUEST_NAME).read_text(encoding="utf-8")))
    # Forked processes have torch loaded already.
    multiprocessing.set_start_method("fork")
    num_workers = sum(job.replicas_per_stage)
    workers = [
        multiprocessing.Process(target=_take_part_or_say, args=(rank, folder, job), daemon=True)
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
    if any(worker.exitcode for worker in workers):
        # Behind the tracebacks, of which those of other workers may be cut off by their end.
        said = [path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"{_FAILURE}*"))]
        raise SystemExit("\n".join(said) or "a worker was killed")


def _take_part_or_say(rank: int, folder: Path, job: TrainingJob) -> None:
    """Take part, and leave a line behind where that fails."""
    try:
        take_part(rank, folder, job)
    except Exception as error:
        line = f"worker {rank}: {type(error).__name__}: {error}"
        (folder / f"{_FAILURE}{rank}").write_text(line, encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
