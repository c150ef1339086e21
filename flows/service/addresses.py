"""Where the services listen: host and ports, that they are free, and that nobody reaches them without a password."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from heterps_core.errors import ConfigurationError
from infra.loopback import LOOPBACK

HOST_VARIABLE = "HETERPS_HOST"
PREFECT_PORT_VARIABLE = "HETERPS_PREFECT_PORT"
MLFLOW_PORT_VARIABLE = "HETERPS_MLFLOW_PORT"
DEFAULT_PREFECT_PORT = 4200
DEFAULT_MLFLOW_PORT = 5000
MAX_PORT = 65535

PASSWORD_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
"""Prefect's own: user:password that its server asks for; the MLflow UI is given the same."""

LEAST_PASSWORD_CHARACTERS = 12
"""MLflow takes no shorter one."""

_WILDCARDS = ("0.0.0.0", "::", "*", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPort:
    """A TCP port, and the variable that chooses another."""

    number: int
    variable: str


def prefect_port() -> ChosenPort:
    """Return the port of the Prefect server.

    Raises:
        ConfigurationError: The variable holds no port.
    """
    return _port(PREFECT_PORT_VARIABLE, DEFAULT_PREFECT_PORT)


def mlflow_port() -> ChosenPort:
    """Return the port of the MLflow UI.

    Raises:
        ConfigurationError: The variable holds no port.
    """
    return _port(MLFLOW_PORT_VARIABLE, DEFAULT_MLFLOW_PORT)


def bind_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address that the services listen on.

    Raises:
        ConfigurationError: It is a wildcard, or not an address of this machine.
    """
    host = environment.get(HOST_VARIABLE, LOOPBACK).strip()
    if host in _WILDCARDS:
        raise ConfigurationError(
            f"{HOST_VARIABLE} must be the one address or name by which others reach this machine, got {host!r}: "
            f"pages must know where their server is; set it to a name such as {socket.gethostname()}"
        )
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigurationError(
            f"{HOST_VARIABLE} must be an address of this machine, got {host!r} ({error.strerror or error}); "
            f"unset it to serve on {LOOPBACK} only"
        ) from error
    return host


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches `host`."""
    return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


def check_password(host: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check that a server which others reach asks for a password; on loopback none is needed.

    Prefect and MLflow answer anybody otherwise, and whoever starts runs spends money.

    Raises:
        ConfigurationError: There is none, it is too short, or MLflow lacks what it needs to ask for one.
    """
    if is_loopback(host):
        return
    user, _, password = environment.get(PASSWORD_VARIABLE, "").partition(":")
    if not user or len(password) < LEAST_PASSWORD_CHARACTERS:
        raise ConfigurationError(
            f"services that others reach must ask for a password, but {PASSWORD_VARIABLE} has none of at least "
            f"{LEAST_PASSWORD_CHARACTERS} characters; set it to user:password, or unset {HOST_VARIABLE} to serve "
            f"on {LOOPBACK} only"
        )
    if importlib.util.find_spec("flask_wtf") is None:
        raise ConfigurationError(
            f"an MLflow UI that others reach must ask for a password, which takes the package Flask-WTF; "
            f"python -m pip install 'Flask-WTF<2', or unset {HOST_VARIABLE} to serve on {LOOPBACK} only"
        )


def check_port_is_free(port: int, *, purpose: str, variable: str, host: str = LOOPBACK) -> None:
    """Check that `port` can be taken.

    Args:
        port: TCP port, 1 to 65535.
        purpose: Who wants it, for the message.
        variable: Environment variable that chooses another port.
        host: Address of this machine.

    Raises:
        ConfigurationError: The port is taken; the message says by whom, where that can be seen.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            owner = _owner_of(port)
            raise ConfigurationError(
                f"{purpose} needs port {port} on {host}, but it is taken"
                f"{f' by {owner}' if owner else ''}; end that process, or choose another port "
                f"with {variable}=<port>"
            ) from error


def _port(variable: str, default: int) -> ChosenPort:
    text = os.environ.get(variable, "").strip() or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PORT:
        raise ConfigurationError(f"{variable} must be a port between 1 and {MAX_PORT}, got {text!r}")
    return ChosenPort(number=int(text), variable=variable)


def _owner_of(port: int) -> str | None:
    """Return the process that listens on `port`, for people; None where that cannot be seen."""
    try:
        connections = psutil.net_connections(kind="tcp")
        pids = [
            connection.pid
            for connection in connections
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        ]
        process = psutil.Process(pids[0])
        return f"process {process.pid} ({' '.join(process.cmdline())[:80]})"
    except (psutil.Error, OSError, IndexError):
        return None
