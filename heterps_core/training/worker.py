"""One training process: finds its place in the plan, trains it, and says how it ended.

Forked on every node (`heterps_core/training/node/worker_processes.py`). It reads the job and the cluster from
the run directory, resumes from the newest complete checkpoint, else begins with the weights of the job's start model
where it has one, and leaves the result or its last words there.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from heterps_core.cluster import Cluster
from heterps_core.data.dataset import PreparedDataset
from heterps_core.embeddings.row_kernels import row_kernels
from heterps_core.errors import HeterpsError
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.evaluation import judge_trained
from heterps_core.training.job import TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.node import NODE_ID_VARIABLE
from heterps_core.training.node.failures import WorkerFailure, write_failure
from heterps_core.training.node.host_memory import allocation_failure, peak_bytes
from heterps_core.training.node.node_life import (
    own_node,
    own_run_directory,
    runs_here_as_dry_run,
)
from heterps_core.training.node.worker_life import SignsOfLife, start_signs
from heterps_core.training.pipeline.stage_device import is_gpu, stage_device
from heterps_core.training.pipeline.stage_place import StagePlace, join_stage, world_group
from heterps_core.training.start_model import begin
from heterps_core.training.step_metrics import MetricWriter, ProcessReport, write_process_report
from heterps_core.training.storage.run_directory import CLUSTER, DATA, JOB, RESULT, STEPS, RunDirectory
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.storage.verified_files import read_signed_json
from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.rank_layout import (
    START_LIMIT_S,
    LostWorkerError,
    RankLayout,
    WorkerPlace,
    fingerprint,
    is_loss_of_another,
    layout_from_places,
)
from heterps_core.transport.rendezvous import open_store, prove_members

logger = logging.getLogger(__name__)

_START_LIMIT = timedelta(seconds=START_LIMIT_S)


class Worker:
    """What a worker knows of itself, kept for its last words."""

    def __init__(self, run: RunDirectory, signs: SignsOfLife) -> None:
        self.run, self.signs = run, signs
        self.rank = signs.rank
        self.generation = signs.attempt
        self.place: tuple[int | None, int | None] = None, None
        """Stage and replica."""

        self.step = 0

    def train(self) -> None:
        """Train, evaluate, and write the result."""
        job = TrainingJob.from_json(read_signed_json(self.run, JOB))
        cluster = Cluster.from_json(read_signed_json(self.run, CLUSTER))
        torch.set_num_threads(job.config.num_threads)
        self._meet(cluster)
        layout = _layout(cluster, job)
        stage, replica = self.place = layout.position(self.rank)
        place = join_stage(
            layout,
            self.rank,
            new_group=self._new_group,
            device=_device(cluster, job, stage, replica),
            has_cards=any(is_gpu(each.device_type) for each in job.stages),
            is_on_one_node=sum(node.stage == stage for node in cluster.nodes) == 1,
        )
        checkpoint_group = self._new_group(range(dist.get_world_size()), _START_LIMIT)
        loop = self.loop_of(job, place, checkpoint_group)
        cursor = begin(self.run, job, loop.model)
        self._finish_step(cursor.step)
        if loop.model.tables:
            # The first worker of a machine compiles them, which takes seconds before the first step and none later.
            row_kernels()
        # From here on all are at work, and none has a reason to be silent for long.
        dist.barrier()
        logger.info(
            "rank %d is stage %d replica %d on %s, starts at step %d",
            *(self.rank, stage, replica, place.device, cursor.step),
        )
        try:
            end = loop.train(cursor)
        except Exception:
            if loop.checkpoints is not None:
                loop.checkpoints.settle()
            raise
        self._write_result(loop, job, num_steps=end.step - cursor.step, is_complete=loop.is_complete(end))
        dist.barrier()
        dist.destroy_process_group()

    def _write_result(
        self, loop: TrainingLoop, job: TrainingJob, *, num_steps: int, is_complete: bool
    ) -> None:
        """Judge a model that is trained to its end, and report what this worker has done."""
        sent_bytes = loop.runner.sent_bytes + sum(table.sent_bytes for table in loop.model.tables.values())
        # After a stop only the checkpoint counts: a machine that is preempted has two minutes.
        judgements = judge_trained(loop, job.start_model) if is_complete else {}
        if loop.metrics is not None:
            for judgement in judgements.values():
                judgement.click_quality()  # raises where the training has diverged
            found = {name: judgement.to_json() for name, judgement in judgements.items()}
            self.run.write_json(RESULT, {"is_complete": is_complete, "judgements": found})
        num_requests, num_bytes = loop.dataset.bucket_requests
        report = ProcessReport(
            storage=self.run.usage + StorageUsage(get_requests=num_requests, bytes_read=num_bytes),
            stage=loop.place.stage,
            trained_seconds=loop.runner.trained_seconds,
            waited_seconds=loop.runner.waited_seconds,
            sweeps=loop.model.sweep_counts,
            peak_bytes=peak_bytes(),
            sent_bytes_per_step=sent_bytes / max(num_steps, 1),
        )
        write_process_report(self.run, f"rank-{self.rank:05d}", report)

    def _meet(self, cluster: Cluster) -> None:
        """Join the others of this generation, at the store that one of them holds."""
        if cluster.generation != self.generation:
            raise RuntimeError(f"generation {cluster.generation} follows {self.generation} already")
        host, _, port = cluster.rendezvous.rpartition(":")
        is_host = own_node(cluster) == cluster.rendezvous_node and os.environ["LOCAL_RANK"] == "0"
        key, generation = self.run.secret, self.generation
        self.store = open_store(
            host, int(port), key=key, generation=generation, is_host=is_host, limit=_START_LIMIT
        )
        world_size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo", store=self.store, rank=self.rank, world_size=world_size, timeout=_START_LIMIT
        )
        assert dist.group.WORLD is not None
        self.proof_key = self.store.proof_key(key)
        prove_members(dist.group.WORLD, self.proof_key, generation=generation)

    def _new_group(self, ranks: Sequence[int], limit: timedelta) -> ProcessGroup:
        """Make a group of workers who prove that they are of the run."""
        group = world_group(ranks, limit)
        if self.rank in ranks:
            prove_members(group, self.proof_key, generation=self.generation)
        return group

    def fail(self, error: BaseException) -> int:
        """Leave last words and return the exit status."""
        error = allocation_failure(error) or error
        known = error if isinstance(error, HeterpsError) else None
        is_loss = isinstance(error, LostWorkerError) or is_loss_of_another(error)
        is_mistake = known is not None and not is_loss
        message = f"{type(error).__name__}: {error}" if known is None else str(error)
        if is_loss and not isinstance(error, LostWorkerError):
            # A checkpoint that lacks the part of another worker says nothing against the disk.
            message = (
                "another worker, with which it exchanges tensors or writes a checkpoint, ended or is silent"
            )
        stage, replica = self.place
        failure = WorkerFailure(
            rank=self.rank,
            stage=stage,
            replica=replica,
            step=self.step,
            attempt=self.generation,
            error_type=type(error).__name__,
            message=message,
            exit_status=(known or HeterpsError).exit_status,
            is_cause=is_mistake or not (is_loss or isinstance(error, RuntimeError)),
            is_mistake=is_mistake,
            is_loss=is_loss,
            lost=error.lost if isinstance(error, LostWorkerError) else None,
            failed_at_s=time.time(),
        )
        write_failure(self.run, failure)
        logger.error("%s", failure, exc_info=error if known is None else None)
        return failure.exit_status

    def loop_of(
        self, job: TrainingJob, place: StagePlace, checkpoint_group: ProcessGroup | None
    ) -> TrainingLoop:
        """Return the loop that trains this worker's part of a job and writes its checkpoints and metrics."""
        run, config = self.run, job.config
        dataset = (
            PreparedDataset.open(job.dataset)
            if run.is_local
            else PreparedDataset.open(
                f"{run.location}/{DATA}", folder=lambda name: run.open_file(f"{DATA}/{name}")
            )
        )
        scratch = run.path("") if run.is_local else Path(tempfile.gettempdir())
        loop = TrainingLoop.of(
            job.model, dataset, config, job.stages, place, run=run, scratch=scratch, on_step=self._finish_step
        )
        metrics = None
        if loop.runner.is_last and place.replica == 0:
            num_steps = config.num_epochs * dataset.num_batches(config.batch_size)
            metrics = MetricWriter(run, num_steps=num_steps, attempt=_next_attempt(run))
        checkpoints = CheckpointWriter(run, loop.model, group=place.group, world=checkpoint_group)
        return replace(loop, checkpoints=checkpoints, metrics=metrics)

    def _finish_step(self, step: int) -> None:
        self.step = step
        self.signs.finish_step(step)


def _device(cluster: Cluster, job: TrainingJob, stage: int, replica: int) -> torch.device:
    device_type = job.stages[stage].device_type
    if runs_here_as_dry_run():
        # All nodes of the stage are this machine.
        num_slots = job.replicas_per_stage[stage]
        return stage_device(device_type, replica, num_slots=num_slots, is_dry_run=True)
    slot, num_slots = int(os.environ["LOCAL_RANK"]), own_node(cluster).num_workers
    return stage_device(device_type, slot, num_slots=num_slots, is_dry_run=False)


def _layout(cluster: Cluster, job: TrainingJob) -> RankLayout:
    """Tell the others which node, slot and job this process has, and lay all ranks out."""
    own = WorkerPlace(
        os.environ[NODE_ID_VARIABLE],
        int(os.environ["LOCAL_RANK"]),
        fingerprint(job.to_json(), cluster.to_json()),
    )
    places = [WorkerPlace(*place) for place in gather_json(own)]
    return layout_from_places(cluster, places, job.replicas_per_stage)


def _next_attempt(run: RunDirectory) -> int:
    names = run.names(STEPS)
    return int(names[-1].partition("-")[0]) + 1 if names else 0


def main() -> int:
    """Run one worker; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    worker = Worker(own_run_directory(), start_signs())
    try:
        worker.train()
        worker.signs.has_spoken()
    except Exception as error:
        status = worker.fail(error)
        worker.signs.has_spoken()
        # Neighbours may wait for messages of ours that will never come, and ours for theirs: leave at once.
        logging.shutdown()
        os._exit(status)
    return 0
