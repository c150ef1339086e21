"""Trains the workers of a plan on this machine for a second and times a step: the reward of a search by measuring.

Run by `measuring_process`, a process for each worker; the trained weights are thrown away.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from heterps_core.data.dataset import PreparedDataset
from heterps_core.profiling.measuring_process import REQUEST_NAME, RESULT_NAME
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import SYNC, TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_place import join_stage, world_group
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.rank_layout import RankLayout

_STORE_NAME = "store"

TIMEOUT = timedelta(seconds=120)
NUM_WARMUP_STEPS = 3
MEASURED_S = 1.0
_MIN_STEPS = 8
ENDLESS = 1_000_000


class _EnoughError(Exception):
    """Ends the training when enough was measured."""


class _StepTimer:
    """Notes the seconds of each step after the warm-up; all workers agree on the number of steps."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self._ended_s = self._started_s = time.monotonic()
        self._num_steps = 0

    def __call__(self, step: int) -> None:
        """Note the end of a step, counted from 1.

        Raises:
            _EnoughError: It was the last one.
        """
        if step > NUM_WARMUP_STEPS:
            self.step_seconds.append(time.monotonic() - self._ended_s)
        elif step == NUM_WARMUP_STEPS:
            own_seconds = (time.monotonic() - self._started_s) / NUM_WARMUP_STEPS
            self._num_steps = max(int(MEASURED_S / max(gather_json(own_seconds))), _MIN_STEPS)
        if len(self.step_seconds) == self._num_steps > 0:
            raise _EnoughError
        self._ended_s = time.monotonic()


def _take_part(rank: int, folder: Path, job: TrainingJob) -> None:
    """Train as one of the processes; the first writes the time of a step of the slowest."""
    torch.set_num_threads(job.config.num_threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_workers = sum(job.replicas_per_stage)
    store = (folder / _STORE_NAME).absolute().as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_workers, timeout=TIMEOUT)
    by_rank = gather_json(median(_train_some_steps(job, rank)))
    if rank == 0:
        (folder / RESULT_NAME).write_text(json.dumps(max(by_rank)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _train_some_steps(job: TrainingJob, rank: int) -> list[float]:
    """Train together with all other workers, which call this too; return the seconds of each step."""
    firsts = np.cumsum([0, *job.replicas_per_stage]).tolist()
    layout = RankLayout(tuple(tuple(range(*ends)) for ends in pairwise(firsts)), job.shares)
    limit_s = TIMEOUT.total_seconds()
    place = join_stage(layout, rank, new_group=world_group, silence_limit_s=limit_s)
    dataset, run = PreparedDataset.open(job.dataset), RunDirectory(job.dataset)
    config = replace(job.config, num_epochs=ENDLESS, update_mode=SYNC)
    timer = _StepTimer()
    loop = TrainingLoop.of(job.model, dataset, config, job.stages, place, run=run, on_step=timer)
    dist.barrier()
    with suppress(_EnoughError):
        loop.train(TrainingCursor())
    return timer.step_seconds


def main() -> None:
    """Measure with a process for each worker."""
    folder = Path(sys.argv[1])
    job = TrainingJob.from_json(json.loads((folder / REQUEST_NAME).read_text(encoding="utf-8")))
    try:
        # Forked processes have torch loaded already. Where one fails, the others are ended, which would wait for it.
        start_processes(_take_part, (folder, job), sum(job.replicas_per_stage), start_method="fork")  # type: ignore[no-untyped-call]
    except ProcessException as error:
        raise SystemExit(f"worker {error.error_index}: {str(error).strip().splitlines()[-1]}") from None


if __name__ == "__main__":
    main()
