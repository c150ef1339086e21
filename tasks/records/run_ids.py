"""Ids of runs: how a new one is made, which ones are known, and which one a person means."""

from __future__ import annotations

import math
import uuid
from collections.abc import Container, Sequence
from datetime import UTC, datetime

from heterps_core.errors import ConfigurationError, UnknownNameError
from infra.workspace import Workspace, run_of_launch
from tasks.clusters import ledger_entries
from tasks.running.live_fleet import FleetHolder, last_fleet

LATEST = "latest"

SHOWN = 5
"""Runs that an error names."""

_ID_CHARACTERS = 8
"""Characters from the end of the flow run's id, which is its random part."""

_MINUTE_CHARACTERS = len("20261121-0430")


def new_run_id(flow_run_id: str | None, *, now: datetime) -> str:
    """Return a name that begins with the minute of the start and from which the flow run is known.

    Example:
        >>> new_run_id("067e5f3c-0000-7000-8000-1234567890ab", now=datetime(2026, 11, 21, 4, 30, tzinfo=UTC))
        '20261121-0430-567890ab'
    """
    text = (flow_run_id or str(uuid.uuid4())).replace("-", "")
    return f"{now:%Y%m%d-%H%M}-{text[-_ID_CHARACTERS:]}"


def find_run_id(workspace: Workspace, flow_run_id: str, *, resume_run_id: str | None) -> str | None:
    """Return the run that a flow run answers for, or None where it never came so far as to have one.

    A run that it was asked to resume is another's until it has the fleet: while that one lives it is refused, and
    must end nothing.
    """
    if resume_run_id is not None:
        is_its_own = last_fleet(workspace) == FleetHolder(run_id=resume_run_id, flow_run_id=flow_run_id)
        return resume_run_id if is_its_own else None
    tail = flow_run_id.replace("-", "")[-_ID_CHARACTERS:]
    return next((path.name for path in workspace.runs_directory.glob(f"*-{tail}")), None)


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


def utc_now() -> datetime:
    """Return the time, with its zone."""
    return datetime.now(UTC)
