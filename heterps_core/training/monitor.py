"""How the flow's host hands a job to its nodes and follows it: by files in the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heterps_core.cluster import Cluster, Node
from heterps_core.data.manifest import MANIFEST_NAME
from heterps_core.errors import InterruptedTrainingError, TrainingError
from heterps_core.training.job import TrainingJob
from heterps_core.training.node.failures import WorkerFailure, read_failures, root_cause
from heterps_core.training.node.host_memory import MEMORY_FIX, MemoryWatch
from heterps_core.training.node.node_life import EXIT, HEARTBEAT, LEAVING, node_key
from heterps_core.training.step_metrics import Progress, read_progress
from heterps_core.training.storage.run_directory import (
    CLUSTER,
    DATA,
    FAILURES,
    JOB,
    RESULT,
    STOP,
    USAGE,
    RunDirectory,
)
from heterps_core.training.training_run import TrainingRun, read_training_run

POLL_INTERVAL_S = 0.25
BUCKET_POLL_INTERVAL_S = 2.0
"""Each look is a request that is paid for."""

SILENCE_LIMIT_S = 30.0
"""A node that gave no sign of life for so long counts as lost; it beats every 2 s, through a bucket every 10 s."""

BOOT_LIMIT_S = 300.0
"""Longest wait for the first sign of life of a rented machine, which boots and unpacks meanwhile."""

SHORT_OF_MEMORY_SHARE = 0.05
"""Of a machine's memory: with less than this free a silence may come from its lack."""

LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 4_000


def submit_job(run: RunDirectory, job: TrainingJob, *, start_folder: Path | None = None) -> None:
    """Write the job, before its nodes are launched; its data too, where nodes do not see this disk.

    Marks of an earlier attempt in the same folder (a run that is resumed) are removed; its checkpoints, steps and
    logs stay, and so does the model that it began with.

    Args:
        start_folder: The exported model that the job begins with; not needed where the run has begun with it before.
    """
    for key in (CLUSTER, RESULT, STOP):
        run.delete_file(key)
    for node in run.names("nodes"):
        for name in (EXIT, HEARTBEAT, LEAVING):
            run.delete_file(node_key(node, name))
    run.delete_folder(FAILURES)
    run.delete_folder(USAGE)
    if not run.is_local and not run.exists(f"{DATA}/{MANIFEST_NAME}"):
        run.upload_folder(Path(job.dataset), DATA)
    if start_folder is not None:
        # Not above: what only watches a run need not wait for torch.
        from heterps_core.training.start_model import publish_start_model

        assert job.start_model is not None
        publish_start_model(run, job.start_model, start_folder)
    run.reserve_space()
    run.write_json(JOB, job.to_json())


def publish_cluster(run: RunDirectory, cluster: Cluster) -> None:
    """Tell the nodes who takes part; they wait for it."""
    run.write_json(CLUSTER, cluster.to_json())


def follow_training(
    run: RunDirectory, cluster: Cluster, *, on_progress: Callable[[Progress], None]
) -> TrainingRun:
    """Wait until all nodes have ended well.

    Raises:
        InterruptedTrainingError: A node fell silent, or a worker failed in a way that need not come again; names the
            stage, replica, node and last step.
        TrainingError: A worker failed in a way that would come again.
    """
    memory = MemoryWatch()
    pulse = Pulse(first_limit_s=SILENCE_LIMIT_S if run.is_local else BOOT_LIMIT_S)
    reported: Progress | None = None
    waiting = {node.node_id: node for node in cluster.nodes}
    while waiting:
        stamps = run.stamps("nodes")
        for node_id, node in sorted(waiting.items()):
            if node_key(node_id, EXIT) not in stamps:
                beat = stamps.get(node_key(node_id, HEARTBEAT))
                try:
                    pulse.check(node_id, beat)
                except TrainingError as error:
                    # Of nodes that are processes of this machine the kernel's count tells here.
                    shortage = memory.shortage(f"node {node_id}") if run.is_local else None
                    raise InterruptedTrainingError(
                        f"{shortage or error}; {_last_seen(run, cluster, node)}",
                        # One machine may fail to boot; two in a row point to its image, or to what its role may do.
                        signature="no first sign of life" if beat is None else None,
                    ) from error
                continue
            end = run.require_json(node_key(node_id, EXIT))
            if end["exit_status"] != 0:
                raise _failure(run, cluster, node_id, end)
            del waiting[node_id]
        progress = read_progress(run)
        if progress is not None and progress != reported:
            on_progress(progress)
            reported = progress
        if waiting:
            time.sleep(POLL_INTERVAL_S if run.is_local else BUCKET_POLL_INTERVAL_S)
    return read_training_run(run)


class Pulse:
    """Tells which node has fallen silent, by this machine's clock alone: theirs may be wrong.

    Args:
        first_limit_s: Longest wait for the first sign of life.
    """

    def __init__(self, *, first_limit_s: float) -> None:
        self._first_limit_s = first_limit_s
        self._started_s = time.monotonic()
        self._last: dict[str, tuple[int, float]] = {}
        """Stamp of the newest beat of a node, and when it was seen first."""

    def check(self, node_id: str, stamp: int | None) -> None:
        """Take in the stamp of a node's newest beat.

        Raises:
            TrainingError: It has been the same for too long, or there has been none.
        """
        now_s = time.monotonic()
        if stamp is not None and self._last.get(node_id, (None, 0.0))[0] != stamp:
            self._last[node_id] = (stamp, now_s)
        if node_id in self._last:
            silence_s = now_s - self._last[node_id][1]
            if silence_s > SILENCE_LIMIT_S:
                raise TrainingError(
                    f"a node must give a sign of life every {SILENCE_LIMIT_S:.0f} s, but {node_id} has been silent "
                    f"for {silence_s:.0f} s; its machine was probably lost"
                )
        elif now_s - self._started_s > self._first_limit_s:
            raise TrainingError(
                f"a node must give a sign of life within {self._first_limit_s:.0f} s of its launch, but {node_id} "
                f"gave none; its system log tells how far its start came, and a bucket that its role may not "
                f"write is the usual cause"
            )


def _failure(run: RunDirectory, cluster: Cluster, node_id: str, end: Mapping[str, Any]) -> TrainingError:
    """Return what to say of a failed run: the worker that caused it, and the end of its node's log."""
    cause = root_cause(run)
    if cause is None:
        if end["is_mistake"]:
            error = TrainingError(f"node {node_id} could not train: {end['log_tail']}")
            error.exit_status = end["exit_status"]
            return error
        message = (
            f"node {node_id} ended with status {end['exit_status']}; {_log_of(run, node_id, end['log_tail'])}"
        )
        return InterruptedTrainingError(message)
    _, stage, replica = cause.lost or (cause.rank, cause.stage, cause.replica)
    if stage is not None and replica is not None:
        node_id = cluster.node_of(stage, replica).node_id
    if cause.is_mistake:
        error = TrainingError(f"{cause}; its log is {node_key(node_id, 'workers.log')} in {run.location}")
        error.exit_status = cause.exit_status
        return error
    silent = _without_last_words(run, cluster, cause)
    said = str(cause)
    if silent:
        places = [f"stage {n.stage}, replica {replica} on node {n.node_id}" for n, replica in silent]
        said += f"; no word came from {' and '.join(places)}"
    earlier = root_cause(run, attempts_back=1)
    if earlier is not None and cause.signature is not None and cause.signature == earlier.signature:
        return TrainingError(
            f"{said}, as in the attempt before, so it is not tried again; {_log_of(run, node_id, end['log_tail'])}"
        )
    return InterruptedTrainingError(
        f"{said}; {_log_of(run, node_id, end['log_tail'])}",
        signature=cause.signature,
    )


def _without_last_words(run: RunDirectory, cluster: Cluster, cause: WorkerFailure) -> list[tuple[Node, int]]:
    """Return the workers, by node and replica, that left no last words; none where the cause knows whom it misses."""
    if not cause.is_loss or cause.lost is not None:
        return []
    speaking = {(failure.stage, failure.replica) for failure in read_failures(run)}
    return [
        (node, replica)
        for node in cluster.nodes
        for replica in cluster.replicas_of(node)
        if (node.stage, replica) not in speaking
    ]


def _last_seen(run: RunDirectory, cluster: Cluster, node: Node) -> str:
    """Return what a silent node was doing, as far as it is known."""
    progress = read_progress(run)
    replicas = ", ".join(map(str, cluster.replicas_of(node)))
    step = 0 if progress is None else progress.step
    said = f"it ran stage {node.stage}, replica {replicas}, and the last step known is {step}"
    beat = run.read_json(node_key(node.node_id, HEARTBEAT)) or {}
    free, total = beat.get("free_bytes"), beat.get("total_bytes")
    if free is not None and total is not None and free < SHORT_OF_MEMORY_SHARE * total:
        said += (
            f"; {free / 1e9:.2f} of its {total / 1e9:.2f} GB of memory were free at its last sign of life, so it may "
            f"have run out of it: {MEMORY_FIX}"
        )
    return said


def _log_of(run: RunDirectory, node_id: str, log_tail: str) -> str:
    """Return where a node's log is, and its last lines; `log_tail` where it has not been handed in."""
    key = node_key(node_id, "workers.log")
    content = run.read_bytes(key)
    text = log_tail if content is None else content[-LOG_TAIL_BYTES:].decode(errors="replace")
    tail = "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
    return f"its log is {key} in {run.location}; the last lines:\n{tail}"
