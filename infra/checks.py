"""Checks of a machine: each thing that the line needs, its state, and the command that fixes it.

Read-only: a check starts nothing, writes nothing, and never raises for what it finds.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from heterps_core.errors import HeterpsError
from infra.workspace import HOME_VARIABLE, Workspace

_GIB = 2**30
_TESTED_PYTHON = (3, 11)
_MOST_NAMES = 4

_LEAST_MEMORY_GIB = 4.0
_LEAST_DISK_GIB = 5.0
"""The synthetic stream, its profiles and the checkpoints of a few runs."""

_LEAST_SHM_GIB = 0.25
"""Workers of a dry run hand activations and tables to one another there."""

_FULL_SHARE = 0.95
"""Used share of a disk; databases fail first, and in the middle of a night."""

_CLOCK_SLACK_S = 120.0


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


def tried(what: str, ask: Callable[[], object], *, found: str | None = None) -> Check:
    """Return the check of a question that raises an error where something is missing; its last part is the fix."""
    try:
        answer = ask()
    except (HeterpsError, OSError) as problem:
        text, _, way_out = str(problem).rpartition("; ")
        return Check(what, CheckState.MISSING, text or str(problem), way_out)
    return Check(what, CheckState.OK, found or str(answer))


def machine_checks(workspace: Workspace) -> Iterator[Check]:
    """Look at Python, the compiler, cores, memory, disk and clock."""
    version = f"{platform.python_version()} ({sys.executable})"
    fix = "make clean && make setup PYTHON=python3.11"
    is_tested = sys.version_info[:2] == _TESTED_PYTHON
    yield _found("Python", version, "" if is_tested else ", but 3.11 is needed", CheckState.MISSING, fix)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or ""
    none = "" if compiler else "none: torch looks rows up and updates them, which is slower"
    yield _found("C++ compiler", compiler, none, CheckState.NOTE, "apt-get install g++")
    larger = "use a larger machine"
    yield _enough("processor cores", float(os.cpu_count() or 1), "", least=2.0, fix=larger)
    memory_gib = psutil.virtual_memory().total / _GIB
    fix = f"{larger}, or a smaller --batch-size"
    yield _enough("memory", memory_gib, " GiB", least=_LEAST_MEMORY_GIB, fix=fix)
    shared = Path("/dev/shm")
    fix = "in a container: --shm-size 1g; else: mount -o remount,size=1G /dev/shm"
    if shared.is_dir():
        free_gib = shutil.disk_usage(shared).free / _GIB
        yield _enough("/dev/shm", free_gib, " GiB free", least=_LEAST_SHM_GIB, fix=fix)
    else:
        yield Check("/dev/shm", CheckState.NOTE, "none: stages talk through sockets", fix)
    yield from _workspace_checks(workspace)
    yield _clock(workspace)


def _found(what: str, found: str, problem: str, worst: CheckState, fix: str) -> Check:
    """Return a check that is well without a problem, which else follows what was found, with the fix."""
    return Check(what, worst, f"{found}{problem}", fix) if problem else Check(what, CheckState.OK, found)


def package_checks(lock_file: Path) -> Iterator[Check]:
    """Compare the installed packages with the lock file."""
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
    if os.access(there, os.W_OK | os.X_OK):
        is_new = "" if there == workspace.root else ", not made yet"
        yield Check("workspace", CheckState.OK, f"{workspace.root}{is_new}")
    else:
        yield Check("workspace", CheckState.MISSING, f"{workspace.root} cannot be written", fix)
    usage = shutil.disk_usage(there)
    # What a user may have, which is less than what is not used.
    share = 1 - usage.free / usage.total
    is_short = usage.free < _LEAST_DISK_GIB * _GIB
    problem = f"; at least {_LEAST_DISK_GIB:.0f} GiB are needed" * (is_short or share > _FULL_SHARE)
    text = f"{usage.free / _GIB:.1f} GiB free, {share:.0%} used"
    worst = CheckState.MISSING if is_short else CheckState.NOTE
    yield _found("disk", text, problem, worst, f"heterps tidy --keep-days 7, or {fix}")


def _clock(workspace: Workspace) -> Check:
    """Check that the clock shows a time after the newest file of this workspace."""
    now = time.time()
    files = [path for path in (workspace.ledger_path, workspace.tracking_path) if path.exists()]
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    if newest > now + _CLOCK_SLACK_S:
        found = (
            f"{newest - now:,.0f} s before the newest file of the workspace: leases and bills would be wrong"
        )
        return Check("clock", CheckState.MISSING, found, "timedatectl set-ntp true")
    return Check("clock", CheckState.OK, time.strftime("%Y-%m-%d %H:%M %Z (%z)"))


def _enough(what: str, amount: float, unit: str, *, least: float, fix: str) -> Check:
    if amount < least:
        found = f"{amount:.3g}{unit}, at least {least:.3g} are wanted"
        return Check(what, CheckState.NOTE, found, fix)
    return Check(what, CheckState.OK, f"{amount:.3g}{unit}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
