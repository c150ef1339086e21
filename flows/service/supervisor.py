"""Keeps a few long-running processes up, and ends all of them.

It knows nothing of what it runs. Linux only, for `prctl`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from heterps_core.errors import ConfigurationError, HeterpsError

MAX_RESTARTS = 5
"""A process that dies more often than this within RESTART_WINDOW_S will not come back by itself."""

RESTART_WINDOW_S = 600.0
POLL_S = 0.2
_SHOWN_LINES = 12

SERVICE_VARIABLE = "HETERPS_SERVICE"
"""Tells a service, and what it starts, from other processes of a workspace: by this a later start finds them."""

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class ServiceError(HeterpsError):
    """A service does not come up, or keeps dying."""

    exit_status = 7


@dataclass(kw_only=True)
class Service:
    """One long-running process, how to tell that it works, and what became of it."""

    name: str
    command: Sequence[str]
    is_ready: Callable[[], bool]
    log_path: Path
    start_timeout_s: float = 300.0
    """Generous: the first start writes the database tables."""

    stop_timeout_s: float = 10.0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    """All that were started, as what a dead one has started may live; the last one is the present one."""

    started_s: float = field(default=0.0, init=False)
    is_up: bool = field(default=False, init=False)
    deaths_s: list[float] = field(default_factory=list, init=False)
    """Within the last RESTART_WINDOW_S."""

    def error(self, what: str) -> ServiceError:
        """Return an error that says what is wrong, with the last lines of the log."""
        said = "\n".join(f"    {line}" for line in _last_lines(self.log_path)) or "    (nothing was written)"
        return ServiceError(f"{self.name} {what}; its last lines in {self.log_path}:\n{said}")


@dataclass(kw_only=True)
class Supervisor:
    """Starts services, restarts what dies, ends them in reverse order.

    Life cycle: `start` once, then `watch` until `stop_requested` is set by a signal handler or another thread, then
    `stop` in any case (it may be called twice).
    """

    environment: Mapping[str, str]
    report: Callable[[str], None]
    """Receives one line for people when something dies or is restarted."""

    ends_with_thread: bool = False
    """Whether services are asked to end when the thread that starts them is gone, all at once."""

    stop_requested: threading.Event = field(default_factory=threading.Event)
    _services: Sequence[Service] = ()

    def start(self, *services: Service) -> None:
        """Start services side by side and wait until all are ready, or a stop is requested.

        Raises:
            ConfigurationError: One ends with that error's status: something is set wrong.
            ServiceError: One ends or does not answer within its time; its last lines are shown.
        """
        self._services = services
        for service in services:
            self._launch(service)
        while not all(service.is_up for service in services) and not self.stop_requested.is_set():
            self._look_at_all()

    def watch(self) -> None:
        """Restart what dies, until a stop is requested.

        Raises:
            ConfigurationError, ServiceError: As `start`; or a service died more than MAX_RESTARTS times within
                RESTART_WINDOW_S.
        """
        while not self.stop_requested.is_set():
            self._look_at_all()

    def stop(self) -> None:
        """End all services in reverse order, with what they started; may be called again."""
        self.stop_requested.set()
        for service in reversed(self._services):
            for process in service.processes:
                _end_session(process.pid, patience_s=service.stop_timeout_s)
                process.wait()
        self._services = ()

    def _launch(self, service: Service) -> None:
        service.log_path.parent.mkdir(parents=True, exist_ok=True)
        marker = {} if self.ends_with_thread else {SERVICE_VARIABLE: service.name}
        with service.log_path.open("ab") as log:
            process = subprocess.Popen(
                list(service.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, **marker},
                # Ctrl-C reaches this process alone, which then ends the others in order.
                start_new_session=True,
                preexec_fn=_end_with_parent if self.ends_with_thread else None,
            )
        service.processes.append(process)
        service.started_s, service.is_up = time.monotonic(), False

    def _look_at_all(self) -> None:
        for service in self._services:
            if self.stop_requested.is_set():
                return
            if (status := service.processes[-1].poll()) is not None:
                self._restart(service, status)
            elif not service.is_up and service.is_ready():
                service.is_up = True
                if service.deaths_s:
                    self.report(f"{service.name} is up again")
            elif not service.is_up and time.monotonic() - service.started_s > service.start_timeout_s:
                raise service.error(f"must answer within {service.start_timeout_s:.0f} s, but does not")
        self.stop_requested.wait(POLL_S)

    def _restart(self, service: Service, status: int) -> None:
        """Start a service again that was up, or died while it was started again; wait longer after every death."""
        if not service.is_up and status == ConfigurationError.exit_status:
            # It has said why, and will not come back by itself.
            said = "".join(_last_lines(service.log_path)[-1:]).strip().removeprefix("error: ")
            raise ConfigurationError(f"{service.name} must have settings that can be used: {said}")
        if not service.is_up and not service.deaths_s:
            raise service.error(f"must stay up, but ended with status {status} while starting")
        now = time.monotonic()
        service.deaths_s = [at for at in service.deaths_s if now - at <= RESTART_WINDOW_S] + [now]
        if (num_deaths := len(service.deaths_s)) > MAX_RESTARTS:
            raise service.error(
                f"died {num_deaths} times within {RESTART_WINDOW_S / 60:.0f} minutes, more than {MAX_RESTARTS} "
                f"restarts are not tried"
            )
        delay_s = 2 ** (num_deaths - 1) - 1
        self.report(f"{service.name} ended with status {status}; starting it again in {delay_s} s")
        if not self.stop_requested.wait(delay_s):
            self._launch(service)


def end_leftovers(services: Sequence[Service], *, environment: Mapping[str, str]) -> int:
    """End what a supervisor that was killed has left of these services, in reverse order; return how many sessions.

    The variables of `environment` distinguish processes of this workspace from those of another.
    """
    num_ended = 0
    for service in reversed(services):
        wanted = {**environment, SERVICE_VARIABLE: service.name}
        # The service's own session before those of what it has started.
        sessions: dict[int, None] = {}
        for process in sorted(psutil.process_iter(), key=lambda each: each.create_time()):
            with suppress(psutil.Error, OSError):
                if wanted.items() <= process.environ().items():
                    sessions[os.getsid(process.pid)] = None
        for leader in sessions:
            _end_session(leader, patience_s=service.stop_timeout_s)
        num_ended += len(sessions)
    return num_ended


def _end_session(leader: int, *, patience_s: float) -> None:
    """End the processes of a session, and its leader when nothing else is left of it.

    In this order, as a serving process that is asked to end kills its flow runs at once (asyncio does, when its loop
    closes), and they could neither terminate their machines nor report to the server.

    The leader may have ended. After `patience_s` all are killed: a run in mid-training ends its machines first.
    """
    below: list[psutil.Process] = []
    with suppress(psutil.Error):
        below = psutil.Process(leader).children(recursive=True)
    deadline = time.monotonic() + patience_s
    asked: set[int] = set()
    while True:
        members = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        if not members:
            break
        for process in members:
            with suppress(psutil.Error):
                if time.monotonic() > deadline:
                    process.kill()
                elif process.pid not in asked and (process.pid != leader or len(members) == 1):
                    asked.add(process.pid)
                    process.terminate()
        time.sleep(POLL_S)
    # In sessions of their own, such as the nodes of a run that had to be killed.
    for process in below:
        with suppress(psutil.Error):
            process.kill()


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _last_lines(path: Path) -> list[str]:
    """Return the end of a log; nothing where there is none."""
    return path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:] if path.exists() else []
