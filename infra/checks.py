"""What a machine needs to run the line, with its databases: each thing, its state, and the command that fixes it.

Read-only: a check starts nothing, writes nothing, and never raises for what it finds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from heterps_core.errors import ConfigurationError
from infra.ledger.ledger_file import READABLE_VERSIONS
from infra.workspace import HOME_VARIABLE, Workspace

GIB = 2**30
TESTED_PYTHON = (3, 11)
MOST_NAMES = 4

LEAST_MEMORY_GIB = 4.0
LEAST_DISK_GIB = 5.0
"""The synthetic stream, its profiles and the checkpoints of a few runs."""

LEAST_SHM_GIB = 0.25
"""Workers of a dry run hand activations and tables to one another there."""

FULL_SHARE = 0.95
"""Of a disk; databases fail first, and in the middle of a night."""

CLOCK_SLACK_S = 120.0


class CheckState(StrEnum):
    """Whether something is as it must be."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: CheckState
    found: str
    fix: str | None = None


def machine_checks(workspace: Workspace) -> Iterator[Check]:
    """Look at Python, the compiler, cores, memory, disk and clock."""
    is_tested = sys.version_info[:2] == TESTED_PYTHON
    yield Check(
        "Python",
        CheckState.OK if is_tested else CheckState.MISSING,
        f"{platform.python_version()} ({sys.executable})" + ("" if is_tested else ", but 3.11 is needed"),
        None if is_tested else "make clean && make setup PYTHON=python3.11",
    )
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    yield Check(
        "C++ compiler",
        CheckState.OK if compiler else CheckState.NOTE,
        compiler or "none: torch looks rows up and updates them, which is slower",
        None if compiler else "apt-get install g++",
    )
    larger = "use a larger machine"
    yield _enough("processor cores", float(os.cpu_count() or 1), "", least=2.0, fix=larger)
    memory_gib = psutil.virtual_memory().total / GIB
    fix = f"{larger}, or a smaller --batch-size"
    yield _enough("memory", memory_gib, " GiB", least=LEAST_MEMORY_GIB, fix=fix)
    shared = Path("/dev/shm")
    fix = "in a container: --shm-size 1g; else: mount -o remount,size=1G /dev/shm"
    if shared.is_dir():
        free_gib = shutil.disk_usage(shared).free / GIB
        yield _enough("/dev/shm", free_gib, " GiB free", least=LEAST_SHM_GIB, fix=fix)
    else:
        yield Check("/dev/shm", CheckState.NOTE, "none: stages talk through sockets", fix)
    yield from _workspace_checks(workspace)
    yield _clock(workspace)


def package_checks(lock_file: Path) -> Iterator[Check]:
    """Hold what is installed against the lock file."""
    what = "packages"
    fix = f"{sys.executable} -m pip install -r {lock_file}   (or: make setup)"
    try:
        lines = lock_file.read_text().splitlines()
    except OSError:
        found = f"no lock file at {lock_file} to compare with"
        yield Check(what, CheckState.NOTE, found, "run it in the project's folder")
        return
    wanted = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", "\n".join(lines), re.MULTILINE))
    absent, other = [], []
    for name, version in wanted.items():
        try:
            # A build of one's own, such as +cpu, is the same release.
            had = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if had != version:
            other.append(f"{name} {had} instead of {version}")
    if absent:
        yield Check(what, CheckState.MISSING, f"not installed: {_some(absent)}", fix)
    if other:
        yield Check(what, CheckState.NOTE, f"not the tested versions: {_some(other)}", fix)
    if not absent and not other:
        yield Check(what, CheckState.OK, f"all {len(wanted)} of {lock_file.name}")


def _workspace_checks(workspace: Workspace) -> Iterator[Check]:
    there = next(path for path in (workspace.root, *workspace.root.parents) if path.exists())
    fix = f"set {HOME_VARIABLE} to another folder"
    is_new = "" if there == workspace.root else ", not made yet"
    if not os.access(there, os.W_OK | os.X_OK):
        yield Check("workspace", CheckState.MISSING, f"{workspace.root} cannot be written", fix)
    else:
        yield Check("workspace", CheckState.OK, f"{workspace.root}{is_new}")
    usage = shutil.disk_usage(there)
    # What a user may have, which is less than what is not used.
    share = 1 - usage.free / usage.total
    text = f"{usage.free / GIB:.1f} GiB free, {share:.0%} used"
    if usage.free < LEAST_DISK_GIB * GIB or share > FULL_SHARE:
        state = CheckState.MISSING if usage.free < LEAST_DISK_GIB * GIB else CheckState.NOTE
        found = f"{text}; at least {LEAST_DISK_GIB:.0f} GiB are needed"
        yield Check("disk", state, found, f"heterps tidy --keep-days 7, or {fix}")
    else:
        yield Check("disk", CheckState.OK, text)


def _clock(workspace: Workspace) -> Check:
    """See whether the clock has gone back behind what this workspace has written already."""
    now = time.time()
    newest = max(
        (path.stat().st_mtime for path in (workspace.ledger_path, workspace.tracking_path) if path.exists()),
        default=0.0,
    )
    zone = time.strftime("%Z (%z)")
    if newest > now + CLOCK_SLACK_S:
        found = f"{newest - now:,.0f} s behind what was written already: leases and bills would be wrong"
        return Check("clock", CheckState.MISSING, found, "timedatectl set-ntp true")
    return Check("clock", CheckState.OK, f"{time.strftime('%Y-%m-%d %H:%M')} {zone}")


def _enough(what: str, amount: float, unit: str, *, least: float, fix: str) -> Check:
    if amount < least:
        found = f"{amount:.3g}{unit}, at least {least:.3g} are wanted"
        return Check(what, CheckState.NOTE, found, fix)
    return Check(what, CheckState.OK, f"{amount:.3g}{unit}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


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
    """Check that databases can be written, which what serves them would not say in one line.

    Raises:
        ConfigurationError: One is locked by another process, damaged, or of a newer version.
    """
    for check in checks:
        if check.state is CheckState.MISSING:
            raise ConfigurationError(f"{check.what} must be usable, but {check.found}; {check.fix}")


def revisions(folder: Path) -> set[str]:
    """Return the revisions that the migrations in a folder know."""
    return {revision for path in folder.glob("*.py") for revision in _REVISION.findall(path.read_text())}


def newest_revisions(folder: Path) -> set[str]:
    """Return the revisions that no other one follows."""
    older = {down for path in folder.glob("*.py") for down in _DOWN_REVISION.findall(path.read_text())}
    return revisions(folder) - older


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
    known = {str(each) for each in READABLE_VERSIONS} if migrations is None else revisions(migrations)
    if health != "ok":
        fix = damage_fix or f"sqlite3 {path} .recover | sqlite3 {path}.recovered"
        return Check(what, CheckState.MISSING, f"{path} is damaged: {health}", fix)
    if revision not in known:
        found = f"{path} has tables of revision {revision}, which the installed code does not know"
        fix = "make setup   (a newer version wrote it), or set HETERPS_HOME to another folder"
        return Check(what, CheckState.MISSING, found, fix)
    if migrations is not None and revision not in newest_revisions(migrations):
        found = f"tables of revision {revision}, older than the installed code"
        return Check(what, CheckState.NOTE, found, upgrade)
    return Check(what, CheckState.OK, f"opens, whole, tables of revision {revision}")


def _package_folder(name: str) -> Path:
    """Return where a package is installed, without importing it."""
    found = importlib.util.find_spec(name)
    locations = list(found.submodule_search_locations or []) if found else []
    return Path(locations[0]) if locations else Path("/nonexistent")
