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
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from heterps_core.cluster import Cluster
from heterps_core.compute_device import CPU
from heterps_core.data.dataset import PreparedDataset
from heterps_core.embeddings.row_kernels import row_kernels
from heterps_core.errors import HeterpsError
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.evaluation import judge_trained
from heterps_core.training.job import DELAYED, TrainingJob
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.node.failures import WorkerFailure, write_failure
from heterps_core.training.node.host_memory import allocation_failure, peak_bytes
from heterps_core.training.node.node_life import (
    GENERATION_VARIABLE,
    NODE_ID_VARIABLE,
    own_node,
    own_run_directory,
    runs_here_as_dry_run,
)
from heterps_core.training.node.worker_life import SIGNS_VARIABLE, SignsOfLife
from heterps_core.training.pipeline.shared_memory_neighbours import connect_neighbours
from heterps_core.training.pipeline.stage_device import is_gpu, join_by_nccl, stage_device
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_runner import StageRunner
from heterps_core.training.start_model import begin
from heterps_core.training.step_metrics import MetricWriter, ProcessReport, write_process_report
from heterps_core.training.storage.run_directory import CLUSTER, DATA, JOB, RESULT, STEPS, RunDirectory
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.storage.verified_files import read_signed_json
from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.rank_layout import (
    SILENCE_LIMIT_S,
    START_LIMIT_S,
    LostWorkerError,
    RankLayout,
    WorkerPlace,
    fingerprint,
    is_loss_of_another,
    layout_from_places,
)
from heterps_core.transport.rendezvous import open_store, prove_members
from heterps_core.transport.shared_memory_link import SharedMemoryLink

logger = logging.getLogger(__name__)

START_LIMIT = timedelta(seconds=START_LIMIT_S)

GROUP_LIMIT = timedelta(seconds=SILENCE_LIMIT_S)
"""Longest wait of one replica for the others of its stage; they do equal work."""


class Worker:
    """What a worker knows of itself, kept for its last words."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.rank = int(os.environ["RANK"])
        self.stage: int | None = None
        self.replica: int | None = None
        self.step = 0
        self.generation = int(os.environ.get(GENERATION_VARIABLE, "1"))
        self.signs = SignsOfLife(
            os.environ.get(SIGNS_VARIABLE),
            slot=int(os.environ["LOCAL_RANK"]),
            rank=self.rank,
            attempt=self.generation,
        )

    def train(self) -> None:
        """Train, evaluate, and write the result."""
        job = TrainingJob.from_json(read_signed_json(self.run, JOB))
        cluster = Cluster.from_json(read_signed_json(self.run, CLUSTER))
        torch.set_num_threads(job.config.num_threads)
        self._meet(cluster)
        layout = _layout(cluster, job)
        self.stage, self.replica = layout.position(self.rank)
        # Every process makes every group, in the same order: c10d asks for it.
        groups = [self._new_group(ranks, GROUP_LIMIT) for ranks in layout.ranks]
        ids_groups = [self._new_group(ranks, START_LIMIT) for ranks in layout.ranks]
        sum_groups = [self._new_group(ranks, GROUP_LIMIT) for ranks in layout.ranks]
        checkpoint_group = self._new_group(range(dist.get_world_size()), START_LIMIT)
        is_alone = len(layout.ranks[self.stage]) == 1
        group = None if is_alone else groups[self.stage]
        link = None
        device = self._device(cluster, job)
        device_group = group
        if any(is_gpu(stage.device_type) for stage in job.stages):
            device_group = join_by_nccl(layout, device, limit=GROUP_LIMIT) or group
        is_on_one_node = sum(node.stage == self.stage for node in cluster.nodes) == 1
        if group is not None and is_on_one_node and device == CPU:
            limit_s = START_LIMIT.total_seconds()
            link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=limit_s)
        loop = self._build_loop(
            job,
            layout,
            device=device,
            group=group,
            device_group=device_group,
            ids_group=None if is_alone else ids_groups[self.stage],
            sum_group=None if is_alone or device != CPU else sum_groups[self.stage],
            checkpoint_group=checkpoint_group,
            link=link,
        )
        cursor = begin(self.run, job, loop.model)
        self._finish_step(cursor.step)
        if loop.model.tables:
            # The first worker of a machine compiles them, which takes seconds before the first step and none later.
            row_kernels()
        # From here on all are at work, and none has a reason to be silent for long.
        dist.barrier()
        logger.info(
            "rank %d is stage %d replica %d on %s, starts at step %d",
            self.rank,
            self.stage,
            self.replica,
            device,
            cursor.step,
        )
        try:
            end = loop.train(cursor)
        except Exception:
            if loop.checkpoints is not None:
                loop.checkpoints.settle()
            raise
        is_complete = loop.is_complete(end)
        sent_bytes = loop.runner.sent_bytes + sum(table.sent_bytes for table in loop.model.tables.values())
        # Who asks for a stop waits for the checkpoint alone: a machine that is preempted has two minutes.
        judgements = judge_trained(loop, job.start_model) if is_complete else {}
        if loop.metrics is not None:
            for judgement in judgements.values():
                judgement.click_quality()  # raises where the training has diverged
            found = {name: judgement.to_json() for name, judgement in judgements.items()}
            self.run.write_json(RESULT, {"is_complete": is_complete, "judgements": found})
        num_requests, num_bytes = loop.dataset.bucket_requests
        report = ProcessReport(
            storage=self.run.usage + StorageUsage(get_requests=num_requests, bytes_read=num_bytes),
            stage=self.stage,
            trained_seconds=loop.runner.trained_seconds,
            waited_seconds=loop.runner.waited_seconds,
            sweeps=loop.model.sweep_counts,
            peak_bytes=peak_bytes(),
            sent_bytes_per_step=sent_bytes / max(end.step - cursor.step, 1),
        )
        write_process_report(self.run, f"rank-{self.rank:05d}", report)
        dist.barrier()
        dist.destroy_process_group()

    def _meet(self, cluster: Cluster) -> None:
        """Join the others of this generation, at the store that one of them holds."""
        if cluster.generation != self.generation:
            raise RuntimeError(f"generation {cluster.generation} follows {self.generation} already")
        host, _, port = cluster.rendezvous.rpartition(":")
        is_host = own_node(cluster) == cluster.rendezvous_node and os.environ["LOCAL_RANK"] == "0"
        self.store = open_store(
            host,
            int(port),
            key=self.run.secret,
            generation=self.generation,
            is_host=is_host,
            limit=START_LIMIT,
        )
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=self.rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=START_LIMIT,
        )
        assert dist.group.WORLD is not None
        self.proof_key = self.store.proof_key(self.run.secret)
        prove_members(dist.group.WORLD, self.proof_key, generation=self.generation)

    def _new_group(self, ranks: Sequence[int], limit: timedelta) -> dist.ProcessGroup:
        """Make a group of workers who prove that they are of the run; every process of the world calls it."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=limit)
        if self.rank in ranks:
            prove_members(group, self.proof_key, generation=self.generation)
        return group

    def fail(self, error: BaseException) -> int:
        """Leave last words and return the exit status."""
        error = allocation_failure(error) or error
        is_known = isinstance(error, HeterpsError)
        is_loss = isinstance(error, LostWorkerError) or is_loss_of_another(error)
        is_mistake = is_known and not is_loss
        message = str(error) if is_known else f"{type(error).__name__}: {error}"
        if is_loss and not isinstance(error, LostWorkerError):
            # A checkpoint that lacks the part of another worker says nothing against the disk.
            message = (
                "another worker, with which it exchanges tensors or writes a checkpoint, ended or is silent"
            )
        status = error.exit_status if isinstance(error, HeterpsError) else HeterpsError.exit_status
        failure = WorkerFailure(
            rank=self.rank,
            stage=self.stage,
            replica=self.replica,
            step=self.step,
            attempt=self.generation,
            error_type=type(error).__name__,
            message=message,
            exit_status=status,
            is_cause=is_mistake or not (is_loss or isinstance(error, RuntimeError)),
            is_mistake=is_mistake,
            is_loss=is_loss,
            lost=error.lost if isinstance(error, LostWorkerError) else None,
            failed_at_s=time.time(),
        )
        write_failure(self.run, failure)
        logger.error("%s", failure, exc_info=None if is_known else error)
        return status

    def _build_loop(
        self,
        job: TrainingJob,
        layout: RankLayout,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None,
        device_group: dist.ProcessGroup | None,
        ids_group: dist.ProcessGroup | None,
        sum_group: dist.ProcessGroup | None,
        checkpoint_group: dist.ProcessGroup | None,
        link: SharedMemoryLink | None,
    ) -> TrainingLoop:
        assert self.stage is not None
        assert self.replica is not None
        dataset = self._open_dataset(job)
        neighbours = connect_neighbours(layout, rank=self.rank, device=device)
        scratch = self.run.path("") if self.run.is_local else Path(tempfile.gettempdir())
        model = build_stage_model(
            job.model,
            dataset.features,
            job.config,
            job.stages,
            self.stage,
            group,
            link,
            device=device,
            device_group=device_group,
            scratch=scratch,
        )
        runner = StageRunner(
            list(model.layers.values()),
            layout=layout,
            stage=self.stage,
            replica=self.replica,
            input_width=model.input_width,
            output_width=model.output_width,
            group=device_group,
            precision=job.config.precision,
            wire_dtype=job.config.wire_dtype,
            delays_updates=job.config.update_mode == DELAYED,
            sum_group=sum_group,
            link=link,
            neighbours=neighbours,
            device=device,
        )
        metrics = None
        if runner.is_last and self.replica == 0:
            num_steps = job.config.num_epochs * dataset.num_batches(job.config.batch_size)
            metrics = MetricWriter(self.run, num_steps=num_steps, attempt=_next_attempt(self.run))
        return TrainingLoop(
            runner=runner,
            model=model,
            dataset=dataset,
            config=job.config,
            run=self.run,
            group=group,
            ids_group=ids_group,
            checkpoints=CheckpointWriter(self.run, model, group=group, world=checkpoint_group),
            metrics=metrics,
            on_step=self._finish_step,
        )

    def _open_dataset(self, job: TrainingJob) -> PreparedDataset:
        if self.run.is_local:
            return PreparedDataset.open(job.dataset)
        return PreparedDataset.open(
            f"{self.run.location}/{DATA}", folder=lambda name: self.run.open_file(f"{DATA}/{name}")
        )

    def _device(self, cluster: Cluster, job: TrainingJob) -> torch.device:
        assert self.stage is not None
        assert self.replica is not None
        device_type = job.stages[self.stage].device_type
        if runs_here_as_dry_run():
            # All nodes of the stage are this machine.
            num_slots = job.replicas_per_stage[self.stage]
            return stage_device(device_type, self.replica, num_slots=num_slots, is_dry_run=True)
        num_slots = own_node(cluster).num_workers
        slot = int(os.environ["LOCAL_RANK"])
        return stage_device(device_type, slot, num_slots=num_slots, is_dry_run=False)

    def _finish_step(self, step: int) -> None:
        self.step = step
        self.signs.finish_step(step)


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
    worker = Worker(own_run_directory())
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
