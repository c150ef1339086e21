"""One worker's part of a job in a process that the test has joined to the others itself."""

from __future__ import annotations

import os

import torch.distributed as dist

from heterps_core.compute_device import CPU
from heterps_core.training.job import TrainingJob
from heterps_core.training.loop import TrainingLoop, spread
from heterps_core.training.storage.run_directory import JOB, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json
from heterps_core.training.worker import Worker
from heterps_core.transport.rank_layout import RankLayout


def training_loop_of(rank: int, run: RunDirectory) -> tuple[TrainingJob, TrainingLoop]:
    """Return a submitted job and the loop that a worker trains it by; all ranks call it together."""
    job = TrainingJob.from_json(read_signed_json(run, JOB))
    os.environ["RANK"] = str(rank)
    counts = job.replicas_per_stage
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    layout = RankLayout(
        tuple(tuple(range(first, first + count)) for first, count in zip(firsts, counts, strict=True))
    )
    groups, ids_groups = ([dist.new_group(list(members)) for members in layout.ranks] for _ in range(2))
    checkpoint_group = dist.new_group()
    worker = Worker(run)
    worker.stage, worker.replica = layout.position(rank)
    group = groups[worker.stage] if counts[worker.stage] > 1 else None
    loop = worker._build_loop(
        job,
        layout,
        device=CPU,
        group=group,
        device_group=group,
        ids_group=None if group is None else ids_groups[worker.stage],
        sum_group=None,
        checkpoint_group=checkpoint_group,
        link=None,
    )
    return job, loop


def predicted_rows(loop: TrainingLoop) -> list[int]:
    """Return the held-out rows of this replica in the order in which it predicts them."""
    found: list[int] = []
    for index in range(-(-loop.dataset.num_eval_rows // loop.config.batch_size)):
        rows = loop.dataset.held_out_rows(index, batch_size=loop.config.batch_size)
        slices = loop.runner.row_slices(len(rows), loop.config.num_microbatches)
        found += rows[spread(len(rows), loop.config.num_microbatches, slices)].tolist()
    return found
