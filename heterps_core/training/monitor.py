"""How the flow's host follows a run: by the files that nodes leave in the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable

from heterps_core.cluster import Cluster
from heterps_core.errors import TrainingError
from heterps_core.training.failures import root_cause
from heterps_core.training.node_life import EXIT, HEARTBEAT, node_key
from heterps_core.training.run_directory import RunDirectory
from heterps_core.training.step_metrics import Progress, read_progress
from heterps_core.training.training_run import TrainingRun, read_training_run

POLL_INTERVAL_S = 0.25
BUCKET_POLL_INTERVAL_S = 2.0
"""Each look is a request that is paid for."""

SILENCE_LIMIT_S = 30.0
"""A node that gave no sign of life for so long counts as lost; it beats every 2 s, through a bucket every 10 s."""

BOOT_LIMIT_S = 300.0
"""Longest wait for the first sign of life of a rented machine, which boots and unpacks meanwhile."""

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
    pulse = Pulse(first_limit_s=SILENCE_LIMIT_S if run.is_local else BOOT_LIMIT_S)
    reported: Progress | None = None
    waiting = {node.node_id for node in cluster.nodes}
    while waiting:
        stamps = run.stamps("nodes")
        for node_id in sorted(waiting):
            if node_key(node_id, EXIT) not in stamps:
                pulse.check(node_id, stamps.get(node_key(node_id, HEARTBEAT)))
                continue
            end = run.require_json(node_key(node_id, EXIT))
            if end["exit_status"] != 0:
                raise _failure(run, cluster, node_id, end["exit_status"], end["log_tail"])
            waiting.discard(node_id)
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
                    f"for {silence_s:.0f} s; its machine was probably lost. Resume the run to go on from the last "
                    f"checkpoint"
                )
        elif now_s - self._started_s > self._first_limit_s:
            raise TrainingError(
                f"a node must give a sign of life within {self._first_limit_s:.0f} s of its launch, but {node_id} "
                f"gave none; its system log tells how far its start came, and a bucket that its role may not "
                f"write is the usual cause"
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
