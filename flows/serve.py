"""`make serve`: Prefect's server, the MLflow UI and the process that runs the deployments, as one.

Everything listens on loopback and keeps its state in the workspace, so that one command brings a
team's nightly training up, and Ctrl-C takes all of it down again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from flows.prefect_connection import HEALTH_TIMEOUT_S, project_environment
from flows.schedule import NIGHTLY_TIME, SWEEP_ORPHANS, TRAIN_CTR, nightly_timezone
from flows.supervisor import LOOPBACK, Service, Supervisor, check_port_is_free
from heterps_core.errors import ConfigurationError, HeterpsError
from infra.workspace import ServiceAddresses, Workspace, answers

PREFECT_PORT_VARIABLE = "HETERPS_PREFECT_PORT"
MLFLOW_PORT_VARIABLE = "HETERPS_MLFLOW_PORT"
DEFAULT_PREFECT_PORT = 4200
DEFAULT_MLFLOW_PORT = 5000
MAX_PORT = 65535


ENVIRONMENT_HELP = """\
environment:
  HETERPS_HOME          folder of all state (default: .heterps)
  HETERPS_PREFECT_PORT  port of the Prefect server (default: 4200)
  HETERPS_MLFLOW_PORT   port of the MLflow UI (default: 5000)
  HETERPS_TIMEZONE      time zone of the nightly run (default: UTC)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status."""
    argparse.ArgumentParser(
        prog="python -m flows.serve",
        description="Serve Prefect, MLflow and the nightly deployment on loopback until Ctrl-C.",
        epilog=ENVIRONMENT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    supervisor: Supervisor | None = None
    workspace: Workspace | None = None
    try:
        workspace = Workspace.locate().create()
        nightly_timezone()
        addresses = choose_addresses(workspace)
        supervisor = Supervisor(environment=service_environment(workspace, addresses), report=_say)
        _stop_on_signals(supervisor)
        workspace.write_services(addresses)
        _serve(supervisor, workspace, addresses)
    except HeterpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    finally:
        if supervisor is not None and workspace is not None:
            supervisor.stop()
            workspace.forget_services()
            _say("stopped; nothing is left running")
    return 0


def choose_addresses(workspace: Workspace) -> ServiceAddresses:
    """Return the addresses to serve on, after a check that they are free.

    Raises:
        ConfigurationError: This workspace is being served already, a port is no port, or is taken.
    """
    running = workspace.running_services()
    if running is not None:
        raise ConfigurationError(
            f"{workspace.root} is being served already by process {running.supervisor_pid} at "
            f"{running.prefect_url}; end that first, or set HETERPS_HOME to another folder"
        )
    prefect_port = _port(PREFECT_PORT_VARIABLE, DEFAULT_PREFECT_PORT)
    mlflow_port = _port(MLFLOW_PORT_VARIABLE, DEFAULT_MLFLOW_PORT)
    if prefect_port == mlflow_port:
        raise ConfigurationError(
            f"the Prefect server and the MLflow UI need two ports, but {PREFECT_PORT_VARIABLE} and "
            f"{MLFLOW_PORT_VARIABLE} are both {mlflow_port}"
        )
    check_port_is_free(prefect_port, purpose="the Prefect server", variable=PREFECT_PORT_VARIABLE)
    check_port_is_free(mlflow_port, purpose="the MLflow UI", variable=MLFLOW_PORT_VARIABLE)
    return ServiceAddresses(
        prefect_url=f"http://{LOOPBACK}:{prefect_port}",
        mlflow_url=f"http://{LOOPBACK}:{mlflow_port}",
        supervisor_pid=os.getpid(),
    )


def service_environment(workspace: Workspace, addresses: ServiceAddresses) -> dict[str, str]:
    """Return the environment of all services, and of the flow runs that they start."""
    origin = addresses.prefect_url
    return {
        **os.environ,
        **project_environment(workspace),
        "PREFECT_API_URL": addresses.prefect_api_url,
        # Prefect answers any web page by default; only its own UI needs an answer here.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"{origin},{origin.replace(LOOPBACK, 'localhost')}",
        "PREFECT_RUNNER_POLL_FREQUENCY": "2",
        "PYTHONUNBUFFERED": "1",
    }


def services_to_run(workspace: Workspace, addresses: ServiceAddresses) -> tuple[Service, Service, Service]:
    """Return Prefect's server, the MLflow UI and the serving process, in the order of need."""
    python = [sys.executable, "-m"]
    started = datetime.now(UTC)
    prefect_port = addresses.prefect_url.rpartition(":")[2]
    mlflow_port = addresses.mlflow_url.rpartition(":")[2]
    prefect_server = Service(
        name="Prefect server",
        command=[*python, "prefect", "server", "start", "--host", LOOPBACK, "--port", prefect_port],
        is_ready=lambda: answers(f"{addresses.prefect_api_url}/health", timeout_s=HEALTH_TIMEOUT_S),
        log_path=workspace.logs_directory / "prefect-server.log",
    )
    mlflow_ui = Service(
        name="MLflow UI",
        command=[
            *(*python, "mlflow", "server", "--host", LOOPBACK, "--port", mlflow_port, "--workers", "1"),
            *("--backend-store-uri", workspace.tracking_uri),
            *("--default-artifact-root", workspace.artifacts_directory.as_uri()),
        ],
        is_ready=lambda: answers(f"{addresses.mlflow_url}/health", timeout_s=HEALTH_TIMEOUT_S),
        log_path=workspace.logs_directory / "mlflow-ui.log",
    )
    serving_process = Service(
        name="serving process",
        command=[*python, "flows.deployments"],
        is_ready=lambda: is_serving(addresses, since=started),
        log_path=workspace.logs_directory / "serving.log",
        stop_timeout_s=30.0,  # a run in mid-training tears its machines down first
    )
    return prefect_server, mlflow_ui, serving_process


def is_serving(addresses: ServiceAddresses, *, since: datetime) -> bool:
    """Tell whether a process has asked Prefect for runs of `train-ctr` after `since`."""
    document = _read_json(f"{addresses.prefect_api_url}/deployments/name/{TRAIN_CTR}/{TRAIN_CTR}")
    polled = document.get("last_polled")
    return polled is not None and datetime.fromisoformat(polled) >= since


def welcome(workspace: Workspace, addresses: ServiceAddresses) -> str:
    """Return the table of addresses and what to do with them."""
    rows = [
        ("Prefect UI", addresses.prefect_url),
        ("MLflow UI", addresses.mlflow_url),
        ("Every night", f"{TRAIN_CTR} at {NIGHTLY_TIME} {nightly_timezone()}"),
        ("Every 5 minutes", f"{SWEEP_ORPHANS} ends what a dead run left"),
        ("Workspace", str(workspace.root)),
        ("Logs", str(workspace.logs_directory)),
        ("Start a run now", f"prefect deployment run {TRAIN_CTR}"),
        ("Stop", "Ctrl-C"),
    ]
    return "\n".join(f"  {name:<17}{value}" for name, value in rows)


def _serve(supervisor: Supervisor, workspace: Workspace, addresses: ServiceAddresses) -> None:
    started = time.monotonic()
    _say(f"starting the services of {workspace.root} ...")
    prefect_server, mlflow_ui, serving_process = services_to_run(workspace, addresses)
    supervisor.start(prefect_server, mlflow_ui)
    supervisor.start(serving_process)
    if not supervisor.is_stopping:
        _say(f"up after {time.monotonic() - started:.1f} s\n\n{welcome(workspace, addresses)}\n")
        supervisor.watch()
    _say("stopping ...")


def _stop_on_signals(supervisor: Supervisor) -> None:
    def stop(signal_number: int, frame: FrameType | None) -> None:
        supervisor.request_stop()

    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, stop)


def _port(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip() or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PORT:
        raise ConfigurationError(f"{variable} must be a port between 1 and {MAX_PORT}, got {text!r}")
    return int(text)


def _read_json(url: str) -> dict[str, Any]:
    """Return a JSON object of the Prefect API, or an empty one where it is not answered."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HEALTH_TIMEOUT_S) as response:
            document: dict[str, Any] = json.load(response)
            return document
    except (urllib.error.URLError, OSError, ValueError):
        return {}


def _say(line: str) -> None:
    print(f"serve: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
