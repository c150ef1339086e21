"""The processes of local nodes: how they start, how all of them are found again, and how they end.

Each node is the leader of its own session, and its tags are environment variables, which every descendant inherits. A
process is found by either, so that one that left the session or dropped the tags ends with its node.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.json_codec import from_json, to_json
from heterps_core.json_file import replace_json
from heterps_core.training.node import NODE_ID_VARIABLE
from infra.bootstrap.node_start import RUN_ID_VARIABLE

STATE_VARIABLE = "HETERPS_STATE_DIR"
"""Distinguishes the processes of two state directories on one machine."""

_TERM_GRACE_S = 3.0

_KILL_GRACE_S = 10.0
POLL_INTERVAL_S = 0.02

_CREATE_TIME_TOLERANCE_S = 2.0
"""The clock of a machine may be set while a process lives; a pid does not come back so soon."""

NodeKey = tuple[str, str]
"""Run id and node id."""

_CHILDREN: dict[tuple[Path, NodeKey], subprocess.Popen[bytes]] = {}
"""Nodes that this very process started, by state directory: only a parent can clear an ended child away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from a later one with the same pid."""

    pid: int
    created_at_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a process that exists."""
        return cls(pid=pid, created_at_s=psutil.Process(pid).create_time())

    def is_alive(self) -> bool:
        """Tell whether this very process exists and has not ended."""
        try:
            return self.owns_its_pid() and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def owns_its_pid(self) -> bool:
        """Tell whether no other process has its pid.

        While a session has members, its number is given to no new process: only a process that has the pid and
        another time of creation shows that the session is gone and the number used again.
        """
        try:
            created_at_s = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return True
        return abs(created_at_s - self.created_at_s) <= _CREATE_TIME_TOLERANCE_S


class NodeProcesses:
    """The processes of the nodes of one state directory."""

    def __init__(self, state_directory: Path) -> None:
        self._state_directory = state_directory

    def start(
        self, key: NodeKey, command: Sequence[str], *, environment: Mapping[str, str], console: Path
    ) -> ProcessIdentity:
        """Start a node as the leader of a session; it has the variables of this process too.

        Raises:
            OSError: It cannot be started.
        """
        with console.open("ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **environment,
                    NODE_ID_VARIABLE: key[1],
                    STATE_VARIABLE: str(self._state_directory),
                },
                start_new_session=True,
            )
        _CHILDREN[self._state_directory, key] = child
        return ProcessIdentity.of(child.pid)

    def tagged(self) -> Iterator[tuple[psutil.Process, NodeKey]]:
        """Yield the processes on this machine that carry the tags of this state directory."""
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if environment.get(STATE_VARIABLE) == str(self._state_directory) and process.pid != os.getpid():
                yield process, (environment.get(RUN_ID_VARIABLE, ""), environment.get(NODE_ID_VARIABLE, ""))

    def end(self, keys: Collection[NodeKey], leaders: Sequence[ProcessIdentity]) -> None:
        """Ask the processes of nodes to end, and end those that stay.

        Processes are looked for again until none is left: one may have been started meanwhile.

        Raises:
            ProvisioningError: A process is there after it was killed.
        """
        began_s = time.monotonic()
        asked: set[int] = set()
        while processes := self._of(keys, leaders):
            waited_s = time.monotonic() - began_s
            if waited_s > _KILL_GRACE_S:
                pids = ", ".join(str(process.pid) for process in processes)
                runs = ", ".join(sorted({run_id for run_id, _ in keys}))
                raise ProvisioningError(
                    f"the processes {pids} of run {runs} must end when they are killed, and did not within "
                    f"{_KILL_GRACE_S:.0f} s; look at them with ps, the next sweep will try again"
                )
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if waited_s > _TERM_GRACE_S:
                        process.kill()
                    elif process.pid not in asked:
                        process.terminate()
                        asked.add(process.pid)
            time.sleep(POLL_INTERVAL_S)
        for key in keys:
            if child := _CHILDREN.pop((self._state_directory, key), None):
                child.wait()

    def _of(self, keys: Collection[NodeKey], leaders: Sequence[ProcessIdentity]) -> list[psutil.Process]:
        """Return the live processes that carry the tag of a node, or are in the session of its leader."""
        found = {process.pid: process for process, key in self.tagged() if key in keys}
        sessions = {leader.pid for leader in leaders if leader.owns_its_pid()}
        for process in psutil.process_iter():
            if process.pid not in found and _session_of(process.pid) in sessions:
                found[process.pid] = process
        return [process for process in found.values() if not _is_zombie(process)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _is_zombie(process: psutil.Process) -> bool:
    """Tell whether a process has ended and only its entry is left."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseFile:
    """What stands on disk for one node, written before its process is started."""

    instance_type: str
    port: int = 0
    """Where workers meet, if this node is the first of its launch; 0 in files of versions that had no port there."""

    owner: ProcessIdentity
    launched_at: str
    lease_until: str
    leader: ProcessIdentity | None = None
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
