"""Which of this machine's interfaces has an address: what gloo must bind to for other machines to reach it."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Of Linux's sockios.h."""


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address as its first one, or None where none has.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # An interface without an address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
