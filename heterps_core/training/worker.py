"""One training process: finds its place in the plan, trains it, and says how it ended.

Forked on every node (`heterps_core/training/node/worker_processes.py`). It reads the job and the cluster from
the run directory, resumes from the newest complete checkpoint, else begins with the weights of the job's start model
where it has one, and leaves the result or its last words there.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from heterps_core.data.dataset import PreparedDataset
from heterps_core.embeddings.row_kernels import row_kernels
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.evaluation import judge_trained
from heterps_core.training.job import TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.node.host_memory import peak_bytes
from heterps_core.training.node.node_life import own_disks, own_run_directory
from heterps_core.training.node.worker_life import SignsOfLife, start_signs
from heterps_core.training.node.worker_meeting import meet
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.start_model import begin
from heterps_core.training.step_metrics import MetricWriter, ProcessReport, write_process_report
from heterps_core.training.storage.run_directory import DATA, JOB, RESULT, STEPS, RunDirectory
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.storage.verified_files import read_signed_json

logger = logging.getLogger(__name__)


def train(run: RunDirectory, signs: SignsOfLife) -> None:
    """Train as one worker of a generation, judge the model, and write the result."""
    job = TrainingJob.from_json(read_signed_json(run, JOB))
    torch.set_num_threads(job.config.num_threads)
    place, _store = meet(run, job, signs)
    loop = worker_loop(run, job, place, signs)
    cursor = begin(run, job, loop.model)
    signs.finish_step(cursor.step)
    if loop.model.tables:
        # The first worker of a machine compiles them, which takes seconds before the first step and none later.
        row_kernels()
    # From here on all are at work, and none has a reason to be silent for long.
    dist.barrier()
    logger.info(
        "rank %d is stage %d replica %d on %s, starts at step %d",
        *(signs.rank, place.stage, place.replica, place.device, cursor.step),
    )
    try:
        end = loop.train(cursor)
    except Exception:
        if loop.checkpoints is not None:
            loop.checkpoints.settle()
        raise
    # After a stop only the checkpoint counts: a machine that is preempted has two minutes.
    is_complete = loop.is_complete(end)
    judgements = judge_trained(loop, job.start_model) if is_complete else {}
    if loop.metrics is not None:
        for judgement in judgements.values():
            judgement.click_quality()  # raises where the training has diverged
        found = {name: judgement.to_json() for name, judgement in judgements.items()}
        run.write_json(RESULT, {"is_complete": is_complete, "judgements": found})
    report = _report(loop, num_steps=end.step - cursor.step)
    write_process_report(run, f"rank-{signs.rank:05d}", report)
    dist.barrier()
    dist.destroy_process_group()


def worker_loop(run: RunDirectory, job: TrainingJob, place: StagePlace, signs: SignsOfLife) -> TrainingLoop:
    """Return the loop that trains a worker's part of a job and writes its checkpoints and metrics."""
    config = replace(job.config, embedding_folders=job.config.embedding_folders or own_disks())
    dataset = (
        PreparedDataset.open(job.dataset)
        if run.is_local
        else PreparedDataset.open(
            f"{run.location}/{DATA}", folder=lambda name: run.open_file(f"{DATA}/{name}")
        )
    )
    scratch = run.path("") if run.is_local else Path(tempfile.gettempdir())
    loop = TrainingLoop.of(
        job.model, dataset, config, job.stages, place, run=run, scratch=scratch, on_step=signs.finish_step
    )
    metrics = None
    if loop.runner.is_last and place.replica == 0:
        num_steps = config.num_steps(dataset.num_batches(config.batch_size))
        metrics = MetricWriter(run, num_steps=num_steps, attempt=_next_attempt(run))
    checkpoints = CheckpointWriter(run, loop.model, group=place.group, world=place.checkpoint_group)
    return replace(loop, checkpoints=checkpoints, metrics=metrics)


def _next_attempt(run: RunDirectory) -> int:
    names = run.names(STEPS)
    return int(names[-1].partition("-")[0]) + 1 if names else 0


def _report(loop: TrainingLoop, *, num_steps: int) -> ProcessReport:
    """Return what a worker has done in so many steps."""
    sent_bytes = loop.runner.sent_bytes + sum(table.sent_bytes for table in loop.model.tables.values())
    num_requests, num_bytes = loop.dataset.bucket_requests
    return ProcessReport(
        storage=loop.run.usage + StorageUsage(get_requests=num_requests, bytes_read=num_bytes),
        stage=loop.place.stage,
        trained_seconds=loop.runner.trained_seconds,
        waited_seconds=loop.runner.waited_seconds,
        sweeps=loop.model.sweep_counts,
        peak_bytes=peak_bytes(),
        sent_bytes_per_step=sent_bytes / max(num_steps, 1),
    )


def main() -> int:
    """Run one worker; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run, signs = own_run_directory(), start_signs()
    try:
        train(run, signs)
        signs.has_spoken()
    except Exception as error:
        status = signs.fail(run, error)
        signs.has_spoken()
        # Neighbours may wait for messages of ours that will never come, and ours for theirs: leave at once.
        logging.shutdown()
        os._exit(status)
    return 0
