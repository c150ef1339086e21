"""Keep a few long-running processes up, and end them all without leaving one behind.

A small process manager instead of a shell script, because a shell leaves grandchildren behind on
Ctrl-C and says nothing about a process that dies at night. It knows nothing of what it runs.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flows.service.guard import end_session, line_for
from heterps_core.errors import ConfigurationError, HeterpsError

MAX_RESTARTS = 5
"""A process that dies more often than this within RESTART_WINDOW_S will not come back by itself."""

RESTART_WINDOW_S = 600.0
POLL_S = 0.2
SHOWN_LINES = 12
"""Of the log of a process that died."""


class ServiceError(HeterpsError):
    """A service does not come up, or keeps dying."""

    exit_status = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One long-running process and how to tell that it works."""

    name: str
    command: Sequence[str]
    is_ready: Callable[[], bool]
    """Called until it is true after every start."""

    log_path: Path
    start_timeout_s: float = 90.0
    """Generous: the first start writes the database tables."""

    stop_timeout_s: float = 10.0
    """Time between the request to end and the kill."""


@dataclass(kw_only=True)
class Supervisor:
    """Starts services in order, restarts what dies, stops in reverse order.

    Where this process is killed, `flows/service/guard.py` ends the services in its place.

    Life cycle: `start` once, then `watch` until `request_stop` is called from a signal handler or
    another thread, then `stop` in any case (it may be called twice).
    """

    environment: Mapping[str, str]
    """Complete environment of every service."""

    report: Callable[[str], None]
    """Receives one line for people when something dies or is restarted."""

    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _services: list[Service] = field(default_factory=list)
    _guard: subprocess.Popen[bytes] | None = None
    _deaths: dict[str, deque[float]] = field(default_factory=dict)
    _stop_requested: threading.Event = field(default_factory=threading.Event)

    def start(self, *services: Service) -> None:
        """Start services side by side and wait until all are ready.

        Raises:
            ConfigurationError: One ends with that error's status: something is set wrong.
            ServiceError: One ends or does not answer within its time; its last lines are shown.
        """
        for service in services:
            self._launch(service)
            self._services.append(service)
        for service in services:
            self._wait_until_ready(service)

    def watch(self) -> None:
        """Restart what dies, until a stop is requested.

        Raises:
            ServiceError: A service died more than MAX_RESTARTS times within RESTART_WINDOW_S.
        """
        while not self._stop_requested.wait(POLL_S):
            for service in self._services:
                status = self._processes[service.name].poll()
                if status is not None:
                    self._restart(service, status)

    def request_stop(self) -> None:
        """Make `watch` and any waiting for readiness return soon; safe in a signal handler."""
        self._stop_requested.set()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stop_requested.is_set()

    def stop(self) -> None:
        """End all services in reverse order, with everything they started; may be called again."""
        self._stop_requested.set()
        for service in reversed(self._services):
            process = self._processes.pop(service.name, None)
            if process is not None:
                end_process_tree(process, timeout_s=service.stop_timeout_s)
        self._services.clear()
        if self._guard is not None:
            # It ends with its pipe, as nothing is left to end.
            self._guard.communicate()
            self._guard = None

    def _launch(self, service: Service) -> None:
        service.log_path.parent.mkdir(parents=True, exist_ok=True)
        with service.log_path.open("ab") as log:
            process = self._processes[service.name] = subprocess.Popen(
                list(service.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                # Ctrl-C reaches this process alone, which then ends the others in order.
                start_new_session=True,
            )
        self._tell_guard(process, service)

    def _tell_guard(self, process: subprocess.Popen[bytes], service: Service) -> None:
        if self._guard is None:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "flows.service.guard"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(self.environment),
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        with contextlib.suppress(psutil.NoSuchProcess, BrokenPipeError):
            line = line_for(process.pid, patience_s=service.stop_timeout_s)
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()

    def _wait_until_ready(self, service: Service) -> None:
        process = self._processes[service.name]
        deadline = time.monotonic() + service.start_timeout_s
        while not self._stop_requested.is_set():
            if process.poll() is not None:
                if process.returncode == ConfigurationError.exit_status:
                    # It will not come back by itself, and has said why.
                    said = last_lines(service.log_path).splitlines()[-1].strip()
                    raise ConfigurationError(
                        f"{service.name} must have settings that can be used: {said.removeprefix('error: ')}"
                    )
                raise ServiceError(
                    f"{service.name} must stay up, but ended with status {process.returncode} while "
                    f"starting; its last lines in {service.log_path}:\n{last_lines(service.log_path)}"
                )
            if service.is_ready():
                return
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{service.name} must answer within {service.start_timeout_s:.0f} s, but does not; "
                    f"its last lines in {service.log_path}:\n{last_lines(service.log_path)}"
                )
            self._stop_requested.wait(POLL_S)

    def _restart(self, service: Service, status: int) -> None:
        """Start a service again, also where it dies while it starts, until it is up or has died too often."""
        while True:
            self._wait_before_restart(service, status)
            if self.is_stopping:
                return
            self._launch(service)
            try:
                self._wait_until_ready(service)
            except ServiceError:
                process = self._processes[service.name]
                if process.poll() is None:
                    raise
                status = process.returncode
                continue
            if not self.is_stopping:
                self.report(f"{service.name} is up again")
            return

    def _wait_before_restart(self, service: Service, status: int) -> None:
        """Wait, longer after every death.

        Raises:
            ServiceError: It has died too often.
        """
        now = time.monotonic()
        deaths = self._deaths.setdefault(service.name, deque())
        deaths.append(now)
        while now - deaths[0] > RESTART_WINDOW_S:
            deaths.popleft()
        if len(deaths) > MAX_RESTARTS:
            raise ServiceError(
                f"{service.name} died {len(deaths)} times within {RESTART_WINDOW_S / 60:.0f} minutes, "
                f"more than {MAX_RESTARTS} restarts are not tried; its last lines in "
                f"{service.log_path}:\n{last_lines(service.log_path)}"
            )
        delay_s = float(2 ** (len(deaths) - 1) - 1)
        self.report(f"{service.name} ended with status {status}; starting it again in {delay_s:.0f} s")
        self._stop_requested.wait(delay_s)


def end_process_tree(process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Ask what a process has started to end, then the process; kill what is left after `timeout_s`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        # Noted before the end, as orphans no longer tell whose they were.
        family = leader.children(recursive=True)
        end_session(process.pid, leader.create_time(), patience_s=timeout_s)
        # What was started into sessions of its own.
        left = [member for member in family if member.is_running()]
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        _, left = psutil.wait_procs(left, timeout=1.0)
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(left, timeout=5.0)
    if process.poll() is None:
        process.kill()
    process.wait()


def last_lines(path: Path) -> str:
    """Return the end of a log, indented, or a note that there is none."""
    try:
        with path.open(errors="replace") as log:
            lines = deque(log, maxlen=SHOWN_LINES)
    except OSError:
        lines = deque()
    return "".join(f"    {line.rstrip()}\n" for line in lines).rstrip() or "    (nothing was written)"
