"""How the flow's host hands a job to its nodes and follows it: by files in the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from heterps_core.cluster import Cluster, Node
from heterps_core.data.manifest import MANIFEST_NAME
from heterps_core.errors import TrainingError
from heterps_core.training.job import TrainingJob
from heterps_core.training.node.failures import WorkerFailure, read_failures, root_cause
from heterps_core.training.node.host_memory import MEMORY_FIX, MemoryWatch
from heterps_core.training.node.node_life import (
    EXIT,
    HEARTBEAT,
    LEAVING,
    NODES,
    exit_key,
    leaving_nodes,
    node_key,
)
from heterps_core.training.outcome import Complete, Failed, MachinesLost, Stopped, TrainingOutcome
from heterps_core.training.step_metrics import Progress, read_progress
from heterps_core.training.storage.run_directory import (
    CLUSTER,
    DATA,
    FAILURES,
    JOB,
    RESULT,
    SHARES,
    STOP,
    USAGE,
    RunDirectory,
)
from heterps_core.training.storage.verified_files import read_signed_json, write_signed_json
from heterps_core.training.training_run import read_training_run

POLL_INTERVAL_S = 0.25
BUCKET_POLL_INTERVAL_S = 1.0
"""Each look is three requests that are paid for, 0.02 USD an hour."""

SILENCE_LIMIT_S = 30.0
"""A node that gave no sign of life for so long counts as lost; it beats every 2 s, through a bucket every 10 s."""

BOOT_LIMIT_S = 300.0
"""Longest wait for the first sign of life of a rented machine, which boots and unpacks meanwhile."""

_SHORT_OF_MEMORY_SHARE = 0.05
"""Share of a machine's memory: with less free a silence may come from its lack."""

_REPORT_LIMIT_S = 1.0
"""Nodes report within this time that their workers ended, counted from the last report. Workers that miss one
another end at once, as their connections break; a node hears of their end at once, too."""

_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 4_000


def submit_job(run: RunDirectory, job: TrainingJob, *, start_folder: Path | None = None) -> None:
    """Write the job, before its nodes are launched; its data too, where nodes do not see this disk.

    Marks of an earlier attempt in the same folder (a run that is resumed) are removed; its checkpoints, steps and
    logs stay, and so does the model that it began with.

    Args:
        start_folder: The exported model that the job begins with; not needed where the run has begun with it before.
    """
    for key in (CLUSTER, RESULT, STOP, SHARES):
        run.delete_file(key)
    for node in run.names("nodes"):
        for name in run.names(f"{NODES}/{node}"):
            if name in (HEARTBEAT, LEAVING) or name.startswith(EXIT):
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
    write_signed_json(run, JOB, job.to_json())


def publish_cluster(run: RunDirectory, cluster: Cluster) -> None:
    """Write for the nodes who takes part; they wait for it, and for each generation after the first."""
    if cluster.generation > 1:
        # A result or a stop of the generation before says nothing of this one.
        for key in (RESULT, STOP):
            run.delete_file(key)
        _keep_shares(run)
    write_signed_json(run, CLUSTER, cluster.to_json())


def _keep_shares(run: RunDirectory) -> None:
    """Let the next generation begin with the shares of batches that the one before has measured last.

    With other numbers of replicas it measures again, and the old shares are removed: a later generation may have as
    many workers, but on other machines.
    """
    shares = run.read_json(SHARES)
    if shares is None:
        return
    job = TrainingJob.from_json(read_signed_json(run, JOB))
    if [len(of_stage) for of_stage in shares] == list(job.replicas_per_stage):
        stages = zip(job.stages, shares, strict=True)
        kept = tuple(replace(stage, shares=tuple(of_stage)) for stage, of_stage in stages)
        write_signed_json(run, JOB, replace(job, stages=kept).to_json())
    else:
        run.delete_file(SHARES)


def follow_training(
    run: RunDirectory, cluster: Cluster, *, on_progress: Callable[[Progress], None]
) -> TrainingOutcome:
    """Wait until the workers of a generation have ended on all nodes, and return how.

    Where those of one node have not ended well, the others miss them and end too, and each node tells it. A node that
    does not is lost: after a moment where another misses its workers, or only it has reported nothing; else where it
    has given no sign of life for `SILENCE_LIMIT_S`, and all others have ended or nothing is trained yet, as they
    wait for it. What is lost after the result is not missed. What is said of a loss or failure names the stage,
    replica, node and last step.
    """
    memory = MemoryWatch()
    pulse = Pulse(first_limit_s=SILENCE_LIMIT_S if run.is_local else BOOT_LIMIT_S)
    reported: Progress | None = None
    before = read_progress(run)
    waiting = {node.node_id: node for node in cluster.nodes}
    ends: dict[str, Mapping[str, Any]] = {}
    silences: dict[str, MachinesLost] = {}
    reported_at_s = time.monotonic()
    while waiting:
        stamps = run.stamps("nodes")
        for node_id, node in sorted(waiting.items()):
            key = exit_key(node_id, cluster.generation)
            if key in stamps:
                ends[node_id] = run.require_json(key)
                reported_at_s = time.monotonic()
                del waiting[node_id]
                continue
            beat = stamps.get(node_key(node_id, HEARTBEAT))
            silence = pulse.silence(node_id, beat)
            if silence is not None and node_id not in silences:
                # The kernel's count of this machine holds for nodes that are its processes.
                shortage = memory.shortage(f"node {node_id}") if run.is_local else None
                silences[node_id] = MachinesLost(
                    message=f"{shortage or silence}; {_last_seen(run, cluster, node)}",
                    # One machine may fail to boot; two in a row point to its image, or to what its role may do.
                    signature="no first sign of life" if beat is None else None,
                )
        is_failing = any(end["exit_status"] != 0 for end in ends.values())
        if is_failing or silences:
            if run.is_trained():
                break
            since_report_s = time.monotonic() - reported_at_s
            failures = read_failures(run, attempt=cluster.generation)
            missed = {cluster.node_of(*failure.lost[1:]).node_id for failure in failures if failure.lost}
            is_missed = len(waiting) == 1 or set(waiting) <= missed
            # Who gave no first sign may still boot.
            had_begun = any(silence.signature is None for silence in silences.values())
            # After a worker's own error the workers of other nodes, which may still be starting, are only late.
            are_losses = all(failure.is_loss for failure in failures)
            if (
                any(failure.is_mistake for failure in failures)
                or set(waiting) <= set(silences)
                or (had_begun and read_progress(run) == before)
                or (is_failing and since_report_s >= _REPORT_LIMIT_S and (is_missed or not are_losses))
            ):
                lost = set(waiting) if failures and are_losses else set(waiting) & set(silences)
                return _failure(run, cluster, ends, silences, lost=tuple(sorted(lost)))
        progress = read_progress(run)
        if progress is not None and progress != reported:
            on_progress(progress)
            reported = progress
        if waiting:
            is_far = not run.is_local and not is_failing
            time.sleep(BUCKET_POLL_INTERVAL_S if is_far else POLL_INTERVAL_S)
    if any(end["exit_status"] != 0 for end in ends.values()) and not run.is_trained():
        return _failure(run, cluster, ends, silences, lost=())
    return _end(run)


def _end(run: RunDirectory) -> TrainingOutcome:
    training = read_training_run(run)
    if training.is_complete:
        return Complete(training)
    leaving = tuple(sorted(leaving_nodes(run)))
    if not leaving:
        return Stopped(training)
    step = training.steps[-1].step if training.steps else 0
    return MachinesLost(
        message=f"{', '.join(leaving)} will be preempted: a checkpoint of step {step:,} is written",
        node_ids=leaving,
        is_noticed=True,
    )


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

    def silence(self, node_id: str, stamp: int | None) -> str | None:
        """Take in the stamp of a node's newest beat; returns what to say where it has been the same for too long."""
        now_s = time.monotonic()
        if stamp is not None and self._last.get(node_id, (None, 0.0))[0] != stamp:
            self._last[node_id] = (stamp, now_s)
        if node_id in self._last:
            silence_s = now_s - self._last[node_id][1]
            if silence_s > SILENCE_LIMIT_S:
                return (
                    f"a node must give a sign of life every {SILENCE_LIMIT_S:.0f} s, but {node_id} has been silent "
                    f"for {silence_s:.0f} s; its machine was probably lost"
                )
        elif now_s - self._started_s > self._first_limit_s:
            return (
                f"a node must give a sign of life within {self._first_limit_s:.0f} s of its launch, but {node_id} "
                f"gave none; its system log tells how far its start came, and a bucket that its role may not "
                f"write is the usual cause"
            )
        return None


def _failure(
    run: RunDirectory,
    cluster: Cluster,
    ends: Mapping[str, Mapping[str, Any]],
    silences: Mapping[str, MachinesLost],
    *,
    lost: tuple[str, ...],
) -> Failed | MachinesLost:
    """Return what to say of a generation that came to no good end: the worker that caused it, and its node's log."""
    cause = root_cause(run, attempt=cluster.generation)
    node_id, end = next(
        ((name, end) for name, end in sorted(ends.items()) if end["exit_status"] != 0), (None, None)
    )
    if cause is None or node_id is None or end is None:
        if silences:
            silent = silences[min(silences)]
            return replace(silent, node_ids=lost)
        assert node_id is not None
        assert end is not None
        if end["is_mistake"]:
            return _mistake(f"node {node_id} could not train: {end['log_tail']}", end["exit_status"])
        log = _log_of(run, node_id, end["log_tail"])
        return MachinesLost(
            message=f"node {node_id} ended with status {end['exit_status']}; {log}", node_ids=lost
        )
    _, stage, replica = cause.lost or (cause.rank, cause.stage, cause.replica)
    if stage is not None and replica is not None:
        node_id = cluster.node_of(stage, replica).node_id
    if cause.is_mistake:
        log = f"its log is {node_key(node_id, 'workers.log')} in {run.location}"
        return _mistake(f"{cause}; {log}", cause.exit_status)
    said = str(cause)
    missing = _without_last_words(run, cluster, cause)
    if missing:
        places = [f"stage {n.stage}, replica {replica} on node {n.node_id}" for n, replica in missing]
        said += f"; no word came from {' and '.join(places)}"
    message = f"{said}; {_log_of(run, node_id, end['log_tail'])}"
    return MachinesLost(message=message, node_ids=lost, signature=None if lost else cause.signature)


def _mistake(message: str, exit_status: int) -> Failed:
    error = TrainingError(message)
    error.exit_status = exit_status
    return Failed(error)


def _without_last_words(run: RunDirectory, cluster: Cluster, cause: WorkerFailure) -> list[tuple[Node, int]]:
    """Return the workers, by node and replica, that left no last words; none where the cause knows whom it misses."""
    if not cause.is_loss or cause.lost is not None:
        return []
    speaking = {
        (failure.stage, failure.replica) for failure in read_failures(run, attempt=cluster.generation)
    }
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
    if free is not None and total is not None and free < _SHORT_OF_MEMORY_SHARE * total:
        said += (
            f"; {free / 1e9:.2f} of its {total / 1e9:.2f} GB of memory were free at its last sign of life, so it may "
            f"have run out of it: {MEMORY_FIX}"
        )
    return said


def _log_of(run: RunDirectory, node_id: str, log_tail: str) -> str:
    """Return where a node's log is, and its last lines; `log_tail` where it has not been handed in."""
    key = node_key(node_id, "workers.log")
    content = run.read_bytes(key)
    text = log_tail if content is None else content[-_LOG_TAIL_BYTES:].decode(errors="replace")
    tail = "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])
    return f"its log is {key} in {run.location}; the last lines:\n{tail}"
