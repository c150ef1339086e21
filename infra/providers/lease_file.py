"""What the local provider keeps on disk for a node: who started it, which process leads it, until when it may live.

Written before the process is started, so that a sweeper finds what a dead owner left.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

CREATE_TIME_TOLERANCE_S = 2.0
"""The clock of a machine may be set while a process lives; a pid does not come back so soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process told apart from a later one with the same pid."""

    pid: int
    created_at_s: float
    """Seconds since the epoch."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a process that exists."""
        return cls(pid=pid, created_at_s=psutil.Process(pid).create_time())

    def is_alive(self) -> bool:
        """Tell whether this very process exists and has not ended."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.created_at_s) <= CREATE_TIME_TOLERANCE_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseFile:
    """What stands on disk for one node, written before its process is started."""

    run_id: str
    node_id: str
    instance_type: str
    run_directory: str
    rendezvous: str
    owner: ProcessIdentity
    launched_at: str
    lease_until: str
    leader: ProcessIdentity | None
    """The node's first process; None until it is started."""

    def write(self, path: Path) -> None:
        """Write the file; a reader sees the old one or the new one, never a part."""
        part = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> LeaseFile | None:
        """Return the content, or None where it cannot be read."""
        try:
            values = json.loads(path.read_text())
            leader = values["leader"]
            return cls(
                **{
                    **values,
                    "owner": ProcessIdentity(**values["owner"]),
                    "leader": ProcessIdentity(**leader) if leader else None,
                }
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def lease_end(self) -> datetime | None:
        """Return the end of the lease, or None where it is no time with a zone."""
        try:
            until = datetime.fromisoformat(self.lease_until)
        except ValueError:
            return None
        return until if until.tzinfo else None
