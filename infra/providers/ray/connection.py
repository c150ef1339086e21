"""The connection to a Ray cluster, and in one line why there is none."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from heterps_core.errors import ProvisioningError

ADDRESS_VARIABLE = "RAY_ADDRESS"
NAMESPACE = "heterps"
ANSWER_LIMIT_S = 15.0


_CONNECTING = threading.Lock()
"""A process connects once, though a launch and the renewal of its lease ask at the same time."""


@contextmanager
def asked() -> Iterator[Any]:
    """Yield the module ray, connected to the cluster, and say in one line what it answers with.

    Raises:
        ProvisioningError: It is not installed, there is no cluster at the address, or it does not answer.
    """
    with _CONNECTING:
        ray = _connected()
    try:
        yield ray
    except ray.exceptions.RayError as problem:
        said = str(problem).strip().splitlines() or [type(problem).__name__]
        raise ProvisioningError(
            f"Ray did not answer: {said[0]}; see ray status, or try again later"
        ) from problem


def _connected() -> Any:
    address = os.environ.get(ADDRESS_VARIABLE, "")
    try:
        import ray  # some seconds, for those who ask it
        import ray.util.scheduling_strategies
    except ImportError as problem:
        raise ProvisioningError("provider ray needs the package ray; pip install 'heterps[ray]'") from problem
    if ray.is_initialized():
        return ray
    host, _, port = address.rpartition(":")
    before = signal.getsignal(signal.SIGTERM)
    try:
        # Ray itself would try for a minute.
        socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        # It would print twenty lines about a lost machine, which the flow names in one.
        ray._private.worker._worker_logs_enabled = False
    except (OSError, RuntimeError, ValueError) as problem:
        said = " ".join(str(problem).split())
        raise ProvisioningError(
            f"{ADDRESS_VARIABLE} must be host:port of a Ray cluster of version {ray.__version__} that has this "
            f"machine as a part, got {address!r}: {said}; set it to the address that ray status shows on the head"
        ) from problem
    finally:
        if threading.current_thread() is threading.main_thread():
            # Ray's own would end this process in place of what is to happen.
            signal.signal(signal.SIGTERM, before)
    return ray
