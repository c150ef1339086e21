"""Runs that are over or under way, read back from their record in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.workspace import Workspace
from tasks.records.mlflow_names import DAY_TAG, EXPERIMENT, KIND_TAG, KIND_TRAINING, RUN_ID_TAG
from tasks.records.mlflow_store import client_of, has_records, runs_of, store_must_answer
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
