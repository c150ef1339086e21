"""How the flow's host follows a run: by the files that nodes leave in the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable

from heterps_core.cluster import Cluster
from heterps_core.errors import TrainingError
from heterps_core.training.failures import root_cause
from heterps_core.training.node import node_key
from heterps_core.training.run_directory import RunDirectory
from heterps_core.training.step_metrics import Progress, read_progress
from heterps_core.training.training_run import TrainingRun, read_training_run

POLL_INTERVAL_S = 0.25
SILENCE_LIMIT_S = 30.0
"""A node that gave no sign of life for so long counts as lost; it beats every 2 s."""

LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 4_000


def follow_training(
    run: RunDirectory, cluster: Cluster, *, on_progress: Callable[[Progress], None]
) -> TrainingRun:
    """Wait until all nodes have ended well.

    Args:
        run: Where the nodes write.
        cluster: The nodes.
        on_progress: Called with every new progress.

    Raises:
        TrainingError: A node failed or fell silent; the message names the worker, its stage and its last step.
    """
    started_s = time.time()
    reported: Progress | None = None
    waiting = {node.node_id for node in cluster.nodes}
    while waiting:
        for node_id in sorted(waiting):
            end = run.read_json(node_key(node_id, "exit.json"))
            if end is not None and end["exit_status"] != 0:
                raise _failure(run, cluster, node_id, end["exit_status"], end["log_tail"])
            if end is not None:
                waiting.discard(node_id)
            else:
                _check_sign_of_life(run, node_id, started_s)
        progress = read_progress(run)
        if progress is not None and progress != reported:
            on_progress(progress)
            reported = progress
        if waiting:
            time.sleep(POLL_INTERVAL_S)
    return read_training_run(run)


def _check_sign_of_life(run: RunDirectory, node_id: str, started_s: float) -> None:
    heartbeat = run.read_json(node_key(node_id, "heartbeat.json"))
    last_s = heartbeat["beat_at_s"] if heartbeat is not None else started_s
    silence_s = time.time() - last_s
    if silence_s > SILENCE_LIMIT_S:
        raise TrainingError(
            f"a node must give a sign of life every {SILENCE_LIMIT_S:.0f} s, but {node_id} has been silent for "
            f"{silence_s:.0f} s; its machine was probably lost. Resume the run to go on from the last checkpoint"
        )


def _failure(
    run: RunDirectory, cluster: Cluster, node_id: str, exit_status: int, log_tail: str
) -> TrainingError:
    """Return what to say of a failed run: the worker that caused it, and the end of its node's log."""
    cause = root_cause(run)
    if cause is None:
        return TrainingError(
            f"node {node_id} ended with status {exit_status}; {_log_of(run, node_id, log_tail)}"
        )
    _, stage, replica = cause.lost or (cause.rank, cause.stage, cause.replica)
    if stage is not None and replica is not None:
        node_id = _node_of(cluster, stage, replica)
    if cause.is_mistake:
        error = TrainingError(f"{cause}; its log is {node_key(node_id, 'workers.log')} in {run.location}")
    else:
        error = TrainingError(f"{cause}; {_log_of(run, node_id, log_tail)}")
    error.exit_status = cause.exit_status
    return error


def _log_of(run: RunDirectory, node_id: str, log_tail: str) -> str:
    """Return where a node's log is, and its last lines; `log_tail` where it has not been handed in."""
    key = node_key(node_id, "workers.log")
    content = run.read_bytes(key)
    text = log_tail if content is None else content[-LOG_TAIL_BYTES:].decode(errors="replace")
    tail = "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
    return f"its log is {key} in {run.location}; the last lines:\n{tail}"


def _node_of(cluster: Cluster, stage: int, replica: int) -> str:
    """Return the node of a worker: replicas are numbered over the stage's nodes in order."""
    slots = [node.node_id for node in cluster.nodes if node.stage == stage for _ in range(node.num_workers)]
    return slots[replica]
