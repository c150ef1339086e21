"""Which run a person means: an id, the beginning of one that fits no other, or `latest`."""

from __future__ import annotations

from collections.abc import Iterable

from heterps_core.errors import ConfigurationError, UnknownNameError
from infra.workspace import Workspace
from tasks.clusters import providers_of_run

LATEST = "latest"

SHOWN = 5
"""Ids that an error names, the newest."""


def known_runs(workspace: Workspace) -> list[str]:
    """Return the ids of all runs that left a folder or an entry in the ledger, the newest last."""
    folders = {path.name for path in workspace.runs_directory.glob("*") if path.is_dir()}
    return sorted(folders | set(providers_of_run(workspace)))


def find_run(named: str, known: Iterable[str], *, family: str = "run") -> str:
    """Return the id of the run that is meant.

    Args:
        named: What the person wrote.
        known: Ids to choose from; ids begin with their date, so that they sort by time.
        family: What the ids are, for the message.

    Raises:
        UnknownNameError: No run begins like this; the newest are named.
        ConfigurationError: Several runs begin like this.

    Example:
        >>> find_run("20261121", ["20261120-0430-1a2b3c4d", "20261121-0430-5e6f7a8b"])
        '20261121-0430-5e6f7a8b'
    """
    ids = sorted(known)
    if named in ids:
        return named
    if named == LATEST:
        if not ids:
            raise ConfigurationError(f"{LATEST} must be a {family}, but there is none yet")
        return ids[-1]
    fitting = [run_id for run_id in ids if named and run_id.startswith(named)]
    if not fitting:
        raise UnknownNameError(family, named, ids[-SHOWN:])
    if len(fitting) > 1:
        raise ConfigurationError(
            f"the beginning of a run's id must fit one run, but {named!r} fits {len(fitting)}; "
            f"write more of it: {', '.join(fitting[-SHOWN:])}"
        )
    return fitting[0]
