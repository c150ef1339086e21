"""One worker's part of a job in a process that the test has joined to the others itself."""

from __future__ import annotations

from heterps_core.training.job import TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.node.worker_life import SignsOfLife
from heterps_core.training.pipeline.stage_place import join_stage, world_group
from heterps_core.training.replica_batches import spread
from heterps_core.training.storage.run_directory import JOB, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json
from heterps_core.training.worker import worker_loop
from heterps_core.transport.rank_layout import RankLayout


def training_loop_of(rank: int, run: RunDirectory) -> tuple[TrainingJob, TrainingLoop]:
    """Return a submitted job and the loop that a worker trains it by; all ranks call it together."""
    job = TrainingJob.from_json(read_signed_json(run, JOB))
    counts = job.replicas_per_stage
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    layout = RankLayout(
        tuple(tuple(range(first, first + count)) for first, count in zip(firsts, counts, strict=True)),
        job.shares,
    )
    place = join_stage(layout, rank, new_group=world_group, is_on_one_node=False)
    return job, worker_loop(run, job, place, SignsOfLife(rank, attempt=1))


def predicted_rows(loop: TrainingLoop) -> list[int]:
    """Return the held-out rows of this replica in the order in which it predicts them."""
    found: list[int] = []
    for index in range(-(-loop.dataset.num_eval_rows // loop.config.batch_size)):
        rows = loop.dataset.held_out_rows(index, batch_size=loop.config.batch_size)
        slices = loop.runner.row_slices(len(rows), loop.config.num_microbatches)
        found += rows[spread(len(rows), loop.config.num_microbatches, slices)].tolist()
    return found
