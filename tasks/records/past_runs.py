"""Runs that are over or under way, read back from their record in MLflow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.workspace import Workspace
from tasks.records.mlflow_names import DAY_TAG, EXPERIMENT, KIND_TAG, KIND_TRAINING, RUN_ID_TAG
from tasks.records.mlflow_store import client_of, has_records, read_rows, runs_of, store_must_answer
from tasks.records.tracked_run import TrackedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A training run as it stands in the record."""

    run_id: str
    tracked: TrackedRun
    name: str
    status: str
    started_at: datetime
    tags: Mapping[str, str]
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]


def past_trainings(workspace: Workspace, *, most: int, day: str | None = None) -> list[PastRun]:
    """Return the newest training runs, the newest last; none where nothing was ever recorded.

    Args:
        workspace: Where runs are recorded.
        most: How many, at most 1,000.
        day: Of their data, YYYY-MM-DD; None for runs of any day and of none.
    """
    if not has_records(workspace):
        return []
    client = client_of(workspace)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return []
    found = client.search_runs(
        [experiment.experiment_id],
        filter_string=f"tags.`{KIND_TAG}` = '{KIND_TRAINING}'"
        + (f" AND tags.`{DAY_TAG}` = '{day}'" if day else ""),
        order_by=["attributes.start_time DESC"],
        max_results=most,
    )
    return [
        PastRun(
            run_id=run.data.tags[RUN_ID_TAG],
            tracked=TrackedRun(mlflow_run_id=run.info.run_id, experiment_id=run.info.experiment_id),
            name=run.info.run_name or "",
            status=run.info.status,
            started_at=datetime.fromtimestamp(run.info.start_time / 1_000, UTC),
            tags=run.data.tags,
            parameters=run.data.params,
            metrics=run.data.metrics,
        )
        for run in reversed(found)
    ]


def running_trainings(workspace: Workspace) -> list[PastRun]:
    """Return the training runs that are called running, the newest last.

    Raises:
        ConfigurationError: The record of runs does not answer.
    """
    if not workspace.has_own_tracking:
        with store_must_answer(workspace):
            return [run for run in past_trainings(workspace, most=1_000) if run.status == "RUNNING"]
    of_run = "(SELECT json_group_object(key, value) FROM {} AS its WHERE its.run_uuid = runs.run_uuid)"
    rows = read_rows(
        workspace,
        "SELECT run_uuid, experiment_id, runs.name, status, start_time, "
        + ", ".join(of_run.format(table) for table in ("tags", "params", "latest_metrics"))
        + " FROM runs JOIN experiments USING (experiment_id) WHERE experiments.name = ? AND status = 'RUNNING'"
        " AND runs.lifecycle_stage = 'active' ORDER BY start_time",
        EXPERIMENT,
    )
    found = []
    for mlflow_run_id, experiment_id, name, status, started_ms, *described in rows:
        tags, parameters, metrics = map(json.loads, described)
        if tags.get(KIND_TAG) == KIND_TRAINING:
            run = PastRun(
                run_id=tags[RUN_ID_TAG],
                tracked=TrackedRun(mlflow_run_id=mlflow_run_id, experiment_id=str(experiment_id)),
                name=name or "",
                status=status,
                started_at=datetime.fromtimestamp(started_ms / 1_000, UTC),
                tags=tags,
                parameters=parameters,
                metrics=metrics,
            )
            found.append(run)
    return found


def recorded_text(workspace: Workspace, run_id: str, name: str) -> str | None:
    """Return a text that was kept with a flow run, None where there is none.

    Raises:
        ConfigurationError: The store does not answer.
    """
    from mlflow.exceptions import MlflowException

    if not has_records(workspace):
        return None
    client = client_of(workspace)
    with store_must_answer(workspace):
        runs = runs_of(client, run_id, KIND_TRAINING)
    if not runs:
        return None
    with TemporaryDirectory(prefix="heterps-mlflow-") as folder:
        try:
            return Path(client.download_artifacts(runs[0].info.run_id, name, folder)).read_text()
        except (MlflowException, OSError):
            return None
