"""Ends services whose supervisor is gone, even by SIGKILL: the last process to leave.

It holds the end of a pipe that only the supervisor writes to; when the pipe closes, the services are ended as the
supervisor would have: those that were started last first, so that a flow run can still tell its server how it ended,
and each with all that it has started in its session. `flows/service/supervisor.py` starts it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil

POLL_S = 0.1


def main() -> None:
    """Read a line for each service until the supervisor closes the pipe, then end what is left of them."""
    # Whatever ends a whole terminal or service must not end this first.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    for line in reversed(sys.stdin.readlines()):
        pid, started, patience_s = line.split()
        end_session(int(pid), float(started), patience_s=float(patience_s))


def line_for(pid: int, *, patience_s: float) -> str:
    """Return what the guard reads of a service.

    Raises:
        psutil.NoSuchProcess: It has ended already.
    """
    return f"{pid} {psutil.Process(pid).create_time()} {patience_s}\n"


def end_session(leader: int, started: float, *, patience_s: float) -> None:
    """End what a process has started in its session, then the process itself; kill all of it after `patience_s`.

    In this order, as a serving process that is told to end kills its flow runs at once (asyncio does, when its loop
    closes), and they could neither end their machines nor tell the server.

    Args:
        leader: Its process id, which is that of the session too.
        started: When it was started, in seconds since 1970, as its number may have been given again.
        patience_s: Time to end well: a run in mid-training ends its machines first.
    """
    deadline = time.monotonic() + patience_s
    told: set[int] = set()
    while members := {process.pid: process for process in _members(leader, started)}:
        is_over = time.monotonic() > deadline
        for pid, process in members.items():
            if is_over:
                _send(process, signal.SIGKILL)
            elif pid not in told and (pid != leader or len(members) == 1):
                told.add(pid)
                _send(process, signal.SIGTERM)
        time.sleep(POLL_S)


def _members(leader: int, started: float) -> Iterator[psutil.Process]:
    """Yield the living processes of a session; none where another process leads one of the same number."""
    try:
        if abs(psutil.Process(leader).create_time() - started) > 0.01:
            return
    except psutil.NoSuchProcess:
        # While a member lives, the number is not given again.
        pass
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue


def _send(process: psutil.Process, signal_number: int) -> None:
    try:
        process.send_signal(signal_number)
    except psutil.Error:
        return


if __name__ == "__main__":
    main()
