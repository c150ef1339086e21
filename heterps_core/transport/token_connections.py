"""Connections between workers that show one another a token: by TCP, and by Unix sockets on one machine.

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
from pathlib import Path

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

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all processes of a machine, and in no other's."""

NETWORK = Path("/proc/self/ns/net")
"""Containers with networks of their own count as machines."""

logger = logging.getLogger(__name__)


def this_machine() -> str:
    """Return the name of this machine.

    Raises:
        OSError: The system is not Linux.
    """
    return f"{BOOT_ID.read_text()} {NETWORK.stat().st_ino}"


def machine_name() -> str | None:
    """Return the name of this machine, or None where the system is not Linux."""
    with suppress(OSError):
        return this_machine()
    return None


def ranks_here(group: ProcessGroup) -> set[int]:
    """Return the ranks of a group's members on this machine, where it has a name; all members call it."""
    machine = machine_name()
    ranks = {rank for rank, other in gather_json([dist.get_rank(), machine], group) if other == machine}
    return set() if machine is None else ranks


def connect_by_token(
    peers: Collection[int],
    group: ProcessGroup | None = None,
    *,
    local_kind: socket.SocketKind | None = None,
) -> dict[int, socket.socket]:
    """Connect this worker with others; all members of the group call it.

    Args:
        peers: Ranks of members of the group. Each of them must want this worker too.
        group: By default the whole world.
        local_kind: Of the Unix sockets that connect peers of one machine; by default TCP connects them.

    Returns:
        By rank; messages by TCP leave at once (TCP_NODELAY).

    Raises:
        OSError: A member could not be reached.
    """
    own, token = dist.get_rank(), secrets.token_bytes(_TOKEN_BYTES)
    found: dict[int, socket.socket] = {}
    with _new_listener(local_kind, backlog=dist.get_world_size(group)) as listener:
        name = listener.getsockname()
        own_place = [own, name if local_kind is None else name.decode(), token.hex()]
        places = {rank: (place, bytes.fromhex(shown)) for rank, place, shown in gather_json(own_place, group)}
        for rank in sorted(rank for rank in peers if rank < own):
            place, wanted = places[rank]
            found[rank] = connection = socket.socket(listener.family, listener.type)
            connection.settimeout(_CONNECT_LIMIT_S)
            connection.connect(tuple(place) if local_kind is None else place)
            connection.sendall(own.to_bytes(_RANK_BYTES, "little") + wanted)
            if not hmac.compare_digest(_receive(connection, _TOKEN_BYTES), token):
                raise ConnectionRefusedError(f"{place} has not the token of this worker")
        until_s = time.monotonic() + _CONNECT_LIMIT_S
        while len(found) < len(peers):
            listener.settimeout(max(until_s - time.monotonic(), 0.001))
            connection, address = listener.accept()
            with suppress(OSError):
                connection.settimeout(_TOKEN_LIMIT_S)
                # One call reads both: a socket of packets drops the rest of a packet.
                shown = _receive(connection, _RANK_BYTES + _TOKEN_BYTES)
                rank = int.from_bytes(shown[:_RANK_BYTES], "little")
                if rank > own and rank in peers and hmac.compare_digest(shown[_RANK_BYTES:], token):
                    connection.sendall(places[rank][1])
                    found[rank] = connection
                    continue
            logger.warning("refused %s, which has not the token of this worker", address or "a local process")
            connection.close()
    for connection in found.values() if local_kind is None else ():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _new_listener(local_kind: socket.SocketKind | None, *, backlog: int) -> socket.socket:
    if local_kind is None:
        return socket.create_server((_own_address(), 0), backlog=backlog)
    listener = socket.socket(socket.AF_UNIX, local_kind)
    # The system chooses a name that is no file's: unix(7), autobind.
    listener.bind("")
    listener.listen(backlog)
    return listener


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
