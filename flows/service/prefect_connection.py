"""Which Prefect server this project talks to, as environment variables.

One place decides, so that `make train-ctr`, the serving process, the sweeper and a bare `prefect`
command in a shell meet the same server. Prefect itself is loaded only where it must be told.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from flows import PROJECT_LOGGERS
from flows.service.prefect_api import TIMEOUT_S
from flows.service.supervisor import Service, Supervisor
from infra.checks.database_checks import prefect_database_check, require_usable
from infra.loopback import LOOPBACK, free_loopback_port
from infra.workspace import HOME_VARIABLE, Workspace, answers

LOGGERS_IN_FLOW_LOG = ",".join(PROJECT_LOGGERS)
"""Ordinary loggers whose lines Prefect copies into the log of the flow run."""

HEARTBEAT_SECONDS = 30
"""Least that Prefect allows; a run without a heartbeat for three of these is called crashed."""

logger = logging.getLogger(__name__)


def project_environment(workspace: Workspace) -> dict[str, str]:
    """Return what every process of this project runs under, whichever server it talks to.

    Nothing is sent to the makers of Prefect or MLflow.
    """
    return {
        HOME_VARIABLE: str(workspace.root),
        "PREFECT_HOME": str(workspace.prefect_home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Eight more processes for evaluations of language models, which nobody here asks for.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": LOGGERS_IN_FLOW_LOG,
        # Hooks log after the flow run has ended.
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
    }


def connect(workspace: Workspace) -> None:
    """Choose the Prefect server that this process talks to from now on.

    In this order: PREFECT_API_URL where the user set it; the server of `make serve` where it answers;
    else a server of this process alone, on loopback, without schedules and pages. Prefect could start one by itself,
    but that one dies at once on Ctrl-C, and the run then waits minutes for it.

    Raises:
        ConfigurationError: The database of a server of its own cannot be used.
        ServiceError: The server does not come up.
    """
    settings = project_environment(workspace)
    if not os.environ.get("PREFECT_API_URL"):
        services = workspace.running_services()
        settings["PREFECT_API_URL"] = (
            services.prefect_api_url if services else _start_own_server(workspace, settings)
        )
    os.environ.update(settings)
    # A Prefect that was loaded before takes the environment over.
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging

    refresh_global_settings_context()
    setup_logging(incremental=False)


def _start_own_server(workspace: Workspace, settings: Mapping[str, str]) -> str:
    """Start a server that ends with this thread; return its API's address."""
    require_usable([prefect_database_check(workspace, is_thorough=False)])
    port = free_loopback_port()
    server = prefect_server(
        workspace, LOOPBACK, port, options=("--no-scheduler", "--no-late-runs", "--no-ui")
    )
    supervisor = Supervisor(
        environment={**os.environ, **settings}, report=logger.warning, ends_with_thread=True
    )
    # Not at the end of a block: Prefect sends its last log lines when the interpreter exits, and does that
    # first, since what is registered last runs first. It waits a minute where the server is gone by then.
    atexit.register(supervisor.stop)
    supervisor.start(server)
    return f"http://{LOOPBACK}:{port}/api"


def prefect_server(workspace: Workspace, host: str, port: int, *, options: Sequence[str] = ()) -> Service:
    """Return a Prefect server that listens on an address of this machine."""
    return Service(
        name="Prefect server",
        command=[
            *(sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)),
            *options,
        ],
        is_ready=lambda: answers(f"http://{host}:{port}/api/health", timeout_s=TIMEOUT_S),
        log_path=workspace.logs_directory / "prefect-server.log",
    )
