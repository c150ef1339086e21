"""A control group whose processes get so much memory together, where root may make one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.waiting import wait_for

_LIMITS = (
    (Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
    (Path("/sys/fs/cgroup"), ("memory.max", "memory.swap.max")),
)
"""Of the first version and the second; nothing may be swapped."""


def _is_removed(group: Path) -> bool:
    """Remove a group, which its last process may be about to leave; tell whether it is gone."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a group; its processes are those whose ids are written to its file cgroup.procs."""
    if os.geteuid() != 0:
        pytest.skip("a control group needs root")
    for root, limits in _LIMITS:
        group = root / f"heterps-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / limits[0]).exists():
            group.rmdir()
            continue
        (group / limits[0]).write_text(str(limit_bytes))
        if (group / limits[1]).exists():
            (group / limits[1]).write_text("0" if limits[1] == "memory.swap.max" else str(limit_bytes))
        yield group
        wait_for(partial(_is_removed, group), what="the end of all processes of the group")
        return
    pytest.skip("no control group for memory can be made here")
