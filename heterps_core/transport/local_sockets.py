"""Sockets between workers of one machine, which keep messages apart and hand over the files of shared memory."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from heterps_core.transport.shared_memory import new_file

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

CONNECT_LIMIT_S = 10.0
"""Longest wait for another worker to connect; all are at it at the same time."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all processes of a machine, and in no other's."""

NETWORK = Path("/proc/self/ns/net")
"""Containers with networks of their own count as machines."""


def connect_locally(
    rank: int,
    *,
    wanted: Callable[[Mapping[int, str]], Collection[int]],
    group: ProcessGroup | None,
    takes_part: bool = True,
) -> dict[int, socket.socket] | None:
    """Connect workers that share a machine; every process of the group calls it.

    Args:
        rank: Of this worker.
        wanted: Given the machine of each worker that takes part, by rank, returns the ranks to connect with. Whom
            a worker wants must want it too.
        group: By default the whole world.
        takes_part: False for a worker that is connected with none.

    Returns:
        By rank; None, on all of them, where one cannot: a system is not Linux, or forbids it. The log says why.
    """
    error: str | None = None
    machine: str | None = None
    path = ""
    found: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        try:
            # Only this user may look into the folder.
            path = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='heterps-'))}/socket"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(path)
            listener.listen()
            os.close(new_file(1))
            if takes_part:
                machine = f"{BOOT_ID.read_text()} {NETWORK.stat().st_ino}"
        except (AttributeError, OSError) as problem:
            error = str(problem)
        places = {place[0]: place[1:] for place in _gather((rank, machine, path), group)}
        if machine is not None:
            machines = {other: place[0] for other, place in places.items() if place[0] is not None}
            others = sorted(wanted(machines))
            try:
                _connect(found, listener, rank, {other: places[other][1] for other in others})
            except OSError as problem:
                error = str(problem)
        errors = [text for text in _gather(error, group) if text]
    if not errors:
        return found
    logger.warning("workers of one machine exchange rows by messages, not in shared memory: %s", errors[0])
    for connection in found.values():
        connection.close()
    return None


def receive_files(connection: socket.socket, count: int) -> list[int]:
    """Return the descriptors of files that the other end sends.

    Raises:
        OSError: It sent none, or has ended.
    """
    _, files, _, _ = socket.recv_fds(connection, 16, count)
    if len(files) != count:
        raise OSError("another worker of this machine sent no memory files")
    return files


def _connect(
    found: dict[int, socket.socket], listener: socket.socket, rank: int, paths: Mapping[int, str]
) -> None:
    """Connect to the workers before this one, and let those behind it connect; fills `found`."""
    for other, path in paths.items():
        if other < rank:
            found[other] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(CONNECT_LIMIT_S)
            connection.connect(path)
            connection.send(rank.to_bytes(4, "little"))
    listener.settimeout(CONNECT_LIMIT_S)
    for _ in range(sum(other > rank for other in paths)):
        connection, _ = listener.accept()
        connection.settimeout(CONNECT_LIMIT_S)
        found[int.from_bytes(connection.recv(4), "little")] = connection


def _gather(value: Value, group: ProcessGroup | None) -> Sequence[Value]:
    """Return the value of each worker."""
    found: list[Value | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return cast(list[Value], found)
