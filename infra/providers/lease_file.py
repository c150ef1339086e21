"""What the local provider keeps on disk for a node: who started it, which process leads it, until when it may live.

Written before the process is started, so that a sweeper finds what a dead owner left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.json_codec import from_json, to_json
from heterps_core.json_file import replace_json
from infra.providers.local_processes import ProcessIdentity


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
        replace_json(path, to_json(self))

    @classmethod
    def read(cls, path: Path) -> LeaseFile | None:
        """Return the content, or None where it cannot be read."""
        try:
            return from_json(cls, json.loads(path.read_text()))
        except (OSError, ValueError, ConfigurationError):
            return None

    def lease_end(self) -> datetime | None:
        """Return the end of the lease, or None where it is no time with a zone."""
        try:
            until = datetime.fromisoformat(self.lease_until)
        except ValueError:
            return None
        return until if until.tzinfo else None
