"""The memory of this machine: what is free for training, what a process uses, and whether the kernel killed for it.

A control group (a container, a service) may allow less than the machine has; the smaller of the two counts. All
figures are Linux's; elsewhere nothing is known, and nothing is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.training.node.failures import OutOfMemoryError

MEMORY_FIX = "use smaller tables, more replicas, or a machine with more memory"

_ALLOCATION_FAILURES = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "out of memory")
"""Texts of torch's allocators, the system, C++ and CUDA; each raises a kind of its own."""

_KILL_COUNTERS = ("memory.events", "memory.oom_control")
"""Files of a control group of version 2 and 1."""

_ROOT_GROUP = Path("/sys/fs/cgroup/memory")
"""The root group of version 1; what it counts is not what happens in the whole machine."""

_UNLIMITED_BYTES = 1 << 60
"""A control group of version 1 without a limit says a number above this."""


def total_bytes() -> int | None:
    """Return the memory that this machine gives its processes, None where that is not known."""
    limit, _ = _group_bytes()
    return _least(_machine_bytes("MemTotal"), limit)


def available_bytes() -> int | None:
    """Return how much of it is free or can be freed, None where that is not known."""
    limit, used = _group_bytes()
    in_group = None if limit is None or used is None else max(limit - used, 0)
    return _least(_machine_bytes("MemAvailable"), in_group)


def process_bytes(pid: int) -> int | None:
    """Return the resident memory of a process, shared parts included; None where it is gone or not known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def peak_bytes() -> int | None:
    """Return the most memory that this process has had resident, shared parts included; None where not known.

    `getrusage` also counts what the process had from which it was forked.
    """
    kibibytes = _counters(Path("/proc/self/status")).get("VmHWM:")
    return None if kibibytes is None else kibibytes * 1024


def _num_memory_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory; None where it does not tell.

    In a control group those of the group: others on the machine say nothing of this run.
    """
    own = _groups()[:1]
    for path in (*(group / name for group in own for name in _KILL_COUNTERS), Path("/proc/vmstat")):
        if (
            path != _ROOT_GROUP / "memory.oom_control"
            and (kills := _counters(path).get("oom_kill")) is not None
        ):
            return kills
    return None


def allocation_failure(error: BaseException) -> OutOfMemoryError | None:
    """Return the message for an error that means that no memory is left; None for any other."""
    text = str(error)
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _ALLOCATION_FAILURES)
    ):
        return None
    first_line = text.partition("\n")[0] or type(error).__name__
    return OutOfMemoryError(
        f"a worker must fit into memory, but could get no more: {first_line}; it uses "
        f"{gigabytes(process_bytes(os.getpid()))} of {gigabytes(total_bytes())}; {MEMORY_FIX}"
    )


def check_workers_fit(
    bytes_by_worker: Mapping[str, Sequence[int]], *, where: str, made_of: Mapping[str, object] | None = None
) -> None:
    """Check, before any worker starts on this machine, that all find room there.

    Args:
        bytes_by_worker: What each worker of a stage needs, by the name of the stage.
        made_of: What that is for, by the same names; for the message.

    Raises:
        ConfigurationError: They need more than is free; the message has the figures.
    """
    needed = sum(sum(workers) for workers in bytes_by_worker.values())
    free = available_bytes()
    if free is None or needed <= free:
        return
    parts = "; ".join(
        f"{len(workers)} of {name} {gigabytes(max(workers))} each" + (f": {made_of[name]}" if made_of else "")
        for name, workers in bytes_by_worker.items()
        if workers
    )
    raise ConfigurationError(
        f"the workers of {where} must fit into its free memory, but need {gigabytes(needed)} ({parts}), and of "
        f"{gigabytes(total_bytes())} {gigabytes(free)} are free; {MEMORY_FIX}"
    )


class MemoryWatch:
    """Tells whether the kernel has killed a process for lack of memory since the last time that it was asked."""

    def __init__(self) -> None:
        self._num_kills = _num_memory_kills()

    def shortage(self, process: str = "a worker", last_bytes: int | None = None) -> str | None:
        """Return what to say of a killed process that used so much when it was last seen; None for another death."""
        num_kills, before = _num_memory_kills(), self._num_kills
        self._num_kills = num_kills
        if num_kills is None or before is None or num_kills <= before:
            return None
        return (
            f"{process} must fit into memory, but the kernel killed its process for lack of it: it used "
            f"{gigabytes(last_bytes)} when last seen, of {gigabytes(total_bytes())} that its machine gives; "
            f"{MEMORY_FIX}"
        )


def gigabytes(num_bytes: int | None) -> str:
    """Return a size for people."""
    return "an unknown part" if num_bytes is None else f"{num_bytes / 1e9:,.2f} GB"


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _machine_bytes(field: str) -> int | None:
    kibibytes = _counters(Path("/proc/meminfo")).get(f"{field}:")
    return None if kibibytes is None else kibibytes * 1024


def _group_bytes() -> tuple[int | None, int | None]:
    """Return the limit of the innermost control group that has one, and what it uses and cannot free."""
    for group in _groups():
        for limit_file, used_file, cached_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(group / limit_file)
            if limit is not None and limit < _UNLIMITED_BYTES:
                used = _number(group / used_file)
                cached = _counters(group / "memory.stat").get(cached_key, 0)
                return limit, None if used is None else used - cached
    return None, None


def _groups() -> list[Path]:
    """Return the folders of this process's memory control group and of those around it, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in sorted(lines, key=lambda line: "memory" not in line):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers:
            root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
            own = root / path.lstrip("/")
            # In a container the path may be the host's, while its own group is what stands at the root.
            inner = [own, *own.parents] if own.exists() else [root]
            return [group for group in inner if group == root or root in group.parents]
    return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _counters(path: Path) -> dict[str, int]:
    """Return a file of lines "name number ..." as a table; an empty one where it is missing."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
