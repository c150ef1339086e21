"""The store of runs in MLflow: how to reach it, to ask it, and to say in one line that it does not answer."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from heterps_core.data.history.event_store import EventStore
from heterps_core.data.reading.tables.listing import snapshot_of
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.errors import ConfigurationError
from infra.loopback_guard import App
from infra.workspace import TRACKING_VARIABLE, Workspace
from tasks.records.mlflow_names import COMPARISON_EXPERIMENT, EXPERIMENT, Tag, TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, Run
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

MOST_RUNS = 50_000

_FAULTS = frozenset(
    {
        "BAD_REQUEST",
        "ENDPOINT_NOT_FOUND",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "MALFORMED_REQUEST",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
    }
)
"""MLflow's codes for a request that is wrong, and stays wrong."""

_LOCAL_SCHEMES = ("", "file")

logger = logging.getLogger(__name__)


def client_of(workspace: Workspace) -> MlflowClient:
    """Return a client of the workspace's store, which is made where there is none; MLflow loads for seconds."""
    # The default, seven times with doubled waits, holds a run up for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Prints a traceback for a database that is locked, which is handled here.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    _make_store(workspace)
    return mlflow.MlflowClient(tracking_uri=workspace.tracking_uri, registry_uri=workspace.tracking_uri)


@contextmanager
def answering_client(workspace: Workspace) -> Iterator[MlflowClient]:
    """Yield a client for work that cannot be done later, such as moving an alias.

    Raises:
        ConfigurationError: The store does not answer.
    """
    with store_must_answer(workspace):
        yield client_of(workspace)


@contextmanager
def store_must_answer(workspace: Workspace) -> Iterator[None]:
    """Turn what a store that does not answer raises into one line for people.

    Raises:
        ConfigurationError: It does not.
    """
    try:
        yield
    except Exception as problem:
        if is_deleted(problem):
            raise ConfigurationError(
                f"what a run needs in MLflow must be there, but was deleted ({first_line(problem)}); restore it with "
                f"mlflow runs restore or mlflow experiments restore, or start a new run"
            ) from problem
        # What answers there is none of MLflow's.
        is_another = getattr(problem, "error_code", None) == "ENDPOINT_NOT_FOUND"
        if not is_passing(problem) and not is_another:
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


def _make_store(workspace: Workspace) -> None:
    """Make the workspace's own database with all its tables where there is none; may be called again.

    Under another name at first, as MLflow makes its tables in steps, and after a kill in between neither goes on nor
    begins again. The disk gets the draft once, at its end, as a step of MLflow's waits for the disk otherwise.
    """
    if not workspace.has_own_tracking or workspace.tracking_path.exists():
        return
    import mlflow.store.tracking.sqlalchemy_store as sqlalchemy_store

    with TemporaryDirectory(dir=workspace.root, prefix="mlflow-") as folder:
        draft = Path(folder) / workspace.tracking_path.name
        with _without_waiting_for_the_disk(draft):
            store = sqlalchemy_store.SqlAlchemyStore(  # type: ignore[no-untyped-call]
                f"sqlite:///{draft}", workspace.artifacts_directory.as_uri()
            )
            store.engine.dispose()
        with suppress(FileExistsError):
            # Another process may have been first.
            os.link(draft, workspace.tracking_path)


@contextmanager
def _without_waiting_for_the_disk(database: Path) -> Iterator[None]:
    """Let SQLite leave a new database in the system's memory, and write it out at the end."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def leave(connection: sqlite3.Connection, record: object) -> None:
        # This process may open other databases meanwhile.
        if any(path.endswith(str(database)) for _, _, path in connection.execute("PRAGMA database_list")):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", leave)
    try:
        yield
    finally:
        event.remove(Engine, "connect", leave)
    with database.open("rb") as file:
        os.fsync(file.fileno())


def server_app(workspace: Workspace) -> App:
    """Return MLflow's server of the workspace's own store as an ASGI application, for a process of its own.

    Files of runs are read and written where they lie, by the rights of the file system. They do not go through the
    server, which would let a request replace those of a registered model.
    """
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    _make_store(workspace)
    os.environ[BACKEND_STORE_URI_ENV_VAR] = workspace.tracking_uri
    os.environ[ARTIFACT_ROOT_ENV_VAR] = workspace.artifacts_directory.as_uri()
    from mlflow.server.fastapi_app import app

    application: App = app
    return application


def has_records(workspace: Workspace) -> bool:
    """Tell whether anything was ever recorded; asking MLflow of this workspace would create its tables."""
    return workspace.tracking_path.exists() or not workspace.has_own_tracking


def experiment_id(client: MlflowClient, workspace: Workspace, name: str = EXPERIMENT) -> str:
    """Return the id of an experiment, which is made where there is none."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        if experiment.lifecycle_stage == "deleted":
            # Its name stays taken until mlflow gc, and a night must be recorded.
            logger.warning("the experiment %s was deleted in MLflow; it is restored to record this run", name)
            client.restore_experiment(experiment.experiment_id)
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


def record_table(workspace: Workspace, run: TrackedRun, table: TablePath) -> None:
    """Record the snapshot of a table as the dataset input of a run: id, files and columns.

    The files are their number and the SHA-256 of their names in order, one a line.

    Raises:
        ConfigurationError: The store does not answer.
        DataError: The table cannot be listed.
    """
    from mlflow.entities import Dataset

    found = snapshot_of(table)
    columns = [{"name": name, "type": kind, "required": False} for name, kind in found.columns]
    dataset = Dataset(
        name=table.name,
        digest=found.id,
        source_type=table.kind,
        source=_source(str(table), found.id, [file.uri for file in found.files]),
        schema=json.dumps({"mlflow_colspec": columns}),
    )
    _log_input(workspace, run, dataset, "training")


def record_events(workspace: Workspace, run: TrackedRun, events: EventStore) -> None:
    """Record the events of a run's history as `record_table` does; of files without a snapshot their hash is the id.

    Raises:
        ConfigurationError: The store does not answer.
    """
    from mlflow.entities import Dataset

    table = TablePath.parse(events.table)
    source = _source(events.table, events.snapshot, [file.path for file in events.sources])
    content = "".join(sorted(f"{file.path} {file.size_bytes} {file.tag}" for file in events.sources))
    dataset = Dataset(
        name=events.table.rpartition("/")[2],
        digest=events.snapshot or sha256(content.encode()).hexdigest()[:8],
        source_type="files" if table is None else table.kind,
        source=source,
    )
    _log_input(workspace, run, dataset, "history")


def _source(uri: str, snapshot: str | None, files: Sequence[str]) -> str:
    names = "\n".join(sorted(files))
    source = {"uri": uri, "snapshot": snapshot, "num_files": len(files)}
    return json.dumps(source | {"files_sha256": sha256(names.encode()).hexdigest()})


def _log_input(workspace: Workspace, run: TrackedRun, dataset: Dataset, use: str) -> None:
    from mlflow.entities import DatasetInput, InputTag

    with answering_client(workspace) as client:
        client.log_inputs(run.mlflow_run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", use)])])


def runs_of(client: MlflowClient, run_id: str, kind: str | None = None) -> list[Run]:
    """Return all MLflow runs of a flow run, or those of one kind."""
    condition = f"tags.`{Tag.RUN_ID}` = '{run_id}'"
    return search_runs(client, f"{condition} AND tags.`{Tag.KIND}` = '{kind}'" if kind else condition)


def search_runs(client: MlflowClient, condition: str) -> list[Run]:
    """Return the runs of all our experiments for which a condition in MLflow's words holds."""
    experiments = [client.get_experiment_by_name(name) for name in (EXPERIMENT, COMPARISON_EXPERIMENT)]
    ids = [experiment.experiment_id for experiment in experiments if experiment is not None]
    if not ids:
        return []
    return list(client.search_runs(ids, filter_string=condition, max_results=MOST_RUNS))


def is_passing(problem: Exception) -> bool:
    """Tell whether an error says that the store does not answer now, rather than that a request is wrong."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    if isinstance(problem, MlflowException):
        return problem.error_code not in _FAULTS
    # What requests raises is an OSError; a missing file of ours is no matter of the store.
    return isinstance(problem, OSError | OperationalError) and not isinstance(problem, FileNotFoundError)


def is_deleted(problem: Exception) -> bool:
    """Tell whether an error says that a person has deleted the run or experiment that is written to."""
    from mlflow.exceptions import MlflowException

    if not isinstance(problem, MlflowException):
        return False
    return problem.error_code == "RESOURCE_DOES_NOT_EXIST" or "must be in the 'active' state" in str(problem)


def first_line(problem: Exception) -> str:
    """Return an error's text in one line; of an error of the network the request is enough."""
    text = str(problem).partition(" with exception HTTP")[0]
    return (text.splitlines() or [type(problem).__name__])[0][:200]


def local_path(uri: str) -> Path | None:
    """Return the folder on this machine that MLflow means by a URI of stored files, None where it is elsewhere."""
    parts = urlparse(uri)
    return Path(unquote(parts.path)) if parts.scheme in _LOCAL_SCHEMES else None


def stored_bytes(workspace: Workspace, uri: str) -> int:
    """Return the size of a folder that MLflow keeps; none where it is missing."""
    repository, name = _repository(workspace, uri)
    return _listed_bytes(repository, name)


def delete_stored(workspace: Workspace, uri: str) -> None:
    """Delete a folder that MLflow keeps, here or as a server allows it; a missing one is no error."""
    repository, name = _repository(workspace, uri)
    repository.delete_artifacts(name)  # type: ignore[no-untyped-call]


def _repository(workspace: Workspace, uri: str) -> tuple[ArtifactRepository, str]:
    """Return the store of the folder above that of a URI, and the name of that folder in it."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    above, _, name = uri.rstrip("/").rpartition("/")
    return get_artifact_repository(above, tracking_uri=workspace.tracking_uri), name


def _listed_bytes(repository: ArtifactRepository, name: str) -> int:
    return sum(
        _listed_bytes(repository, info.path) if info.is_dir else info.file_size or 0
        for info in repository.list_artifacts(name)
    )
