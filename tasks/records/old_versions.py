"""Which versions of the registered model are still needed, and the end of the others with their files.

Kept are the champion, the challenger, the version that a run under way began with, the target of a roll-back, and the
version that a day which is trained once more would continue. Figures, tags and reports of their runs stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from infra.workspace import Workspace
from tasks.records import mlflow_store, model_registry
from tasks.records.champion import champion_lock, champions_by_day, decision_of
from tasks.records.mlflow_names import CHAMPION_ALIAS, REGISTERED_MODEL, Kind, Tag
from tasks.records.model_registry import RegisteredVersion
from tasks.running.tidying import Tidied


def tidy_versions(workspace: Workspace, *, registered_before: datetime, is_trial: bool = False) -> Tidied:
    """Delete the versions that are no longer needed, each with its files.

    Files go first, so that what is interrupted is found again. Files on this machine that lie outside of the
    workspace are never deleted, nor is their version: a copy of a workspace still names those of the first.

    A trial deletes nothing, and returns what would be.

    Raises:
        ConfigurationError: MLflow's store does not answer.
    """
    kind = f"versions of {REGISTERED_MODEL}"
    if not model_registry.registered_versions(workspace):
        return Tidied(kind=kind, removed={})
    removed: dict[str, int] = {}
    kept: dict[str, str] = {}
    problems: list[str] = []
    with champion_lock(workspace), mlflow_store.answering_client(workspace) as client:
        versions = model_registry.registered_versions(workspace)
        needed = _needed(workspace, versions, registered_before)
        # A run that was resumed may have registered its model twice, in one folder.
        needed_runs = {registered.mlflow_run_id for registered in versions if registered.version in needed}
        for registered in reversed(versions):
            name = registered.version
            uri = client.get_model_version_download_uri(REGISTERED_MODEL, name)
            why = needed.get(name) or _why_not_ours(workspace, uri)
            if why is not None:
                kept[name] = why
                continue
            has_files = registered.mlflow_run_id not in needed_runs
            try:
                num_bytes = mlflow_store.stored_bytes(workspace, uri) if has_files else 0
                if has_files and not is_trial:
                    mlflow_store.delete_stored(workspace, uri)
                if not is_trial:
                    client.delete_model_version(REGISTERED_MODEL, name)
            except Exception as problem:
                # A store may raise any error; the other versions are tidied all the same.
                problems.append(f"version {name}: {mlflow_store.first_line(problem)}")
                continue
            removed[name] = num_bytes
    return Tidied(kind=kind, removed=removed, kept=kept, problems=problems)


def tidy_copies(workspace: Workspace, *, versions: Collection[str], is_trial: bool = False) -> Tidied:
    """Delete what was fetched into the workspace of other versions than those that are kept."""
    removed: dict[str, int] = {}
    for folder in sorted(model_registry.fetched_directory(workspace).glob("*-*")):
        if folder.name.partition("-")[0] in versions:
            continue
        removed[folder.name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if not is_trial:
            shutil.rmtree(folder)
    return Tidied(kind="fetched copies of versions", removed=removed)


def _needed(
    workspace: Workspace, versions: Sequence[RegisteredVersion], registered_before: datetime
) -> Mapping[str, str]:
    """Return the versions that stay, each with the reason that is said; the first that holds."""
    by_name = {registered.version: registered for registered in versions}
    whys: dict[str, str] = {}
    aliases = model_registry.aliases_of(workspace)
    for name in aliases.values():
        called = sorted(alias for alias in aliases if aliases[alias] == name)
        whys[name] = f"is called {' and '.join(called)}"
    condition = f"attributes.status = 'RUNNING' AND tags.`{Tag.KIND}` = '{Kind.TRAINING}'"
    with mlflow_store.answering_client(workspace) as client:
        running = mlflow_store.search_runs(client, condition)
    for run in running:
        if Tag.START in run.data.tags:
            whys.setdefault(run.data.tags[Tag.START], "a run that is under way began with it")
    since = f"{registered_before:%Y-%m-%d %H:%M} UTC"
    rolled_back = [
        registered
        for registered in versions
        if (at := _time_of(registered, Tag.ROLLED_BACK)) is not None and at >= registered_before
    ]
    for registered in rolled_back:
        whys.setdefault(registered.version, f"was rolled back after {since}")
    champion = by_name.get(aliases.get(CHAMPION_ALIAS, ""))
    for registered in [champion, *rolled_back] if champion is not None else rolled_back:
        for earlier in _champions_before(registered, by_name, registered_before):
            whys.setdefault(
                earlier.version, f"heterps rollback leads to it, or it was champion after {since}"
            )
    for registered in versions:
        if registered.registered_at >= registered_before:
            whys.setdefault(registered.version, f"was registered after {since}")
    # The old champion of the latest day of each model and schema, which `champion_before` would return.
    old = [registered for registered in versions if registered.registered_at < registered_before]
    for registered in {_lineage(each): each for each in champions_by_day(old)}.values():
        whys.setdefault(registered.version, "a day after its own goes on from it, where it is trained again")
    for registered in {_lineage(each): each for each in reversed(versions)}.values():
        whys.setdefault(registered.version, f"is the newest of {registered.model} by its schema")
    return whys


def _lineage(registered: RegisteredVersion) -> tuple[str, str | None]:
    """Return what versions must have alike for one to go on from another."""
    return registered.model, registered.tags.get(Tag.SCHEMA)


def _champions_before(
    champion: RegisteredVersion, by_name: Mapping[str, RegisteredVersion], registered_before: datetime
) -> Iterator[RegisteredVersion]:
    """Yield the champion before a version, and those before it as long as one of them served lately."""
    current = champion
    while (decision := decision_of(current)) is not None:
        earlier = by_name.get(decision.champion_version or "")
        if earlier is None:
            return
        yield earlier
        if (_time_of(current, Tag.SINCE) or current.registered_at) < registered_before:
            # All before `earlier` had served their time when it was followed.
            return
        current = earlier


def _time_of(registered: RegisteredVersion, tag: str) -> datetime | None:
    text = registered.tags.get(tag)
    return None if text is None else datetime.fromisoformat(text)


def _why_not_ours(workspace: Workspace, uri: str) -> str | None:
    path = mlflow_store.local_path(uri)
    if path is None or path.resolve().is_relative_to(workspace.root.resolve()):
        return None
    return f"its files are not in this workspace: {path.parent}"
