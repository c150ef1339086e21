"""Facts that a machine reads about itself: EC2's instance metadata service, version 2, and its network interfaces.

Each answer of the service needs a session token (AWS, EC2 user guide, "Use the Instance Metadata Service").
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import urllib.error
import urllib.request

from heterps_core.errors import ConfigurationError

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
_DEFAULT_ENDPOINT = "http://169.254.169.254"

TIMEOUT_S = 2.0
_TOKEN_LIFETIME_S = 21_600

_DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
"""AWS's own: true where nothing may ask the service."""

_NOT_FOUND = 404

_SIOCGIFADDR = 0x8915
"""Constant of Linux's sockios.h."""


def is_in_the_cloud() -> bool:
    """Tell whether this program runs on an EC2 instance, whose traffic to a bucket of its region is free."""
    if os.environ.get(_DISABLED_VARIABLE, "").lower() == "true":
        return False
    try:
        InstanceMetadata().instance_id()
    except ConfigurationError:
        return False
    return True


class InstanceMetadata:
    """Asks the metadata service."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = (endpoint or os.environ.get(ENDPOINT_VARIABLE) or _DEFAULT_ENDPOINT).rstrip("/")
        # The service is on this machine's own link: a proxy from the environment cannot reach it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def instance_id(self) -> str:
        """Return the id of this machine.

        Raises:
            ConfigurationError: There is no such service here.
        """
        try:
            found = self._get("instance-id")
        except OSError as error:
            raise ConfigurationError(
                f"a node without HETERPS_NODE_ID must be an EC2 instance, but the metadata service at "
                f"{self._endpoint} does not answer: {error}"
            ) from error
        assert found is not None
        return found

    def interrupted_at(self) -> str | None:
        """Return when the machine will be preempted, ISO 8601, two minutes after its notice; None without one.

        Raises:
            OSError: The service did not answer.
        """
        action = self._get("spot/instance-action")
        return None if action is None else str(json.loads(action)["time"])

    def _get(self, name: str) -> str | None:
        """Return a value as text, or None where the service has none."""
        token = self._answer(
            "PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFETIME_S)}
        )
        try:
            return self._answer("GET", f"meta-data/{name}", {"X-aws-ec2-metadata-token": token})
        except urllib.error.HTTPError as error:
            if error.code == _NOT_FOUND:
                return None
            raise

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._endpoint}/latest/{path}", method=method, headers=headers)
        with self._opener.open(request, timeout=TIMEOUT_S) as response:
            content: bytes = response.read()
        return content.decode()


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address as its first one, or None where none has.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface, or None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
