"""The record of runs in MLflow.

One parent run a flow run, one child a searcher, few parameters under the same keys in all of them, and
metrics under stable names, so that the comparison page answers what a run cost, whether it was
faster and whether it is better. Runs are named by ids, never by MLflow's notion of an active run,
because a sweeper closes runs that other processes opened.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import psutil

from heterps_core.errors import ConfigurationError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.scheduling.search_result import SearchResult
from heterps_core.units import SAMPLES_PER_MILLION, SECONDS_PER_HOUR
from infra.workspace import TRACKING_VARIABLE, Workspace
from tasks.patient_client import PatientClient, is_passing
from tasks.record_outbox import Outbox, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "train-ctr"
COMPARISON_EXPERIMENT = "compare-schedulers"

RUN_ID_TAG = "heterps.run_id"
KIND_TAG = "heterps.kind"
CHOSEN_TAG = "heterps.chosen"
END_REASON_TAG = "heterps.end_reason"
HOST_TAG = "heterps.host"
DAY_TAG = "heterps.day"
"""Of the rows that were trained on, YYYY-MM-DD; missing where the data has no days."""

DATA_TAG = "heterps.data"
"""Where the rows came from."""

MODEL_TAG = "heterps.model"
START_TAG = "heterps.start_version"
"""Version of the registered model whose weights training began with; missing where it began with new ones."""

PROMOTED_TAG = "heterps.promoted"
""""true" or "false": whether the model became champion, once that was decided; on the version and its run."""

PROCESS_TAG = "heterps.process"

REGISTERED_MODEL = "ctr"
CHALLENGER_ALIAS = "challenger"
CHAMPION_ALIAS = "champion"

KIND_TRAINING = "training"
KIND_SEARCH = "search"
KIND_COMPARISON = "comparison"
KIND_PROFILING = "profiling"

NOTE_TAG = "mlflow.note.content"
"""Markdown that MLflow shows above a run or an experiment."""

METRICS_PER_REQUEST = 1_000
"""MLflow's limit of one log_batch."""

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """An MLflow run by its ids."""

    mlflow_run_id: str
    experiment_id: str
    run_id: str | None = None
    """Of the flow run, where the process that opened it is still the one that writes."""

    def address(self, mlflow_url: str) -> str:
        """Return the page of this run in an MLflow UI at `mlflow_url`."""
        return f"{mlflow_url}/#/experiments/{self.experiment_id}/runs/{self.mlflow_run_id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The parameters that every run has, parent or child, so that columns line up."""

    method: str
    """Name of the scheduler."""

    model: str
    device_types: str
    """In the order of the stages, for instance "cpu-c7i | gpu-t4"."""

    replicas: str
    """In the order of the stages, for instance "4 | 1"."""

    market: str
    batch_size: int
    seed: int

    @classmethod
    def of_plan(
        cls, stages: Sequence[Stage], *, method: str, model: str, market: str, batch_size: int, seed: int
    ) -> RunSettings:
        """Describe a plan."""
        return cls(
            method=method,
            model=model,
            device_types=" | ".join(stage.device_type for stage in stages),
            replicas=" | ".join(str(stage.num_replicas) for stage in stages),
            market=market,
            batch_size=batch_size,
            seed=seed,
        )


def open_run(workspace: Workspace, *, run_id: str, run_name: str, tags: Mapping[str, str]) -> TrackedRun:
    """Open the parent run of a flow run; a run that is resumed gets its old one back.

    The process is noted with its start time, so that a sweeper can tell whether it still lives.

    Raises:
        ConfigurationError: The store does not answer. Later in a run that is borne: what is written waits.
    """
    with store_must_answer(workspace):
        client = _client(workspace)
        experiment_id = _experiment_id(client, workspace)
        earlier_runs = _runs_of(client, run_id, KIND_TRAINING)
    notes = {**tags, **_this_process(), RUN_ID_TAG: run_id, KIND_TAG: KIND_TRAINING}
    for earlier in earlier_runs:
        client.update_run(earlier.info.run_id, status="RUNNING")
        for name, value in notes.items():
            client.set_tag(earlier.info.run_id, name, value)
        return TrackedRun(mlflow_run_id=earlier.info.run_id, experiment_id=experiment_id, run_id=run_id)
    run = client.create_run(experiment_id, run_name=run_name, tags=notes)
    return TrackedRun(mlflow_run_id=run.info.run_id, experiment_id=experiment_id, run_id=run_id)


def record_search(
    workspace: Workspace, parent: TrackedRun, result: SearchResult, settings: RunSettings, *, is_chosen: bool
) -> None:
    """Write one searcher's result as a child run."""
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

    client = _client(workspace)
    run_id = parent.run_id or client.get_run(parent.mlflow_run_id).data.tags[RUN_ID_TAG]
    child = client.create_run(
        parent.experiment_id,
        run_name=f"search {settings.method}",
        tags={
            MLFLOW_PARENT_RUN_ID: parent.mlflow_run_id,
            RUN_ID_TAG: run_id,
            KIND_TAG: KIND_SEARCH,
            CHOSEN_TAG: str(is_chosen).lower(),
        },
    )
    tracked = TrackedRun(mlflow_run_id=child.info.run_id, experiment_id=parent.experiment_id)
    record_settings(workspace, tracked, settings)
    record_metrics(workspace, tracked, plan_metrics(result))
    record_series(
        workspace,
        tracked,
        {"search/best_cost_usd": [(point.num_evaluations, point.best_cost_usd) for point in result.history]},
    )
    record_document(workspace, tracked, "plan.json", result.plan.to_json())
    client.set_terminated(tracked.mlflow_run_id, "FINISHED")


def plan_metrics(result: SearchResult) -> dict[str, float]:
    """Return what a plan promises and what finding it took, under the stable names."""
    plan = result.plan
    usd_per_second = plan.price_usd_per_hour / SECONDS_PER_HOUR
    return {
        "predicted/throughput_samples_per_s": plan.throughput_samples_per_s,
        "predicted/price_usd_per_hour": plan.price_usd_per_hour,
        "predicted/cost_usd": plan.cost_usd,
        "cost/usd_per_million_samples": usd_per_second / plan.throughput_samples_per_s * SAMPLES_PER_MILLION,
        "search/optimality_gap": plan.optimality_gap,
        "search/cost_lower_bound_usd": plan.cost_lower_bound_usd,
        "search/num_evaluations": float(plan.num_evaluations),
        "search/seconds": result.search_seconds,
        "search/certificate_seconds": result.certificate_seconds,
    }


def record_settings(workspace: Workspace, run: TrackedRun, settings: RunSettings) -> None:
    """Write the parameters; a run that is resumed keeps those it had."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    parameters = [Param(name, str(value)) for name, value in asdict(settings).items()]
    try:
        _client(workspace).log_batch(run.mlflow_run_id, params=parameters)
    except MlflowException as error:
        # MLflow never changes a parameter. The plan of a resumed run may be another one.
        logger.info("the run keeps its first parameters: %s", error)


def record_metrics(workspace: Workspace, run: TrackedRun, metrics: Mapping[str, float | None]) -> None:
    """Write single figures; those that are missing or not finite are left out."""
    known = {name: [(0, value)] for name, value in metrics.items() if value is not None}
    record_series(workspace, run, known)


def record_series(
    workspace: Workspace, run: TrackedRun, series: Mapping[str, Iterable[tuple[int, float]]]
) -> None:
    """Write figures over steps in few requests; a request each would take 7 ms apiece."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1_000)
    metrics = [
        Metric(name, value, now_ms, step)
        for name, points in series.items()
        for step, value in points
        if math.isfinite(value)
    ]
    client = _client(workspace)
    for start in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(run.mlflow_run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])


def record_document(workspace: Workspace, run: TrackedRun, name: str, document: Mapping[str, Any]) -> None:
    """Keep a JSON document with the run."""
    _client(workspace).log_dict(run.mlflow_run_id, dict(document), name)


def record_text(workspace: Workspace, run: TrackedRun, name: str, text: str) -> None:
    """Keep a text with the run."""
    _client(workspace).log_text(run.mlflow_run_id, text, name)


def record_file(workspace: Workspace, run: TrackedRun, path: Path) -> None:
    """Keep a copy of a file with the run."""
    _client(workspace).log_artifact(run.mlflow_run_id, str(path))


def record_figure(workspace: Workspace, run: TrackedRun, name: str, figure: Figure) -> None:
    """Keep a figure with the run."""
    _client(workspace).log_figure(run.mlflow_run_id, figure, name)


def close_run(workspace: Workspace, run: TrackedRun, *, status: EndStatus, reason: str) -> None:
    """End a run with its true status and why it ended; what waits is tried once more."""
    client = _client(workspace)
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
    """End all MLflow runs of a flow run that nobody ended; return how many. May be called again.

    A run that has ended keeps the status that it ended with.

    Args:
        workspace: Where runs are recorded.
        run_id: Of the flow run.
        status: That they end with.
        reason: Why they ended.
        metrics: What is known of the run all the same, such as its cost; written to its parent.
    """
    if not has_records(workspace):
        return 0
    client = _client(workspace)
    open_runs = [run for run in _runs_of(client, run_id) if run.info.status == "RUNNING"]
    for run in open_runs:
        if metrics and run.data.tags.get(KIND_TAG) == KIND_TRAINING:
            tracked = TrackedRun(mlflow_run_id=run.info.run_id, experiment_id=run.info.experiment_id)
            record_metrics(workspace, tracked, metrics)
        client.set_tag(run.info.run_id, END_REASON_TAG, reason)
        client.set_terminated(run.info.run_id, status)
    return len(open_runs)


def runs_without_process(workspace: Workspace) -> list[str]:
    """Return the ids of flow runs that MLflow calls running, but whose process on this host is gone."""
    if not has_records(workspace):
        return []
    client = _client(workspace)
    running = [
        run
        for kind in (KIND_TRAINING, KIND_PROFILING, KIND_COMPARISON)
        for run in _search(client, f"attributes.status = 'RUNNING' AND tags.`{KIND_TAG}` = '{kind}'")
    ]
    return sorted({run.data.tags[RUN_ID_TAG] for run in running if _is_gone(run)})


def has_records(workspace: Workspace) -> bool:
    """Tell whether anything was ever recorded; asking MLflow of this workspace would create its tables."""
    return workspace.tracking_path.exists() or not workspace.has_own_tracking


def recorded_text(workspace: Workspace, run_id: str, name: str) -> str | None:
    """Return a text that was kept with a flow run, None where there is none.

    Raises:
        ConfigurationError: The store does not answer.
    """
    from mlflow.exceptions import MlflowException

    if not has_records(workspace):
        return None
    client = _client(workspace)
    with store_must_answer(workspace):
        runs = _runs_of(client, run_id, KIND_TRAINING)
    if not runs:
        return None
    with TemporaryDirectory(prefix="heterps-mlflow-") as folder:
        try:
            return Path(client.download_artifacts(runs[0].info.run_id, name, folder)).read_text()
        except (MlflowException, OSError):
            return None


def outbox(workspace: Workspace) -> Outbox:
    """Return where records wait while the store does not answer."""
    return Outbox(workspace.outbox_directory)


def deliver_waiting(workspace: Workspace) -> bool:
    """Try to write what waits for the store; return whether nothing waits any more."""
    waiting = outbox(workspace)
    if not waiting.is_empty:
        num_written = _client(workspace).deliver()
        logger.info("%d records that had waited for MLflow were written", num_written)
    return waiting.is_empty


@contextmanager
def store_must_answer(workspace: Workspace) -> Iterator[None]:
    """Turn what a store that does not answer raises into one line for people.

    Raises:
        ConfigurationError: It does not.
    """
    try:
        yield
    except Exception as problem:
        if not is_passing(problem):
            raise
        way_out = (
            "look with heterps doctor which process holds it"
            if workspace.has_own_tracking
            else f"start it, or unset {TRACKING_VARIABLE} to record in {workspace.root}"
        )
        raise ConfigurationError(
            f"runs are recorded in {workspace.tracking_uri}, which must answer, but does not "
            f"({first_line(problem)}); {way_out}"
        ) from problem


@contextmanager
def answering_client(workspace: Workspace) -> Iterator[MlflowClient]:
    """Yield a client for what cannot be done later, such as moving an alias.

    Raises:
        ConfigurationError: The store does not answer.
    """
    with store_must_answer(workspace):
        yield _connect(workspace)


def _this_process() -> dict[str, str]:
    process = psutil.Process()
    return {HOST_TAG: socket.gethostname(), PROCESS_TAG: f"{process.pid} {process.create_time():.2f}"}


def _is_gone(run: Run) -> bool:
    """Tell whether the process that opened a run is known to be gone; one on another host never is."""
    if run.data.tags.get(HOST_TAG) != socket.gethostname():
        return False
    pid, _, created = run.data.tags.get(PROCESS_TAG, "").partition(" ")
    try:
        process = psutil.Process(int(pid))
        # A pid is given again; with another start time it is another process.
        return f"{process.create_time():.2f}" != created or process.status() == psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return True


def _runs_of(client: MlflowClient, run_id: str, kind: str | None = None) -> list[Run]:
    condition = f"tags.`{RUN_ID_TAG}` = '{run_id}'"
    return _search(client, f"{condition} AND tags.`{KIND_TAG}` = '{kind}'" if kind else condition)


def _search(client: MlflowClient, condition: str) -> list[Run]:
    experiments = [client.get_experiment_by_name(name) for name in (EXPERIMENT, COMPARISON_EXPERIMENT)]
    ids = [experiment.experiment_id for experiment in experiments if experiment is not None]
    if not ids:
        return []
    found: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs(ids, filter_string=condition, page_token=token)
        found.extend(page)
        token = page.token
        if not token:
            return found


def _experiment_id(client: MlflowClient, workspace: Workspace, name: str = EXPERIMENT) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    # A server decides by itself where artifacts go.
    location = (workspace.artifacts_directory / name).as_uri() if workspace.has_own_tracking else None
    try:
        return str(client.create_experiment(name, artifact_location=location))
    except MlflowException:
        # Another run was first.
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def _client(workspace: Workspace) -> PatientClient:
    """Return a client of the workspace's store; MLflow is loaded on first use, as that takes seconds."""
    return PatientClient(lambda: _connect(workspace), outbox(workspace))


def _connect(workspace: Workspace) -> MlflowClient:
    # The default, seven times with doubled waits, holds a run up for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Prints a traceback for a database that is locked, which is told and borne here.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    return mlflow.MlflowClient(tracking_uri=workspace.tracking_uri, registry_uri=workspace.tracking_uri)


def open_profiling(workspace: Workspace, *, run_id: str, tags: Mapping[str, str]) -> TrackedRun:
    """Open the run of a measurement on rented machines, beside those that are trained with it."""
    client = _client(workspace)
    experiment_id = _experiment_id(client, workspace)
    notes = {**tags, **_this_process(), RUN_ID_TAG: run_id, KIND_TAG: KIND_PROFILING}
    run = client.create_run(experiment_id, run_name=f"profiling {run_id}", tags=notes)
    return TrackedRun(mlflow_run_id=run.info.run_id, experiment_id=experiment_id)


def open_comparison(workspace: Workspace, *, run_id: str, tags: Mapping[str, str]) -> TrackedRun:
    """Open the parent run of a comparison of search methods, in an experiment of its own."""
    client = _client(workspace)
    experiment_id = _experiment_id(client, workspace, COMPARISON_EXPERIMENT)
    notes = {**tags, **_this_process(), RUN_ID_TAG: run_id, KIND_TAG: KIND_COMPARISON}
    run = client.create_run(experiment_id, run_name=f"comparison {run_id}", tags=notes)
    return TrackedRun(mlflow_run_id=run.info.run_id, experiment_id=experiment_id)


def open_compared_search(
    workspace: Workspace, parent: TrackedRun, settings: RunSettings, *, tags: Mapping[str, str]
) -> TrackedRun:
    """Open the child run of one method on one problem, and write its parameters."""
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

    child = _client(workspace).create_run(
        parent.experiment_id,
        run_name=f"{settings.model} {settings.method}",
        tags={**tags, MLFLOW_PARENT_RUN_ID: parent.mlflow_run_id, KIND_TAG: KIND_SEARCH},
    )
    tracked = TrackedRun(mlflow_run_id=child.info.run_id, experiment_id=parent.experiment_id)
    record_settings(workspace, tracked, settings)
    return tracked


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
    client = _client(workspace)
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


def name_run(workspace: Workspace, run: TrackedRun, name: str) -> None:
    """Call a run otherwise, once there is more to say of it than at its start."""
    _client(workspace).update_run(run.mlflow_run_id, name=name)


def tag_run(workspace: Workspace, run: TrackedRun, tags: Mapping[str, str]) -> None:
    """Write tags of a run."""
    client = _client(workspace)
    for name, value in tags.items():
        client.set_tag(run.mlflow_run_id, name, value)


def tag_experiment(workspace: Workspace, run: TrackedRun, tags: Mapping[str, str]) -> None:
    """Write tags of a run's experiment; may be done again with every run."""
    client = _client(workspace)
    for name, value in tags.items():
        client.set_experiment_tag(run.experiment_id, name, value)


def record_bytes(workspace: Workspace, run: TrackedRun, name: str, content: bytes) -> None:
    """Keep a file with the run, for instance a picture that was drawn already."""
    with TemporaryDirectory(prefix="heterps-mlflow-") as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        _client(workspace).log_artifact(run.mlflow_run_id, str(path))
