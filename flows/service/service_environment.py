"""What the services of `make serve` run under: addresses, who may ask them, and with which password."""

from __future__ import annotations

import os
import secrets
from urllib.parse import urlparse

from flows.service.addresses import PASSWORD_VARIABLE, is_loopback
from flows.service.prefect_connection import project_environment
from infra.loopback import LOOPBACK
from infra.workspace import ServiceAddresses, Workspace


def service_environment(workspace: Workspace, addresses: ServiceAddresses) -> dict[str, str]:
    """Return the environment of all services, and of the flow runs that they start."""
    origin = addresses.prefect_url
    password = os.environ.get(PASSWORD_VARIABLE, "")
    is_reached_by_others = not is_loopback(urlparse(origin).hostname or LOOPBACK)
    return {
        **os.environ,
        **project_environment(workspace),
        "PREFECT_API_URL": addresses.prefect_api_url,
        # Prefect answers any web page by default; only its own UI needs an answer here, on loopback by both names.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(
            dict.fromkeys((origin, origin.replace(LOOPBACK, "localhost")))
        ),
        "PREFECT_RUNNER_POLL_FREQUENCY": "2",
        "PYTHONUNBUFFERED": "1",
        **({"PREFECT_API_AUTH_STRING": password} if password else {}),
        **(_mlflow_with_password(workspace, addresses, password) if is_reached_by_others else {}),
    }


def _mlflow_with_password(workspace: Workspace, addresses: ServiceAddresses, password: str) -> dict[str, str]:
    """Return what MLflow needs to be reached by others: users, the secret of its sessions, its own names.

    Where it keeps its users it reads from a file, which is written here; the first user may do everything.
    """
    user, _, secret = password.partition(":")
    users = workspace.root / "mlflow_auth.ini"
    users.write_text(
        "[mlflow]\n"
        "default_permission = READ\n"
        f"database_uri = sqlite:///{workspace.root / 'mlflow_auth.db'}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    chosen = {
        # It answers only to these names, and only to pages from them.
        "MLFLOW_SERVER_ALLOWED_HOSTS": urlparse(addresses.mlflow_url).netloc,
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": addresses.mlflow_url,
        # Sessions of its pages end with it, unless a key was chosen.
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(),
    }
    return {
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": secret,
        "MLFLOW_AUTH_CONFIG_PATH": str(users),
        **{name: os.environ.get(name, value) for name, value in chosen.items()},
    }
