"""Serve Prefect, MLflow and the nightly deployment until Ctrl-C.

environment:
  HETERPS_HOME          folder of all state (default: .heterps)
  HETERPS_PREFECT_PORT  port of the Prefect server (default: 4200)
  HETERPS_MLFLOW_PORT   port of the MLflow UI (default: 5000)
  HETERPS_TIMEZONE      time zone of the nightly run (default: UTC)
  HETERPS_NIGHTLY       parameters of the nightly run as JSON, such as {"data": "/clicks", "ready_by": "06:00"}
  HETERPS_TRACKING_URI  a team's MLflow server, which is then not started here
  PREFECT_SERVER_API_AUTH_STRING
                        user:password that Prefect asks for (default: that of the workspace, drawn once)

exit status: 0 after a stop; 2 where something is set wrong, taken or locked; 7 where a service does not stay up.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from flows.service.addresses import MLFLOW_PORT, PREFECT_PORT, choose_addresses
from flows.service.prefect_connection import (
    SERVER_PASSWORD,
    TIMEOUT_S,
    PrefectServer,
    own_password,
    own_server,
    prefect_service,
    project_environment,
)
from flows.service.schedule import (
    NIGHTLY_TIME,
    NIGHTLY_VARIABLE,
    SWEEP_ORPHANS,
    TRAIN_CTR,
    nightly_parameters,
    nightly_timezone,
)
from flows.service.supervisor import Service, Supervisor, end_leftovers
from heterps_core.errors import ConfigurationError
from infra.database_checks import database_checks, require_usable
from infra.workspace import HOME_VARIABLE, ServiceAddresses, Workspace, answers

LOCK_FILE = "serve.lock"
"""Held while a workspace is served; the kernel lets go of it whatever kills the holder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, of which there are none."""


def run(options: argparse.Namespace) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises:
        ConfigurationError, ServiceError: Something is set wrong, taken or locked; or a service does not stay up.
    """
    from flows.parameters import TrainParameters

    nightly_timezone()
    # Its models and prices are checked by the serving process, which loads them.
    TrainParameters.of(nightly_parameters(), place=f" of {TRAIN_CTR} in {NIGHTLY_VARIABLE}")
    workspace = Workspace.locate()
    addresses = choose_addresses(workspace)
    with _only_server(workspace.create()), ExitStack() as kept:
        services = _services_to_run(workspace, addresses)
        if end_leftovers(services, environment={HOME_VARIABLE: str(workspace.root)}):
            _say("ended the services that an earlier process, which was killed, had left")
        kept.enter_context(PREFECT_PORT.keep())
        if workspace.has_own_tracking:
            kept.enter_context(MLFLOW_PORT.keep())
        require_usable(database_checks(workspace, is_thorough=False))
        _serve(workspace, addresses, services)


def _services_to_run(workspace: Workspace, addresses: ServiceAddresses) -> tuple[Service, ...]:
    """Return Prefect's server, the MLflow UI where runs are recorded here, and the serving process."""
    python = [sys.executable, "-m"]
    started = datetime.now(UTC)
    mlflow_ui = Service(
        name="MLflow UI",
        command=[
            *(*python, "flows.service.guarded_servers", "mlflow"),
            addresses.mlflow_url.rpartition(":")[2],
        ],
        is_ready=lambda: answers(f"{addresses.mlflow_url}/health", timeout_s=TIMEOUT_S),
        log_path=workspace.logs_directory / "mlflow-ui.log",
    )
    serving_process = Service(
        name="serving process",
        command=[*python, "flows.service.deployments"],
        is_ready=lambda: _is_serving(own_server(workspace, addresses), since=started),
        log_path=workspace.logs_directory / "serving.log",
        stop_timeout_s=30.0,  # a run in mid-training tears its machines down first
    )
    server = prefect_service(workspace, int(addresses.prefect_url.rpartition(":")[2]))
    return (server, *([mlflow_ui] if workspace.has_own_tracking else []), serving_process)


def _service_environment(workspace: Workspace, addresses: ServiceAddresses) -> dict[str, str]:
    """Return the environment of all services, and of the flow runs that they start."""
    server = own_server(workspace, addresses)
    return {
        # On the page's own origin, by whichever name and port of loopback a browser or a tunnel reaches it.
        "PREFECT_UI_API_URL": "/api",
        **os.environ,
        **project_environment(workspace),
        **server.client_environment(),
        SERVER_PASSWORD: str(server.password),
        # Also outside of this project's folder, whose pyproject.toml says so.
        "PREFECT_PLUGINS_ENABLED": "true",
        # Prefect answers any web page by default; only its own UI needs an answer here.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": addresses.prefect_url,
        "PREFECT_RUNNER_POLL_FREQUENCY": "2",
        "PYTHONUNBUFFERED": "1",
    }


def _is_serving(server: PrefectServer, *, since: datetime) -> bool:
    """Tell whether a process has asked Prefect for runs of `train-ctr` after `since`."""
    document = server.ask(f"/deployments/name/{TRAIN_CTR}/{TRAIN_CTR}") or {}
    polled = document.get("last_polled")
    return polled is not None and datetime.fromisoformat(polled) >= since


def _welcome(workspace: Workspace, addresses: ServiceAddresses, *, is_first: bool) -> str:
    """Return the table of addresses and what to do with them; the password is in the first one alone."""
    place = SERVER_PASSWORD if os.environ.get(SERVER_PASSWORD) else f"in {workspace.password_path}"
    sign_in = own_password(workspace) if is_first else f"as before; user:password is {place}"
    rows = [
        ("Prefect UI", addresses.prefect_url),
        ("MLflow UI", addresses.mlflow_url),
        ("Sign in", sign_in),
        (
            "Every night",
            f"{TRAIN_CTR} at {NIGHTLY_TIME} {nightly_timezone()}, where not set otherwise in Prefect",
        ),
        ("Every 5 minutes", f"{SWEEP_ORPHANS} ends what a dead run left"),
        ("Workspace", str(workspace.root)),
        ("Logs", str(workspace.logs_directory)),
        ("Start a run now", f"prefect deployment run {TRAIN_CTR}"),
        ("Stop", "Ctrl-C"),
    ]
    return "\n".join(f"  {name:<17}{value}" for name, value in rows)


@contextmanager
def _only_server(workspace: Workspace) -> Iterator[None]:
    """Let one process serve a workspace.

    Raises:
        ConfigurationError: Another one serves it.
    """
    with (workspace.root / LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            running = workspace.recorded_services()
            by = f" by process {running.supervisor_pid} at {running.prefect_url}" if running else ""
            raise ConfigurationError(
                f"{workspace.root} is being served already{by}; end that first, or set HETERPS_HOME to another folder"
            ) from error
        yield


def _serve(workspace: Workspace, addresses: ServiceAddresses, services: Sequence[Service]) -> None:
    """Serve until a stop is requested.

    Raises:
        ConfigurationError, ServiceError: A service does not come up, or keeps dying.
    """
    is_first = not os.environ.get(SERVER_PASSWORD) and not workspace.password_path.exists()
    supervisor = Supervisor(environment=_service_environment(workspace, addresses), report=_say)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup SIGHUP is ignored, and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: supervisor.stop_requested.set())
    started_s = time.monotonic()
    try:
        workspace.write_services(addresses)
        _say(f"starting the services of {workspace.root} ...")
        # Side by side: the serving process loads for seconds and then waits for the server.
        supervisor.start(*services)
        if not supervisor.stop_requested.is_set():
            table = _welcome(workspace, addresses, is_first=is_first)
            _say(f"up after {time.monotonic() - started_s:.1f} s\n\n{table}\n")
            supervisor.watch()
        _say("stopping ...")
    finally:
        supervisor.stop()
        workspace.forget_services()
        _say("stopped; nothing is left running")


def _say(line: str) -> None:
    print(f"serve: {line}", flush=True)


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
