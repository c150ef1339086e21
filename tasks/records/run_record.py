"""The record of a run: kept in the workspace while the run goes on, written to MLflow once, when the run has ended.

A night must not fail because a tracking server is being restarted or a database is locked. So figures, tags and
documents are appended to a file in `records/RUN/`. `deliver` writes all of them to MLflow and deletes the folder.
While MLflow does not answer the folder stays, and the sweeper's flow delivers it later. A delivery that was killed
can be repeated: a figure keeps the time at which it was noted, and the run of a search is found by its name.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from filelock import FileLock

from infra.workspace import Workspace
from tasks.records.mlflow_names import EndStatus, Tag, TrackedRun
from tasks.records.mlflow_store import client_of, first_line, is_deleted, is_passing

if TYPE_CHECKING:
    from mlflow import MlflowClient

Series: TypeAlias = Mapping[str, Iterable[tuple[int, float]]]
"""Name of a figure -> (step, value)."""

_NOTES, _FILES, _REFUSED = "notes.jsonl", "files", "refused"
_METRICS_PER_REQUEST = 1_000

_GIVE_UP_AFTER_HOURS = 7 * 24
"""A record that MLflow did not take for so long is set aside, as the sweeper closes no record while one waits."""

logger = logging.getLogger(__name__)


def note(workspace: Workspace, run: TrackedRun, **parts: Any) -> None:
    """Append parts of a run's record: `name`, `tags`, `parameters`, `metrics`, `search` or `end`."""
    folder = workspace.records_directory / run.run_id
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _NOTES).open("a") as lines:
        # On a line of its own, also after one that a kill cut short.
        lines.write(f"\n{json.dumps({'run': asdict(run), **parts})}\n")


def note_file(workspace: Workspace, run_id: str, name: str, content: str | bytes | Mapping[str, Any]) -> None:
    """Add a file to a run's record: a text, bytes, or a JSON document."""
    path = workspace.records_directory / run_id / _FILES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Mapping):
        content = json.dumps(content, indent=2, default=str)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def note_series(workspace: Workspace, run: TrackedRun, series: Series) -> None:
    """Add figures over steps to a run's record."""
    note(workspace, run, metrics=points(series))


def note_metrics(workspace: Workspace, run: TrackedRun, metrics: Mapping[str, float | None]) -> None:
    """Add single figures to a run's record; figures that are missing or not finite are left out."""
    note_series(workspace, run, {name: [(0, value)] for name, value in metrics.items() if value is not None})


def points(series: Series) -> list[list[Any]]:
    """Return finite figures as MLflow takes them: name, value, time in ms, step."""
    now_ms = int(time.time() * 1_000)
    return [
        [name, value, now_ms, step]
        for name, of_name in series.items()
        for step, value in of_name
        if math.isfinite(value)
    ]


def close_run(workspace: Workspace, run: TrackedRun, *, status: EndStatus, reason: str) -> None:
    """End a run with its true status and why it ended, and write its record to MLflow, where that answers."""
    note(workspace, run, tags={Tag.END_REASON: reason}, end=[status, int(time.time() * 1_000)])
    deliver(workspace, run.run_id)


def open_record(workspace: Workspace, run_id: str) -> TrackedRun | None:
    """Return the run of a record whose end is not noted; None where there is none."""
    notes = _read(workspace.records_directory / run_id)
    return TrackedRun(**notes[0]["run"]) if notes and not _has_end(notes) else None


def waiting_records(workspace: Workspace) -> list[str]:
    """Return the runs that have ended and whose record is not in MLflow."""
    folders = sorted(path.parent for path in workspace.records_directory.glob(f"*/{_NOTES}"))
    return [folder.name for folder in folders if _has_end(_read(folder))]


def refused_records(workspace: Workspace) -> list[str]:
    """Return the runs whose record MLflow refused for good; it stays in `records/refused/RUN`."""
    return sorted(path.name for path in (workspace.records_directory / _REFUSED).glob("*"))


def deliver(workspace: Workspace, run_id: str) -> bool:
    """Write a record to MLflow and delete it here; return False where MLflow does not answer. May be called again."""
    folder = workspace.records_directory / run_id
    if not folder.exists():
        return True
    # The run's own process and the sweeper would both create a search's run.
    with FileLock(workspace.records_directory / "lock"):
        notes = _read(folder)
        if not notes:
            return True
        try:
            _write(client_of(workspace), notes, folder / _FILES)
        except Exception as problem:
            if is_deleted(problem):
                logger.warning(
                    "MLflow records nothing more of what was deleted there (%s)", first_line(problem)
                )
            elif is_passing(problem) and _hours_since_end(notes) < _GIVE_UP_AFTER_HOURS:
                logger.warning(
                    "MLflow does not answer (%s); the record of run %s waits in %s and is delivered later",
                    first_line(problem),
                    run_id,
                    folder,
                )
                return False
            else:
                refused = workspace.records_directory / _REFUSED / run_id
                logger.warning(
                    "MLflow refuses a record, which is kept in %s: %s", refused, first_line(problem)
                )
                shutil.copytree(folder, refused, dirs_exist_ok=True)
        shutil.rmtree(folder)
    return True


def _write(client: MlflowClient, notes: Sequence[Mapping[str, Any]], files: Path) -> None:
    run = TrackedRun(**notes[0]["run"])
    searches: dict[str, Any] = {}
    for each in notes:
        searches |= each.get("search", {})
        if "name" in each:
            client.update_run(run.mlflow_run_id, name=each["name"])
        _write_parts(client, run.mlflow_run_id, each)
    for name, mlflow_run_id in _children(client, run, searches).items():
        search = searches[name]
        _write_parts(client, mlflow_run_id, search)
        client.log_dict(mlflow_run_id, search["plan"], "plan.json")
        client.set_terminated(mlflow_run_id, "FINISHED")
    if files.exists():
        client.log_artifacts(run.mlflow_run_id, str(files))
    ends = [each["end"] for each in notes if "end" in each]
    if ends:
        # A run that was resumed has ended more than once.
        status, end_ms = ends[-1]
        client.set_terminated(run.mlflow_run_id, status, end_time=end_ms)


def _children(client: MlflowClient, run: TrackedRun, searches: Mapping[str, Any]) -> dict[str, str]:
    """Return the MLflow run of each search, below the parent; missing ones are created."""
    if not searches:
        return {}
    of_parent = f"tags.`{Tag.PARENT}` = '{run.mlflow_run_id}'"
    found = {
        child.info.run_name: child.info.run_id
        for child in client.search_runs([run.experiment_id], filter_string=of_parent)
    }
    return {
        name: found.get(name)
        or client.create_run(run.experiment_id, run_name=name, tags=search["tags"]).info.run_id
        for name, search in searches.items()
    }


def _write_parts(client: MlflowClient, mlflow_run_id: str, parts: Mapping[str, Any]) -> None:
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    metrics = [Metric(*values) for values in parts.get("metrics", ())]
    for start in range(0, len(metrics), _METRICS_PER_REQUEST):
        client.log_batch(mlflow_run_id, metrics=metrics[start : start + _METRICS_PER_REQUEST])
    if tags := parts.get("tags"):
        client.log_batch(mlflow_run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    if parameters := parts.get("parameters"):
        try:
            client.log_batch(mlflow_run_id, params=[Param(*each) for each in parameters.items()])
        except MlflowException as error:
            if is_passing(error) or is_deleted(error):
                raise
            # MLflow never changes a parameter. The plan of a resumed run may be another one.
            logger.info("the run keeps its first parameters: %s", error)


def _read(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / _NOTES).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [parsed for line in lines if (parsed := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        parsed: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return parsed


def _has_end(notes: Sequence[Mapping[str, Any]]) -> bool:
    return any("end" in each for each in notes)


def _hours_since_end(notes: Sequence[Mapping[str, Any]]) -> float:
    ends_ms = [each["end"][1] for each in notes if "end" in each]
    return (time.time() - ends_ms[-1] / 1_000) / 3_600 if ends_ms else 0.0
