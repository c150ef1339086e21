"""Files that runs leave on the disk or in the bucket, and when they are deleted.

A run that has finished drops at its end what only resuming would need. The rest of it, and all of one that failed,
goes when it has ended days ago (`heterps tidy`); models have their own rule in `tasks/records/old_versions.py`. What
the record of runs and the ledger say of a run is never touched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from heterps_core.data.history.event_store import STORE_NAME, exclusive
from heterps_core.data.manifest import MANIFEST_NAME
from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.run_directory import CHECKPOINTS, DATA, RESERVE, START_MODEL, RunDirectory
from infra.ledger.ledger import LedgerEntry
from infra.providers import get_provider
from infra.workspace import RUN_STORE_VARIABLE, Workspace, has_run_store, location_in_store, run_of_launch
from tasks.clusters import SPOT_FILE, STORAGE_FILE, ledger_entries
from tasks.records.mlflow_store import answering_client, first_line, has_records, runs_of
from tasks.records.run_files import EXPLANATION_FILE
from tasks.running.live_fleet import last_fleet

KEPT_FILES = (EXPLANATION_FILE, STORAGE_FILE, SPOT_FILE)
"""Files in a run's folder of the workspace: some kilobytes that `heterps explain` and `heterps cost` read."""

_NEEDED_TO_RESUME = (CHECKPOINTS, START_MODEL, DATA)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tidied:
    """The runs or models that were deleted and kept."""

    kind: str
    removed: Mapping[str, int]
    """Name -> bytes."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """Name -> why."""

    problems: Sequence[str] = ()
    """Files that could not be deleted or looked at, each with the reason."""


def drop_what_resuming_needs(run: RunDirectory) -> None:
    """Delete checkpoints, start model and rows of a run that has finished; failures are logged."""
    try:
        for folder in _NEEDED_TO_RESUME:
            run.delete_folder(folder)
        run.delete_file(RESERVE)
    except Exception as problem:
        # Any error: the night is done, its model is registered, and heterps tidy deletes the rest later.
        logger.warning("files for resuming stay in %s: %s", run.location, first_line(problem))


def tidy_runs(workspace: Workspace, *, ended_before: datetime, is_trial: bool = False) -> Tidied:
    """Delete the run directories of runs that have ended, here and in the run store.

    Kept are runs that are under way by the record of runs, by the ledger or by the lock of the fleet, and folders
    that neither the record nor the ledger knows. In a folder of the workspace `KEPT_FILES` stay.

    Args:
        is_trial: Delete nothing, and return what would be.

    Raises:
        ConfigurationError: The record of runs does not answer, without which it is not known which runs are alive.
    """
    machines: dict[str, list[LedgerEntry]] = {}
    for entry in ledger_entries(workspace):
        machines.setdefault(run_of_launch(entry.run_id), []).append(entry)
    removed: dict[str, int] = {}
    kept: dict[str, str] = {}
    places, problems = _places_by_run(workspace, machines)
    for run_id, directories in sorted(places.items()):
        why = _why_kept(workspace, run_id, machines.get(run_id, ()), ended_before)
        if why is not None:
            kept[run_id] = why
            continue
        try:
            num_bytes = sum(_bytes_to_delete(directory) for directory in directories)
            for directory in () if is_trial else directories:
                directory.clear(kept=_kept_in(directory))
            if not is_trial:
                workspace.forget_run_key(run_id)
        except Exception as problem:
            # Any error of the disk or the bucket: the other runs are tidied all the same.
            problems.append(f"run {run_id}: {first_line(problem)}")
            continue
        removed[run_id] = num_bytes
    return Tidied(kind="runs", removed=removed, kept=kept, problems=problems)


def tidy_events(workspace: Workspace, *, used_before: datetime, is_trial: bool = False) -> Tidied:
    """Delete the sorted events of histories that nothing has used since; prepared nights keep theirs by links."""
    removed: dict[str, int] = {}
    for store in sorted(workspace.data_directory.glob(f"events-*/{STORE_NAME}")):
        folder = store.parent
        # A prepared night of a source called events has such a file, too.
        if (folder / MANIFEST_NAME).exists():
            continue
        with exclusive(folder):
            if store.stat().st_mtime < used_before.timestamp():
                files = [store, *folder.glob("*.arrow")]
                removed[folder.name] = sum(path.stat().st_size for path in files)
                # The folder stays: another process may wait for its lock.
                for path in () if is_trial else files:
                    path.unlink()
    return Tidied(kind="sorted events", removed=removed)


def _places_by_run(
    workspace: Workspace, machines: Mapping[str, list[LedgerEntry]]
) -> tuple[dict[str, list[RunDirectory]], list[str]]:
    """Return the folders of each run with files to delete, and the problems of the search.

    In the run store only runs that this workspace has rented for: others may share it.
    """
    found: dict[str, list[RunDirectory]] = {}
    for path in workspace.runs_directory.glob("*"):
        if path.is_dir() and {file.name for file in path.iterdir()} - {*KEPT_FILES}:
            found[path.name] = [RunDirectory(str(path))]
    rented = {
        run_id
        for run_id, entries in machines.items()
        if not all(get_provider(entry.provider).runs_here for entry in entries)
    }
    if not rented:
        return found, []
    if not has_run_store():
        return found, [
            f"files of {len(rented)} runs on rented machines are in a run store, which {RUN_STORE_VARIABLE} must "
            f"name, but it is not set: nothing there was looked at"
        ]
    try:
        store = RunDirectory(location_in_store(""))
        for run_id in rented & set(store.names("")):
            found.setdefault(run_id, []).append(RunDirectory(location_in_store(run_id)))
    except Exception as problem:
        # Any error of a bucket: the files here are tidied all the same.
        return found, [f"the run store could not be listed: {first_line(problem)}"]
    return found, []


def _why_kept(
    workspace: Workspace, run_id: str, machines: Sequence[LedgerEntry], ended_before: datetime
) -> str | None:
    """Return why a run's files stay, or None where they may go; asked right before they go."""
    try:
        workspace.run_folder(run_id)
    except ConfigurationError:
        return "has a name that no run has"
    if run_id == last_fleet(workspace).run_id:
        return "the last that held the lock of the fleet, and may hold it now"
    if any(entry.is_open for entry in machines):
        return "has machines that the ledger does not know to be over; heterps sweep asks for them"
    records = []
    if has_records(workspace):
        with answering_client(workspace) as client:
            records = runs_of(client, run_id)
    ends_ms = [record.info.end_time for record in records]
    if None in ends_ms or any(record.info.status == "RUNNING" for record in records):
        return "is under way, by its record"
    ends = [datetime.fromtimestamp(end_ms / 1_000, UTC) for end_ms in ends_ms]
    ends += [entry.ended_at for entry in machines if entry.ended_at is not None]
    if not ends:
        return "is known neither to the record of runs nor to the ledger"
    return None if max(ends) < ended_before else f"ended after {ended_before:%Y-%m-%d %H:%M} UTC"


def _kept_in(directory: RunDirectory) -> Sequence[str]:
    return KEPT_FILES if directory.is_local else ()


def _bytes_to_delete(directory: RunDirectory) -> int:
    here = directory.file_sizes("")
    return directory.num_bytes() - sum(here.get(name, 0) for name in _kept_in(directory))
