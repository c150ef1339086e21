"""What a run is called, which one a person means, what is kept beside it, and how its record begins and ends."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.json_file import replace_json
from infra.workspace import Workspace, run_of_launch
from tasks.clusters import cost_metrics, end_machines_of, ledger_entries
from tasks.records.mlflow_names import DATA_TAG, END_REASON_TAG, KIND_TRAINING, MODEL_TAG, SKIPPED_TAG
from tasks.records.mlflow_store import client_of, has_records, runs_of, store_must_answer
from tasks.records.past_runs import past_trainings
from tasks.records.tracking import EndStatus
from tasks.running.live_fleet import FleetHolder, last_fleet
from tasks.running.run_lifecycle import close_dead_run
from tasks.running.run_log import FLOW_LOG

if TYPE_CHECKING:
    from tasks.reports.run_report import PlanReport

PARAMETERS_FILE = "parameters.json"

COMPLETED = "completed"
"""End reason of a run that trained, and not only planned."""

MOST_RUNS_OF_A_DAY = 1_000
ID_CHARACTERS = 8
"""Of the flow run's id, from its end, which is its random part."""

_MINUTE_CHARACTERS = len("20261121-0430")

logger = logging.getLogger(__name__)


LATEST = "latest"

SHOWN = 5

EXPLANATION_FILE = "explanation.json"
REPORT_FILE = "report.txt"


def new_run_id(flow_run_id: str | None, *, now: datetime) -> str:
    """Return a name that begins with the minute of the start and from which the flow run can be told.

    Example:
        >>> new_run_id("067e5f3c-0000-7000-8000-1234567890ab", now=datetime(2026, 11, 21, 4, 30, tzinfo=UTC))
        '20261121-0430-567890ab'
    """
    text = (flow_run_id or str(uuid.uuid4())).replace("-", "")
    return f"{now:%Y%m%d-%H%M}-{text[-ID_CHARACTERS:]}"


def find_run_id(workspace: Workspace, flow_run_id: str, *, resume_run_id: str | None) -> str | None:
    """Return the run that a flow run answers for, or None where it never came so far as to have one.

    A run that it was asked to resume is another's until it has the fleet: while that one lives it is refused, and
    must end nothing.
    """
    if resume_run_id is not None:
        is_its_own = last_fleet(workspace) == FleetHolder(run_id=resume_run_id, flow_run_id=flow_run_id)
        return resume_run_id if is_its_own else None
    tail = flow_run_id.replace("-", "")[-ID_CHARACTERS:]
    return next((path.name for path in workspace.runs_directory.glob(f"*-{tail}")), None)


def save_parameters(workspace: Workspace, run_id: str, parameters: Mapping[str, Any]) -> None:
    """Write beside a new run what decides its model."""
    replace_json(workspace.run_directory(run_id) / PARAMETERS_FILE, parameters)


def saved_parameters(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """Return what decides the model of a run, as it was saved when the run began.

    Raises:
        ConfigurationError: There is no such run to resume, or what was written beside it is damaged.
    """
    known = known_runs(
        workspace, among={path.parent.name for path in workspace.runs_directory.glob(f"*/{PARAMETERS_FILE}")}
    )
    return _read(
        workspace.run_directory(run_id) / PARAMETERS_FILE,
        where_missing=f"resume_run_id must be a run in {workspace.runs_directory} whose files heterps tidy has not "
        f"deleted, got {run_id!r}; the newest are: {', '.join(known[-SHOWN:]) or 'none'}",
    )


def check_not_finished(workspace: Workspace, run_id: str) -> None:
    """Check that a run may be resumed: otherwise nothing would be trained, and a good night's record written over.

    Raises:
        ConfigurationError: It has finished, or the record of runs does not answer.
    """
    if not has_records(workspace):
        return
    with store_must_answer(workspace):
        records = runs_of(client_of(workspace), run_id, KIND_TRAINING)
    for record in records:
        if record.info.status == "FINISHED" and record.data.tags.get(END_REASON_TAG) == COMPLETED:
            ended_at = datetime.fromtimestamp(record.info.end_time / 1_000, UTC)
            raise ConfigurationError(
                f"resume_run_id must be a run that did not come to its end, but {run_id} finished at "
                f"{ended_at:%Y-%m-%d %H:%M} UTC: its model is registered, its checkpoints are deleted, and nothing "
                f"is left to resume; to train its day once more, start a new run with again=True"
            )


def finished_run(workspace: Workspace, *, day: str, data: str, model: str) -> str | None:
    """Return the newest run that has trained the same model on the same day to the end, None where none has.

    Raises:
        ConfigurationError: The record of runs does not answer.
    """
    of_day = past_trainings(workspace, most=MOST_RUNS_OF_A_DAY, day=day)
    for past in reversed(of_day):
        is_same = past.tags.get(DATA_TAG) == data and past.tags.get(MODEL_TAG) == model
        is_done = past.status == "FINISHED" and past.tags.get(END_REASON_TAG) == COMPLETED
        if is_same and is_done:
            return past.run_id
    return None


def note_skipped(workspace: Workspace, run_id: str, *, at: datetime) -> None:
    """Write at a finished run when a later one found nothing left to do."""
    client = client_of(workspace)
    for record in runs_of(client, run_id, KIND_TRAINING):
        client.set_tag(record.info.run_id, SKIPPED_TAG, at.isoformat(timespec="seconds"))


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
        with store_must_answer(workspace):
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
    folder = workspace.run_directory(run_id)
    files = list(folder.glob("*"))
    if {path.name for path in files} <= {PARAMETERS_FILE, FLOW_LOG} and folder.exists():
        for path in files:
            path.unlink()
        folder.rmdir()


def utc_now() -> datetime:
    """Return the time, with its zone."""
    return datetime.now(UTC)


def known_runs(workspace: Workspace, *, among: Container[str] | None = None) -> list[str]:
    """Return the ids of all runs that left a folder or an entry in the ledger, by their start, the newest last.

    Ids begin with the minute of the start; within it the first file of a run, or its first machine, decides.

    Args:
        among: Only these; None for all.
    """
    first_s: dict[str, float] = {}
    for entry in ledger_entries(workspace):
        first_s.setdefault(run_of_launch(entry.run_id), entry.intended_at.timestamp())
    for folder in workspace.runs_directory.glob("*"):
        if folder.is_dir():
            times_s = [path.stat().st_mtime for path in folder.iterdir()] or [folder.stat().st_mtime]
            first_s[folder.name] = min(*times_s, first_s.get(folder.name, math.inf))
    found = sorted(first_s, key=lambda run_id: (run_id[:_MINUTE_CHARACTERS], first_s[run_id], run_id))
    return found if among is None else [run_id for run_id in found if run_id in among]


def find_run(named: str, known: Sequence[str], *, family: str = "run") -> str:
    """Return the id of the run that is meant.

    Args:
        named: An id, the beginning of one, or `LATEST`.
        known: By their start, the newest last, as `known_runs` has them.
        family: What they are called in errors.

    Raises:
        UnknownNameError: No run begins like this; the newest are named.
        ConfigurationError: Several runs begin like this.

    Example:
        >>> find_run("20261121", ["20261120-0430-1a2b3c4d", "20261121-0430-5e6f7a8b"])
        '20261121-0430-5e6f7a8b'
    """
    if named in known:
        return named
    if named == LATEST:
        if not known:
            raise ConfigurationError(f"{LATEST} must be a {family}, but there is none yet")
        return known[-1]
    fitting = [run_id for run_id in known if named and run_id.startswith(named)]
    if not fitting:
        raise UnknownNameError(family, named, known[-SHOWN:])
    if len(fitting) > 1:
        raise ConfigurationError(
            f"the beginning of a run's id must fit one run, but {named!r} fits {len(fitting)}; "
            f"write more of it: {', '.join(fitting[-SHOWN:])}"
        )
    return fitting[0]


def keep_explanation(workspace: Workspace, report: PlanReport) -> None:
    """Write down why a run's plan was chosen, in words and figures."""
    from heterps_core.planning.explain.text import explanation_text
    from tasks.reports.run_report import plan_summary

    plan = report.chosen.plan
    document = {
        "run_id": report.run_id,
        "model": report.model,
        "data": report.data,
        "summary": plan_summary(plan),
        "text": explanation_text(report.explanation),
        "tables": report.tables_text,
        "plan": plan.to_json(),
        "explanation": report.explanation.to_json(),
    }
    replace_json(workspace.run_directory(report.run_id) / EXPLANATION_FILE, document)


def keep_report(workspace: Workspace, run_id: str, text: str) -> None:
    """Write down all that is told of a run, beside it."""
    folder = workspace.run_directory(run_id)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT_FILE).write_text(text)


def read_report(workspace: Workspace, run_id: str) -> str:
    """Return what was told of a run when it had ended; nothing where it has not, or came to no good end."""
    path = workspace.run_directory(run_id) / REPORT_FILE
    return path.read_text() if path.exists() else ""


def read_explanation(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """Return what was kept beside a run: its `run_id`, `text` and more.

    Raises:
        ConfigurationError: It is not there, as the run ended before its plan; or it is damaged.
    """
    path = workspace.run_directory(run_id) / EXPLANATION_FILE
    return _read(
        path,
        where_missing=f"only a run that came to a plan can be explained, but run {run_id} left no explanation in "
        f"{path}; heterps runs says how it ended",
    )


def _read(path: Path, *, where_missing: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ConfigurationError(where_missing) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"a JSON object must be kept of a run, but {path} is damaged: {error}"
        ) from error
