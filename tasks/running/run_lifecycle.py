"""How the record of a run in MLflow begins and ends, also where its process died.

Runs are named by ids, never by MLflow's notion of an active run, because a sweeper closes runs that other processes
opened.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from heterps_core.errors import ConfigurationError
from infra.providers.local_processes import ProcessIdentity
from infra.workspace import Workspace
from tasks.clusters import cost_metrics, end_machines_of
from tasks.records import mlflow_store
from tasks.records.mlflow_names import COMPARISON_EXPERIMENT, EXPERIMENT, EndStatus, Kind, Tag, TrackedRun
from tasks.records.mlflow_views import experiment_tags
from tasks.records.run_files import PARAMETERS_FILE
from tasks.records.run_ids import find_run_id
from tasks.records.run_record import close_run, deliver, note_metrics, open_record
from tasks.running.run_log import FLOW_LOG

logger = logging.getLogger(__name__)


def open_run(
    workspace: Workspace, *, run_id: str, run_name: str, tags: Mapping[str, str], kind: str = Kind.TRAINING
) -> TrackedRun:
    """Open the parent run of a flow run, or open it again where the run is resumed.

    The process is noted with its start time, so that a sweeper knows whether it still lives.

    Raises:
        ConfigurationError: The store does not answer. From then on the run goes on without it.
    """
    process = ProcessIdentity.of(os.getpid())
    notes = {
        **tags,
        Tag.HOST: socket.gethostname(),
        Tag.PROCESS: f"{process.pid} {process.created_at_s:.2f}",
        Tag.RUN_ID: run_id,
        Tag.KIND: kind,
    }
    with mlflow_store.answering_client(workspace) as client:
        experiment = mlflow_store.experiment_id(
            client, workspace, COMPARISON_EXPERIMENT if kind == Kind.COMPARISON else EXPERIMENT
        )
        if kind == Kind.TRAINING:
            for tag, text in experiment_tags().items():
                client.set_experiment_tag(experiment, tag, text)
        deliver(workspace, run_id)
        for earlier in mlflow_store.runs_of(client, run_id, kind):
            client.update_run(earlier.info.run_id, status="RUNNING")
            for tag, text in notes.items():
                client.set_tag(earlier.info.run_id, tag, text)
            return TrackedRun.of(earlier)
        return TrackedRun.of(client.create_run(experiment, run_name=run_name, tags=notes))


def close_dead_run(
    workspace: Workspace,
    run_id: str,
    *,
    status: EndStatus,
    reason: str,
    metrics: Mapping[str, float | None] | None = None,
) -> int:
    """End all MLflow runs of a flow run that are still open; return how many. May be called again.

    A run that has ended keeps the status that it ended with. Where MLflow does not answer, the end is noted in the
    run's record before the error is raised.

    Args:
        metrics: Figures that are known of the run all the same, such as its cost; written to its parent.
    """
    noted = open_record(workspace, run_id)
    if noted is None:
        deliver(workspace, run_id)
    else:
        note_metrics(workspace, noted, metrics or {})
        close_run(workspace, noted, status=status, reason=reason)
    if not mlflow_store.has_records(workspace):
        return 0
    client = mlflow_store.client_of(workspace)
    open_runs = [run for run in mlflow_store.runs_of(client, run_id) if run.info.status == "RUNNING"]
    for run in open_runs:
        if run.data.tags.get(Tag.KIND) == Kind.TRAINING:
            note_metrics(workspace, TrackedRun.of(run), metrics or {})
            close_run(workspace, TrackedRun.of(run), status=status, reason=reason)
        else:
            client.set_tag(run.info.run_id, Tag.END_REASON, reason)
            client.set_terminated(run.info.run_id, status)
    return len(open_runs) + (noted is not None)


def runs_without_process(workspace: Workspace) -> list[str]:
    """Return the ids of flow runs that MLflow calls running, but whose process on this host is gone."""
    if not mlflow_store.has_records(workspace):
        return []
    client = mlflow_store.client_of(workspace)
    running = [
        run
        for kind in (Kind.TRAINING, Kind.PROFILING, Kind.COMPARISON)
        for run in mlflow_store.search_runs(
            client, f"attributes.status = 'RUNNING' AND tags.`{Tag.KIND}` = '{kind}'"
        )
    ]
    return sorted({run.data.tags[Tag.RUN_ID] for run in running if process_is_gone(run.data.tags)})


def process_is_gone(tags: Mapping[str, str]) -> bool:
    """Tell whether the process that opened a run is known to be gone; one on another host never is."""
    if tags.get(Tag.HOST) != socket.gethostname():
        return False
    pid, _, created = tags.get(Tag.PROCESS, "").partition(" ")
    try:
        return not ProcessIdentity(pid=int(pid), created_at_s=float(created)).is_alive()
    except ValueError:
        return True


def clean_up_run(
    workspace: Workspace, flow_run_id: str, *, resume_run_id: str | None, status: EndStatus, reason: str
) -> None:
    """End what is left of a run that did not end well, and close its record truthfully.

    The second of the four layers of teardown: for hooks, which know a flow run by its id alone.
    """
    run_id = find_run_id(workspace, flow_run_id, resume_run_id=resume_run_id)
    if run_id is None:
        return
    ended = end_machines_of(workspace, run_id)
    try:
        with mlflow_store.store_must_answer(workspace):
            closed = close_dead_run(
                workspace,
                run_id,
                status=status,
                reason=reason,
                metrics=cost_metrics(workspace, run_id),
            )
    except ConfigurationError as error:
        closed = 0
        logger.warning("the record of run %s is left to the sweeper: %s", run_id, error)
    _forget_run_without_work(workspace, run_id)
    logger.warning("run %s: ended %d machines, closed %d records: %s", run_id, ended, closed, reason)


def _forget_run_without_work(workspace: Workspace, run_id: str) -> None:
    """Remove the folder of a run that failed before anything was launched: there is nothing to resume."""
    folder = workspace.run_folder(run_id)
    files = list(folder.glob("*"))
    if {path.name for path in files} <= {PARAMETERS_FILE, FLOW_LOG} and folder.exists():
        for path in files:
            path.unlink()
        folder.rmdir()
