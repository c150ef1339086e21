"""Which Prefect server this project talks to, as environment variables, and questions to it over plain HTTP.

One place decides, so that `make train-ctr`, the serving process, the sweeper and a bare `prefect`
command in a shell meet the same server. Prefect itself is loaded only where its settings must change.
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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from importlib import import_module
from types import ModuleType
from typing import Any
from uuid import UUID

from flows import PROJECT_LOGGERS
from flows.service.addresses import kept_port
from flows.service.supervisor import Service, Supervisor
from heterps_core.errors import ConfigurationError
from infra.database_checks import prefect_database_check, require_usable
from infra.workspace import (
    HOME_VARIABLE,
    LOOPBACK,
    SERVICE_TIMEOUT_S,
    ServiceAddresses,
    Workspace,
    answers,
)

LOGGERS_IN_FLOW_LOG = ",".join(PROJECT_LOGGERS)
"""Ordinary loggers whose lines Prefect copies into the log of the flow run."""

HEARTBEAT_SECONDS = 30
"""Least that Prefect allows; a run without a heartbeat for three of these is called crashed."""

URL_VARIABLE = "PREFECT_API_URL"
CLIENT_PASSWORD = "PREFECT_API_AUTH_STRING"
"""Prefect's own: the user:password that a client sends."""

CLOUD_KEY = "PREFECT_API_KEY"
SERVER_PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"
"""Prefect's own: the user:password that a server asks for."""

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


@dataclass(frozen=True, slots=True)
class PrefectServer:
    """A server of Prefect and what it asks for."""

    api_url: str
    password: str | None
    """As user:password."""

    def client_environment(self) -> dict[str, str]:
        """Return the variables by which Prefect's own clients reach it."""
        password = {CLIENT_PASSWORD: self.password} if self.password else {}
        return {URL_VARIABLE: self.api_url, **password}

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON that the server answers to a GET, or to a POST of `body`; None where it does not answer.

        Example:
            >>> PrefectServer("http://127.0.0.1:1/api", None).ask("/health") is None
            True
        """
        with suppress(OSError, ValueError, HTTPException):
            return self._answer(path, body)
        return None

    def check_answers(self) -> None:
        """Check that it is there, is Prefect's, and takes the password.

        Raises:
            ConfigurationError: It is not, or does not.
        """
        status, problem = self._complaint()
        way_out = f"start it, or unset {URL_VARIABLE} to use the server of heterps serve or an own one"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            problem += ", a wrong password or none"
            way_out = f"set {CLIENT_PASSWORD} to its user:password"
        if problem:
            raise ConfigurationError(
                f"{URL_VARIABLE} must be the API of a Prefect server that answers, such as "
                f"http://127.0.0.1:4200/api, but {self.api_url} does not ({problem}); {way_out}"
            )

    def check_takes_password(self, workspace: Workspace) -> None:
        """Check that the server of `heterps serve` takes the password of its workspace, where it answers.

        Raises:
            ConfigurationError: It asks for another.
        """
        if self._complaint()[0] == HTTPStatus.UNAUTHORIZED:
            raise ConfigurationError(
                f"{self.api_url} must take the user:password of {workspace.password_path}, but asks for another; set "
                f"{SERVER_PASSWORD} as where heterps serve runs, or start that again"
            )

    def _complaint(self) -> tuple[int | None, str]:
        """Return why the server does not answer as Prefect's, with the HTTP status; an empty text where it does."""
        try:
            if isinstance(self._answer("/flows/count", {}, timeout_s=SERVICE_TIMEOUT_S), int):
                return None, ""
            return None, "its answer is none of Prefect's"
        except urllib.error.HTTPError as error:
            error.close()
            return error.code, f"status {error.code}"
        except (OSError, ValueError, HTTPException) as error:
            return None, str(getattr(error, "reason", error))

    def _answer(self, path: str, body: dict[str, Any] | None, *, timeout_s: float = TIMEOUT_S) -> Any:
        headers = {"content-type": "application/json"}
        if self.password:
            headers["authorization"] = f"Basic {base64.b64encode(self.password.encode()).decode()}"
        elif key := os.environ.get(CLOUD_KEY):
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api_url}{path}", data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)


def own_password(workspace: Workspace) -> str:
    """Return the user:password that servers of this workspace ask for.

    Raises:
        ConfigurationError: PREFECT_SERVER_API_AUTH_STRING or the file of the workspace holds another text.
    """
    given = os.environ.get(SERVER_PASSWORD)
    if given and not given.partition(":")[2]:
        raise ConfigurationError(
            f"{SERVER_PASSWORD} must be user:password, but has no password after a colon"
        )
    return given or workspace.password()


def own_server(workspace: Workspace, addresses: ServiceAddresses) -> PrefectServer:
    """Return the server of `heterps serve`."""
    return PrefectServer(addresses.prefect_api_url, own_password(workspace))


def chosen_server(workspace: Workspace) -> PrefectServer | None:
    """Return the server that PREFECT_API_URL names, else that of `heterps serve`, which may have been killed."""
    services = workspace.recorded_services()
    own = own_server(workspace, services) if services else None
    named = os.environ.get(URL_VARIABLE, "").strip().rstrip("/")
    given = os.environ.get(CLIENT_PASSWORD)
    if not named:
        return own
    is_own = own and named.replace("localhost", LOOPBACK) == own.api_url
    return PrefectServer(named, given or (own.password if own and is_own else None))


def connect(workspace: Workspace, *, load: str) -> ModuleType:
    """Choose the Prefect server that this process talks to from now on, and return a module that uses it.

    In this order: PREFECT_API_URL where the user set it; the server of `heterps serve` where it answers;
    else a server of this process alone, on loopback, without schedules and pages. Prefect could start one by itself,
    but that one dies at once on Ctrl-C, and the run then waits minutes for it.

    Raises:
        ConfigurationError: The server that the user named does not answer as Prefect's; or the database of a server
            of its own cannot be used.
        ServiceError: The server does not come up.
    """
    settings = project_environment(workspace)
    os.environ.update(settings)
    server = chosen_server(workspace)
    if server and os.environ.get(URL_VARIABLE):
        server.check_answers()
    elif server:
        server.check_takes_password(workspace)
    # A server takes as long to start as a flow to load.
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(import_module, load)
        if server is None or not answers(f"{server.api_url}/health", timeout_s=SERVICE_TIMEOUT_S):
            server = _start_own_server(workspace, settings)
        os.environ.update(server.client_environment())
        loaded = loading.result()
    # Prefect was loaded before it could know the address.
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging

    refresh_global_settings_context()
    setup_logging(incremental=False)
    return loaded


def _start_own_server(workspace: Workspace, settings: Mapping[str, str]) -> PrefectServer:
    """Start a server that ends with this thread, and return it."""
    require_usable([prefect_database_check(workspace, is_thorough=False)])
    keeper = kept_port(0)
    port = keeper.getsockname()[1]
    server = PrefectServer(f"http://{LOOPBACK}:{port}/api", own_password(workspace))
    without = ("UI", "SERVICES_SCHEDULER", "SERVICES_LATE_RUNS")
    supervisor = Supervisor(
        environment={
            **os.environ,
            **settings,
            **{f"PREFECT_SERVER_{name}_ENABLED": "false" for name in without},
            SERVER_PASSWORD: own_password(workspace),
        },
        report=logger.warning,
        ends_with_thread=True,
    )
    atexit.register(keeper.close)
    # Not at the end of a block: Prefect sends its last log lines when the interpreter exits, and does that
    # first, since what is registered last runs first. It waits a minute where the server is gone by then.
    atexit.register(supervisor.stop)
    supervisor.start(prefect_service(workspace, port))
    return server


def prefect_service(workspace: Workspace, port: int) -> Service:
    """Return a Prefect server that listens on loopback."""
    return Service(
        name="Prefect server",
        command=[sys.executable, "-m", "flows.service.guarded_servers", "prefect", str(port)],
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


def wait_for_server(api_url: str, *, timeout_s: float = SERVER_TIMEOUT_S) -> None:
    """Return once a server answers, or after `timeout_s`, when the next call says why it does not."""
    deadline = time.monotonic() + timeout_s
    while not answers(f"{api_url}/health", timeout_s=TIMEOUT_S) and time.monotonic() < deadline:
        time.sleep(POLL_S)
