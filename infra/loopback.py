"""The address by which processes of this machine, and none beside them, reach one another."""

from __future__ import annotations

import socket

from heterps_core.errors import ProvisioningError

LOOPBACK = "127.0.0.1"


def free_loopback_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago.

    Raises:
        ProvisioningError: There is none.
    """
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, 0))
        except OSError as problem:
            raise ProvisioningError(
                f"the workers need one free TCP port on {LOOPBACK} to find one another, and there is none "
                f"({problem}); end programs that hold many connections, or wait a minute"
            ) from problem
        return int(probe.getsockname()[1])
