"""What a machine needs to run the line: each thing with its state, and the command that mends it.

Read-only: a check starts nothing, writes nothing, and never raises for what it finds.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from infra.workspace import HOME_VARIABLE, Workspace

GIB = 2**30
LEAST_PYTHON = (3, 11)
MOST_NAMES = 4
"""Of packages in one line."""

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
    """Works without it, slower or less."""

    MISSING = "missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: CheckState
    found: str
    fix: str | None = None
    """A command or a step, where something is to be fixed."""


def machine_checks(workspace: Workspace) -> Iterator[Check]:
    """Look at Python, the compiler, cores, memory, disk and clock."""
    yield _python()
    yield _compiler()
    yield _enough(
        "processor cores", float(os.cpu_count() or 1), least=2.0, unit="", fix="use a larger machine"
    )
    yield _enough(
        "memory",
        psutil.virtual_memory().total / GIB,
        least=LEAST_MEMORY_GIB,
        unit=" GiB",
        fix="use a larger machine, or a smaller --batch-size",
    )
    yield _shared_memory()
    yield from _workspace_checks(workspace)
    yield _clock(workspace)


def package_checks(lock_file: Path) -> Iterator[Check]:
    """Hold what is installed against the lock file."""
    what = "packages"
    fix = f"{sys.executable} -m pip install -r {lock_file}   (or: make setup)"
    try:
        lines = lock_file.read_text().splitlines()
    except OSError:
        yield Check(
            what=what,
            state=CheckState.NOTE,
            found=f"no lock file at {lock_file} to compare with",
            fix="run it in the project's folder",
        )
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
        yield Check(what=what, state=CheckState.MISSING, found=f"not installed: {_some(absent)}", fix=fix)
    if other:
        yield Check(
            what=what, state=CheckState.NOTE, found=f"not the tested versions: {_some(other)}", fix=fix
        )
    if not absent and not other:
        yield Check(what=what, state=CheckState.OK, found=f"all {len(wanted)} of {lock_file.name}")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < LEAST_PYTHON:
        return Check(
            what="Python",
            state=CheckState.MISSING,
            found=f"{version}, but 3.11 or newer is needed",
            fix="make clean && make setup PYTHON=python3.11",
        )
    if sys.version_info[:2] > LEAST_PYTHON:
        return Check(
            what="Python",
            state=CheckState.NOTE,
            found=f"{version}; tested with 3.11",
            fix="make clean && make setup PYTHON=python3.11",
        )
    return Check(what="Python", state=CheckState.OK, found=f"{version} ({sys.executable})")


def _compiler() -> Check:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return Check(
            what="C++ compiler",
            state=CheckState.NOTE,
            found="none: torch looks rows up and updates them, which is slower",
            fix="apt-get install g++",
        )
    return Check(what="C++ compiler", state=CheckState.OK, found=compiler)


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    fix = "in a container: --shm-size 1g; else: mount -o remount,size=1G /dev/shm"
    if not path.is_dir():
        return Check(
            what="/dev/shm", state=CheckState.NOTE, found="none: stages talk through sockets", fix=fix
        )
    return _enough(
        "/dev/shm", shutil.disk_usage(path).free / GIB, least=LEAST_SHM_GIB, unit=" GiB free", fix=fix
    )


def _workspace_checks(workspace: Workspace) -> Iterator[Check]:
    there = next(path for path in (workspace.root, *workspace.root.parents) if path.exists())
    fix = f"set {HOME_VARIABLE} to another folder"
    is_new = "" if there == workspace.root else ", not made yet"
    if not os.access(there, os.W_OK | os.X_OK):
        found = f"{workspace.root} cannot be written"
        yield Check(what="workspace", state=CheckState.MISSING, found=found, fix=fix)
    else:
        yield Check(what="workspace", state=CheckState.OK, found=f"{workspace.root}{is_new}")
    usage = shutil.disk_usage(there)
    # What a user may have, which is less than what is not used.
    share = 1 - usage.free / usage.total
    text = f"{usage.free / GIB:.1f} GiB free, {share:.0%} used"
    if usage.free < LEAST_DISK_GIB * GIB or share > FULL_SHARE:
        yield Check(
            what="disk",
            state=CheckState.MISSING if usage.free < LEAST_DISK_GIB * GIB else CheckState.NOTE,
            found=f"{text}; at least {LEAST_DISK_GIB:.0f} GiB are needed",
            fix=f"heterps tidy --keep-days 7, or {fix}",
        )
    else:
        yield Check(what="disk", state=CheckState.OK, found=text)


def _clock(workspace: Workspace) -> Check:
    """See whether the clock has gone back behind what this workspace has written already."""
    now = time.time()
    newest = max(
        (path.stat().st_mtime for path in (workspace.ledger_path, workspace.tracking_path) if path.exists()),
        default=0.0,
    )
    zone = time.strftime("%Z (%z)")
    if newest > now + CLOCK_SLACK_S:
        return Check(
            what="clock",
            state=CheckState.MISSING,
            found=f"{newest - now:,.0f} s behind what was written already: leases and bills would be wrong",
            fix="timedatectl set-ntp true",
        )
    return Check(what="clock", state=CheckState.OK, found=f"{time.strftime('%Y-%m-%d %H:%M')} {zone}")


def _enough(what: str, amount: float, *, least: float, unit: str, fix: str) -> Check:
    if amount < least:
        found = f"{amount:.3g}{unit}, at least {least:.3g} are wanted"
        return Check(what=what, state=CheckState.NOTE, found=found, fix=fix)
    return Check(what=what, state=CheckState.OK, found=f"{amount:.3g}{unit}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
