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
SILENCE_LIMIT_S = 60.0
"""A node that gave no sign of life for so long counts as lost; it beats every 2 s."""

LOG_TAIL_LINES = 15


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
                raise _failure(run, node_id, end["exit_status"], end["log_tail"])
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


def _failure(run: RunDirectory, node_id: str, exit_status: int, log_tail: str) -> TrainingError:
    cause = root_cause(run)
    place = f"its log is {node_key(node_id, 'workers.log')} in {run.location}"
    if cause is None:
        tail = "\n".join(log_tail.splitlines()[-LOG_TAIL_LINES:])
        error = TrainingError(
            f"node {node_id} ended with status {exit_status}; {place}; its last lines:\n{tail}"
        )
    else:
        error = TrainingError(f"{cause}; {place}")
        error.exit_status = cause.exit_status
    return error
