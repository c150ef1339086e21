"""TCP connections between workers that show one another a token.

The members of a gloo group, which have proven the run's key (`rendezvous`), exchange their addresses and a random
token each over it. A connection counts once both ends have shown the token of the other.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import ProcessGroup

from heterps_core.instance_metadata import address_of
from heterps_core.transport.json_messages import gather_json

_CONNECT_LIMIT_S = 60.0
"""Longest time until all are connected."""

_TOKEN_LIMIT_S = 10.0
"""Longest wait for the token of a connection: a stranger without one delays the others no longer."""

_TOKEN_BYTES = 32
_RANK_BYTES = 4

logger = logging.getLogger(__name__)


def connect_by_token(peers: Collection[int], group: ProcessGroup | None = None) -> dict[int, socket.socket]:
    """Connect this worker with others; all members of the group call it.

    Args:
        peers: Ranks of members of the group. Each of them must want this worker too.
        group: By default the whole world.

    Returns:
        By rank; messages leave at once (TCP_NODELAY).

    Raises:
        OSError: A member could not be reached.
    """
    own, token = dist.get_rank(), secrets.token_bytes(_TOKEN_BYTES)
    found: dict[int, socket.socket] = {}
    with socket.create_server((_own_address(), 0), backlog=dist.get_world_size(group)) as listener:
        places = {
            rank: (host, port, bytes.fromhex(shown))
            for rank, host, port, shown in gather_json([own, *listener.getsockname(), token.hex()], group)
        }
        for rank in sorted(rank for rank in peers if rank < own):
            host, port, wanted = places[rank]
            found[rank] = connection = socket.create_connection((host, port), _CONNECT_LIMIT_S)
            connection.sendall(own.to_bytes(_RANK_BYTES, "little") + wanted)
            if not hmac.compare_digest(_receive(connection, _TOKEN_BYTES), token):
                raise ConnectionRefusedError(f"{host}:{port} has not the token of this worker")
        until_s = time.monotonic() + _CONNECT_LIMIT_S
        while len(found) < len(peers):
            listener.settimeout(max(until_s - time.monotonic(), 0.001))
            connection, address = listener.accept()
            with suppress(OSError):
                connection.settimeout(_TOKEN_LIMIT_S)
                rank = int.from_bytes(_receive(connection, _RANK_BYTES), "little")
                shown = _receive(connection, _TOKEN_BYTES)
                if rank > own and rank in peers and hmac.compare_digest(shown, token):
                    connection.sendall(places[rank][2])
                    found[rank] = connection
                    continue
            logger.warning("refused %s, which has not the token of this worker", address)
            connection.close()
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _own_address() -> str:
    """Return the address at which other workers reach this one, as gloo finds it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    address = None if interface is None else address_of(interface)
    return socket.gethostbyname(socket.gethostname()) if address is None else address


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        part = connection.recv(num_bytes - len(content))
        if not part:
            raise ConnectionAbortedError("the other end has closed the connection")
        content += part
    return content
