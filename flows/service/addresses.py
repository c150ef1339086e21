"""Where the services listen: host and ports, that they are free, and that a password protects them."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import psutil

from heterps_core.errors import ConfigurationError
from infra.loopback import LOOPBACK
from infra.workspace import ServiceAddresses, Workspace

HOST_VARIABLE = "HETERPS_HOST"
MAX_PORT = 65535

PASSWORD_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
"""Prefect's own: user:password that its server asks for; the MLflow UI is given the same."""

LEAST_PASSWORD_CHARACTERS = 12
"""MLflow takes no shorter one."""

_WILDCARDS = ("0.0.0.0", "::", "*", "")


class Port(NamedTuple):
    """A TCP port that a service needs."""

    purpose: str
    variable: str
    """Chooses another one."""

    default: int

    @property
    def number(self) -> int:
        """The port that is chosen.

        Raises:
            ConfigurationError: The variable holds no port.
        """
        text = os.environ.get(self.variable, "").strip() or str(self.default)
        if not text.isdecimal() or not 1 <= int(text) <= MAX_PORT:
            raise ConfigurationError(f"{self.variable} must be a port between 1 and {MAX_PORT}, got {text!r}")
        return int(text)

    def check_is_free(self, host: str = LOOPBACK) -> None:
        """Check that the port can be taken at an address of this machine.

        Raises:
            ConfigurationError: It is taken; the message says by whom, where that can be seen. Or it is no port.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, self.number))
            except OSError as error:
                raise ConfigurationError(
                    f"{self.purpose} needs port {self.number} on {host}, but it is taken{_by_owner(self.number)}; "
                    f"end that process, or choose another port with {self.variable}=<port>"
                ) from error


PREFECT_PORT = Port("the Prefect server", "HETERPS_PREFECT_PORT", 4200)
MLFLOW_PORT = Port("the MLflow UI", "HETERPS_MLFLOW_PORT", 5000)


def choose_addresses(workspace: Workspace) -> ServiceAddresses:
    """Return the addresses to serve on, after a check that they are free and protected.

    Raises:
        ConfigurationError: A port is no port, or is taken; or others would reach the services without a password.
    """
    host = bind_host()
    check_password(host)
    if PREFECT_PORT.number == MLFLOW_PORT.number:
        raise ConfigurationError(
            f"the Prefect server and the MLflow UI need two ports, but {PREFECT_PORT.variable} and "
            f"{MLFLOW_PORT.variable} are both {MLFLOW_PORT.number}"
        )
    for port in (PREFECT_PORT, MLFLOW_PORT) if workspace.has_own_tracking else (PREFECT_PORT,):
        port.check_is_free(host)
    return ServiceAddresses(
        prefect_url=f"http://{host}:{PREFECT_PORT.number}",
        mlflow_url=f"http://{host}:{MLFLOW_PORT.number}"
        if workspace.has_own_tracking
        else workspace.tracking_uri,
        supervisor_pid=os.getpid(),
    )


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

    Prefect and MLflow answer without a password otherwise, and who starts runs spends money.

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


def _by_owner(port: int) -> str:
    """Return by which process a port is taken, for people; empty where that cannot be seen."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if (connection.status, connection.laddr[1:]) == (psutil.CONN_LISTEN, (port,)) and connection.pid:
                return f" by process {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:80]})"
    return ""
