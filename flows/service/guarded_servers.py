"""The two servers of `heterps serve` as processes of their own, which answer this user alone.

`python -m flows.service.guarded_servers prefect|mlflow PORT` starts one; the environment says all else. They are
started as `prefect server start` and `mlflow server` start them, with `infra.loopback_guard` around.
"""

from __future__ import annotations

import os
import sys

import uvicorn

from flows.service.prefect_connection import own_password
from infra.loopback_guard import App, LoopbackGuard
from infra.workspace import LOOPBACK, Workspace


def prefect_app() -> App:
    """Return Prefect's server; it asks for its password by itself, as its pages have a form for it."""
    from prefect.server.api.server import create_app

    return LoopbackGuard(create_app(final=True))


def mlflow_app(workspace: Workspace) -> App:
    """Return MLflow's server of the workspace's store, which a browser asks for its password.

    Files of runs are read and written where they lie, by the rights of the file system. They do not go through the
    server, which would let a request replace those of a registered model.
    """
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    from tasks.records.mlflow_store import make_store

    make_store(workspace)
    os.environ[BACKEND_STORE_URI_ENV_VAR] = workspace.tracking_uri
    os.environ[ARTIFACT_ROOT_ENV_VAR] = workspace.artifacts_directory.as_uri()
    from mlflow.server.fastapi_app import app

    return LoopbackGuard(app, password=own_password(workspace))


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    name, port = sys.argv[1:]
    app = prefect_app() if name == "prefect" else mlflow_app(Workspace.locate())
    uvicorn.run(app, host=LOOPBACK, port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
