"""Which Prefect server this project talks to, as environment variables, and questions to it over plain HTTP.

One place decides, so that `make train-ctr`, the serving process, the sweeper and a bare `prefect`
command in a shell meet the same server. Prefect itself is loaded only where it must be told.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any
from uuid import UUID

from flows import PROJECT_LOGGERS
from flows.service.supervisor import Service, Supervisor
from infra.checks import prefect_database_check, require_usable
from infra.workspace import HOME_VARIABLE, LOOPBACK, Workspace, answers, free_loopback_port

LOGGERS_IN_FLOW_LOG = ",".join(PROJECT_LOGGERS)
"""Ordinary loggers whose lines Prefect copies into the log of the flow run."""

HEARTBEAT_SECONDS = 30
"""Least that Prefect allows; a run without a heartbeat for three of these is called crashed."""

AUTH_VARIABLES = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
"""Prefect's own: what a client sends as user:password, and what a server asks for, in whose shell it is the same."""

TIMEOUT_S = 2.0

SERVER_TIMEOUT_S = 80.0
"""A server that is started at the same time writes its tables at its first start; one that died is started again."""

POLL_S = 0.2

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
        # Eight more processes for evaluations of language models, which are not used here.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": LOGGERS_IN_FLOW_LOG,
        # Hooks log after the flow run has ended.
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
    }


def connect(workspace: Workspace, *, load: str) -> ModuleType:
    """Choose the Prefect server that this process talks to from now on, and return a module that uses it.

    In this order: PREFECT_API_URL where the user set it; the server of `make serve` where it answers;
    else a server of this process alone, on loopback, without schedules and pages. Prefect could start one by itself,
    but that one dies at once on Ctrl-C, and the run then waits minutes for it.

    Raises:
        ConfigurationError: The database of a server of its own cannot be used.
        ServiceError: The server does not come up.
    """
    settings = project_environment(workspace)
    os.environ.update(settings)
    # A server takes as long to start as a flow to load.
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(import_module, load)
        if not os.environ.get("PREFECT_API_URL"):
            services = workspace.running_services()
            os.environ["PREFECT_API_URL"] = (
                services.prefect_api_url if services else _start_own_server(workspace, settings)
            )
        loaded = loading.result()
    # Prefect was loaded before it could know the address.
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging

    refresh_global_settings_context()
    setup_logging(incremental=False)
    return loaded


def _start_own_server(workspace: Workspace, settings: Mapping[str, str]) -> str:
    """Start a server that ends with this thread; return its API's address."""
    require_usable([prefect_database_check(workspace, is_thorough=False)])
    port = free_loopback_port()
    server = prefect_server(workspace, port, options=("--no-scheduler", "--no-late-runs", "--no-ui"))
    supervisor = Supervisor(
        environment={**os.environ, **settings}, report=logger.warning, ends_with_thread=True
    )
    # Not at the end of a block: Prefect sends its last log lines when the interpreter exits, and does that
    # first, since what is registered last runs first. It waits a minute where the server is gone by then.
    atexit.register(supervisor.stop)
    supervisor.start(server)
    return f"http://{LOOPBACK}:{port}/api"


def prefect_server(workspace: Workspace, port: int, *, options: Sequence[str] = ()) -> Service:
    """Return a Prefect server that listens on loopback."""
    start = ["-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]
    return Service(
        name="Prefect server",
        command=[sys.executable, *start, *options],
        is_ready=lambda: answers(f"http://{LOOPBACK}:{port}/api/health", timeout_s=TIMEOUT_S),
        log_path=workspace.logs_directory / "prefect-server.log",
    )


def name_flow_run(name: str) -> None:
    """Give the flow run at work a name that its parameters alone do not tell; it keeps its own where that fails."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.runtime import flow_run

    with suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run.id), name=name)


def ask(api_url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON that the server answers to a GET, or to a POST of `body`; None where it does not answer.

    Example:
        >>> ask("http://127.0.0.1:1/api", "/health") is None
        True
    """
    headers = {"content-type": "application/json"}
    if password := next(filter(None, map(os.environ.get, AUTH_VARIABLES)), None):
        headers["authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
    data = None if body is None else json.dumps(body).encode()
    # A proxy from the environment must never stand between this machine and its own loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(f"{api_url}{path}", data=data, headers=headers)
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError):
        return None


def wait_for_server(api_url: str, *, timeout_s: float = SERVER_TIMEOUT_S) -> None:
    """Return once a server answers, or after `timeout_s`, when the next call says why it does not."""
    deadline = time.monotonic() + timeout_s
    while not answers(f"{api_url}/health", timeout_s=TIMEOUT_S) and time.monotonic() < deadline:
        time.sleep(POLL_S)
