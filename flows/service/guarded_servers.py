"""The two servers of `heterps serve` as processes of their own, which answer this user alone.

`python -m flows.service.guarded_servers prefect|mlflow PORT` starts one; the environment says all else. They are
started as `prefect server start` and `mlflow server` start them, with `infra.loopback_guard` around.
"""

from __future__ import annotations

import socket
import sys

import uvicorn

from flows.loading import loading
from flows.service.prefect_connection import own_password
from infra.loopback_guard import App, LoopbackGuard
from infra.workspace import LOOPBACK, Workspace

_NOT_STARTED = 3
"""Exit status, as uvicorn's own."""


def _prefect_app() -> App:
    """Return Prefect's server; it asks for its password by itself, as its pages have a form for it."""
    from prefect.server.api.server import create_app

    return LoopbackGuard(create_app(final=True))


def _mlflow_app(workspace: Workspace) -> App:
    """Return MLflow's server of the workspace's store, which a browser asks for its password."""
    from tasks.records.mlflow_store import server_app

    return LoopbackGuard(server_app(workspace), password=own_password(workspace))


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    name, port = sys.argv[1:]
    with loading():
        app = _prefect_app() if name == "prefect" else _mlflow_app(Workspace.locate())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    # Beside the socket by which who started this keeps the port.
    with socket.create_server((LOOPBACK, int(port)), reuse_port=True) as listener:
        server.run(sockets=[listener])
    if not server.started:
        sys.exit(_NOT_STARTED)


if __name__ == "__main__":
    main()
