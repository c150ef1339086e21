"""Checks of the databases of a workspace: ledger, MLflow and Prefect. Read-only, as in `infra/checks.py`."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from heterps_core.errors import ConfigurationError
from infra.checks import Check, CheckState
from infra.ledger.ledger_file import SCHEMA_VERSION
from infra.workspace import Workspace

_LOCK_TIMEOUT_S = 1.0
_LEDGER_VERSION = "SELECT user_version, (SELECT count(*) FROM machines) FROM pragma_user_version"
_ALEMBIC_REVISION = "SELECT version_num FROM alembic_version"
_REVISION = re.compile(r"^revision(?:: \w+)? = [\"'](\w+)[\"']", re.MULTILINE)
_DOWN_REVISION = re.compile(r"^down_revision(?:: [^=]+)? = [\"'](\w+)[\"']", re.MULTILINE)


def database_checks(workspace: Workspace, *, is_thorough: bool = True) -> Iterator[Check]:
    """Look at the ledger and at the databases of MLflow and Prefect, where they are in this workspace.

    A thorough look reads them whole, to see damage; it takes seconds where there are gigabytes.
    """
    yield _check(
        "ledger",
        workspace.ledger_path,
        migrations=None,
        damage_fix="heterps sweep   (sets it aside, and rebuilds it from the machines' tags)",
    )
    if workspace.has_own_tracking:
        yield _check(
            "MLflow's database",
            workspace.tracking_path,
            migrations=_package_folder("mlflow") / "store" / "db_migrations" / "versions",
            upgrade=f"mlflow db upgrade {workspace.tracking_uri}",
            is_thorough=is_thorough,
        )
    yield prefect_database_check(workspace, is_thorough=is_thorough)


def prefect_database_check(workspace: Workspace, *, is_thorough: bool = True) -> Check:
    """Look at the database of Prefect's server alone; see `database_checks`."""
    migrations = _package_folder("prefect") / "server" / "database" / "_migrations" / "versions" / "sqlite"
    return _check(
        "Prefect's database",
        workspace.prefect_home / "prefect.db",
        migrations=migrations,
        upgrade="the next start of make serve does it",
        is_thorough=is_thorough,
    )


def require_usable(checks: Iterable[Check]) -> None:
    """Check that databases can be written, and say in one line why not.

    Raises:
        ConfigurationError: One is locked by another process, damaged, or of a newer version.
    """
    for check in checks:
        if check.state is CheckState.MISSING:
            raise ConfigurationError(f"{check.what} must be usable, but {check.found}; {check.fix}")


def _revisions(folder: Path) -> set[str]:
    """Return the _revisions that the migrations in a folder know."""
    return {revision for path in folder.glob("*.py") for revision in _REVISION.findall(path.read_text())}


def _newest_revisions(folder: Path) -> set[str]:
    """Return the _revisions that no other one follows."""
    older = {down for path in folder.glob("*.py") for down in _DOWN_REVISION.findall(path.read_text())}
    return _revisions(folder) - older


def _check(
    what: str,
    path: Path,
    *,
    migrations: Path | None,
    upgrade: str | None = None,
    is_thorough: bool = True,
    damage_fix: str | None = None,
) -> Check:
    if not path.exists():
        return Check(what, CheckState.OK, "none yet; made at first use")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=_LOCK_TIMEOUT_S)) as database:
            row = database.execute(_LEDGER_VERSION if migrations is None else _ALEMBIC_REVISION).fetchone()
            health = database.execute("PRAGMA quick_check(1)").fetchone()[0] if is_thorough else "ok"
            # A writer that holds it stays out of sight of readers.
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except sqlite3.DatabaseError as error:
        if "no such table" in str(error) and damage_fix is None:
            # Its making was interrupted, which the next start makes up for.
            return Check(what, CheckState.OK, "no tables yet; made at first use")
        fix = damage_fix or f"put a copy back, or move it away: {path}"
        if "locked" in str(error):
            fix = f"fuser -v {path}   (who holds it)"
        return Check(what, CheckState.MISSING, f"{path}: {error}", fix)
    revision = str(row[0]) if row else "none"
    known = {str(SCHEMA_VERSION)} if migrations is None else _revisions(migrations)
    if health != "ok":
        fix = damage_fix or f"sqlite3 {path} .recover | sqlite3 {path}.recovered"
        return Check(what, CheckState.MISSING, f"{path} is damaged: {health}", fix)
    if revision not in known:
        found = f"{path} has tables of revision {revision}, which the installed code does not know"
        fix = "make setup   (a newer version wrote it), or set HETERPS_HOME to another folder"
        return Check(what, CheckState.MISSING, found, fix)
    if migrations is not None and revision not in _newest_revisions(migrations):
        found = f"tables of revision {revision}, older than the installed code"
        return Check(what, CheckState.NOTE, found, upgrade)
    return Check(what, CheckState.OK, f"opens, whole, tables of revision {revision}")


def _package_folder(name: str) -> Path:
    """Return where a package is installed, without importing it."""
    found = importlib.util.find_spec(name)
    locations = list(found.submodule_search_locations or []) if found else []
    return Path(locations[0]) if locations else Path("/nonexistent")
