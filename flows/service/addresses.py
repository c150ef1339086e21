"""Where the services listen: ports of loopback, which must be free."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import NamedTuple

import psutil

from heterps_core.errors import ConfigurationError
from infra.workspace import LOOPBACK, ServiceAddresses, Workspace

MAX_PORT = 65535


class _Port(NamedTuple):
    """A TCP port that a service needs."""

    purpose: str
    variable: str
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

    def check_is_free(self) -> None:
        """Check that the port can be taken; raises as `keep`."""
        self.keep().close()

    def keep(self) -> socket.socket:
        """Take the port, as `kept_port`, where no other process has it.

        Raises:
            ConfigurationError: It is taken; the message says by whom, where that can be seen. Or it is no port.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, self.number))
                probe.close()
                return kept_port(self.number)
            except OSError as error:
                raise ConfigurationError(
                    f"{self.purpose} needs port {self.number} on {LOOPBACK}, but it is taken"
                    f"{_by_owner(self.number)}; end that process, or choose another port with {self.variable}=<port>"
                ) from error


def kept_port(number: int) -> socket.socket:
    """Return a socket that keeps a port of loopback from other accounts until it is closed.

    The kernel lets servers of this user alone listen there beside it (SO_REUSEPORT). Otherwise another account could
    take the port before a server is up or while it is started again, and be sent the password.

    Raises:
        OSError: The port is taken.
    """
    keeper = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # For the moment of the call, as connections of a server that has ended may linger (TIME_WAIT).
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((LOOPBACK, number))
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        keeper.close()
        raise
    return keeper


PREFECT_PORT = _Port("the Prefect server", "HETERPS_PREFECT_PORT", 4200)
MLFLOW_PORT = _Port("the MLflow UI", "HETERPS_MLFLOW_PORT", 5000)


def choose_addresses(workspace: Workspace) -> ServiceAddresses:
    """Return the addresses to serve on.

    Raises:
        ConfigurationError: A port is no port, or is asked for twice.
    """
    if PREFECT_PORT.number == MLFLOW_PORT.number:
        raise ConfigurationError(
            f"the Prefect server and the MLflow UI need two ports, but {PREFECT_PORT.variable} and "
            f"{MLFLOW_PORT.variable} are both {MLFLOW_PORT.number}"
        )
    own_mlflow_url = f"http://{LOOPBACK}:{MLFLOW_PORT.number}"
    return ServiceAddresses(
        prefect_url=f"http://{LOOPBACK}:{PREFECT_PORT.number}",
        mlflow_url=own_mlflow_url if workspace.has_own_tracking else workspace.tracking_uri,
        supervisor_pid=os.getpid(),
    )


def _by_owner(port: int) -> str:
    """Return by which process a port is taken, for people; empty where that cannot be seen."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if (connection.status, connection.laddr[1:]) == (psutil.CONN_LISTEN, (port,)) and connection.pid:
                return f" by process {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:80]})"
    return ""
