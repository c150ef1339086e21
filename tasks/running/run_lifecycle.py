"""How the record of a run in MLflow begins and ends, also where its process died.

Runs are named by ids, never by MLflow's notion of an active run, because a sweeper closes runs that other processes
opened.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from infra.workspace import Workspace
from tasks.records.mlflow_names import (
    COMPARISON_EXPERIMENT,
    END_REASON_TAG,
    EXPERIMENT,
    HOST_TAG,
    KIND_COMPARISON,
    KIND_PROFILING,
    KIND_TAG,
    KIND_TRAINING,
    PROCESS_TAG,
    RUN_ID_TAG,
)
from tasks.records.mlflow_store import (
    client_of,
    experiment_id,
    has_records,
    runs_of,
    search_runs,
    store_must_answer,
)
from tasks.records.tracking import EndStatus, TrackedRun, record_metrics


def open_run(
    workspace: Workspace, *, run_id: str, run_name: str, tags: Mapping[str, str], kind: str = KIND_TRAINING
) -> TrackedRun:
    """Open the parent run of a flow run; one that is resumed gets its old one back, a comparison its own experiment.

    The process is noted with its start time, so that a sweeper can tell whether it still lives.

    Raises:
        ConfigurationError: The store does not answer. Later in a run that is borne: what is written waits.
    """
    with store_must_answer(workspace):
        client = client_of(workspace)
        name = COMPARISON_EXPERIMENT if kind == KIND_COMPARISON else EXPERIMENT
        experiment = experiment_id(client, workspace, name)
        earlier_runs = runs_of(client, run_id, kind)
    process = psutil.Process()
    notes = {
        **tags,
        HOST_TAG: socket.gethostname(),
        PROCESS_TAG: f"{process.pid} {process.create_time():.2f}",
        RUN_ID_TAG: run_id,
        KIND_TAG: kind,
    }
    for earlier in earlier_runs:
        client.update_run(earlier.info.run_id, status="RUNNING")
        client.set_tags(earlier.info.run_id, notes)
        return TrackedRun.of(earlier)
    return TrackedRun.of(client.create_run(experiment, run_name=run_name, tags=notes))


def close_run(workspace: Workspace, run: TrackedRun, *, status: EndStatus, reason: str) -> None:
    """End a run with its true status and why it ended; what waits is tried once more."""
    client = client_of(workspace)
    client.set_tag(run.mlflow_run_id, END_REASON_TAG, reason)
    client.set_terminated(run.mlflow_run_id, status)
    client.deliver()


def close_dead_run(
    workspace: Workspace,
    run_id: str,
    *,
    status: EndStatus,
    reason: str,
    metrics: Mapping[str, float | None] | None = None,
) -> int:
    """End all MLflow runs of a flow run that are still open; return how many. May be called again.

    A run that has ended keeps the status that it ended with.

    Args:
        metrics: What is known of the run all the same, such as its cost; written to its parent.
    """
    if not has_records(workspace):
        return 0
    client = client_of(workspace)
    open_runs = [run for run in runs_of(client, run_id) if run.info.status == "RUNNING"]
    for run in open_runs:
        if metrics and run.data.tags.get(KIND_TAG) == KIND_TRAINING:
            record_metrics(workspace, TrackedRun.of(run), metrics)
        client.set_tag(run.info.run_id, END_REASON_TAG, reason)
        client.set_terminated(run.info.run_id, status)
    return len(open_runs)


def runs_without_process(workspace: Workspace) -> list[str]:
    """Return the ids of flow runs that MLflow calls running, but whose process on this host is gone."""
    if not has_records(workspace):
        return []
    client = client_of(workspace)
    running = [
        run
        for kind in (KIND_TRAINING, KIND_PROFILING, KIND_COMPARISON)
        for run in search_runs(client, f"attributes.status = 'RUNNING' AND tags.`{KIND_TAG}` = '{kind}'")
    ]
    return sorted({run.data.tags[RUN_ID_TAG] for run in running if process_is_gone(run.data.tags)})


def process_is_gone(tags: Mapping[str, str]) -> bool:
    """Tell whether the process that opened a run is known to be gone; one on another host never is."""
    if tags.get(HOST_TAG) != socket.gethostname():
        return False
    pid, _, created = tags.get(PROCESS_TAG, "").partition(" ")
    try:
        process = psutil.Process(int(pid))
        # A pid is given again; with another start time it is another process.
        return f"{process.create_time():.2f}" != created or process.status() == psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return True
