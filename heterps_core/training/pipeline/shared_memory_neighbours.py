"""Finds the neighbouring stages that run on this machine, and trades memory files and sockets with them.

Its product is what `SharedMemoryBoundary` works with.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU
from heterps_core.training.pipeline.shared_memory_boundary import NUM_BUFFERS, Peer, SharedNeighbour
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory import SMALLEST_BUFFER_BYTES, SharedBuffer, listen, new_file

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

CONNECT_LIMIT_S = 10.0
"""Longest wait for a neighbour to connect; all are at it at the same time."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all processes of a machine, and in no other's."""

NETWORK = Path("/proc/self/ns/net")
"""Containers with networks of their own count as machines."""


def connect_neighbours(
    layout: RankLayout, *, rank: int, device: torch.device = CPU, group: ProcessGroup | None = None
) -> dict[int, SharedNeighbour]:
    """Connect a replica with those neighbouring stages that compute on the same machine's cores as it does.

    Every process of the group calls it; those whose rank is not in `layout.ranks` are connected with nobody.

    Args:
        layout: Of all workers.
        rank: Of this one.
        device: That it computes on. Rows for another device than the host go through pinned memory of its own.
        group: All workers, by default the whole world.

    Returns:
        By number of the stage. Empty, on all workers, where memory cannot be shared: a system is not Linux, or
        forbids it. The log says why.
    """
    error: str | None = None
    machine: str | None = None
    path: str | None = None
    found: dict[int, SharedNeighbour] = {}
    with ExitStack() as stack:
        try:
            # Only this user may look into the folder.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="heterps-stages-"))
            listener = stack.enter_context(listen(f"{folder}/socket"))
            os.close(new_file(1))
            if device == CPU:
                machine, path = f"{BOOT_ID.read_text()} {NETWORK.stat().st_ino}", f"{folder}/socket"
        except (AttributeError, OSError) as problem:
            error = str(problem)
        places = dict(_gather((rank, (machine, path)), group))
        if machine is not None:
            try:
                found = _connect(layout, rank, places, listener)
            except OSError as problem:
                error = str(problem)
        errors = [text for text in _gather(error, group) if text]
    if not errors:
        return found
    logger.warning("stages on one machine exchange rows by messages, not in shared memory: %s", errors[0])
    for neighbour in found.values():
        for peer in neighbour.peers:
            peer.connection.close()
    return {}


def _connect(
    layout: RankLayout,
    rank: int,
    places: Mapping[int, tuple[str | None, str | None]],
    listener: socket.socket,
) -> dict[int, SharedNeighbour]:
    """Connect to the replicas of the stage before, let those of the stage behind connect, and trade files."""
    stage = next((number for number, ranks in enumerate(layout.ranks) if rank in ranks), None)
    if stage is None:
        return {}
    neighbours = [
        number
        for number in (stage - 1, stage + 1)
        if 0 <= number < layout.num_stages
        and len({places[peer][0] for peer in (*layout.ranks[stage], *layout.ranks[number])}) == 1
    ]
    own = {number: [new_file(SMALLEST_BUFFER_BYTES) for _ in range(NUM_BUFFERS)] for number in neighbours}
    files: dict[int, list[int]] = {}
    connections: dict[int, socket.socket] = {}
    with ExitStack() as opened:
        if stage - 1 in own:
            for peer in layout.ranks[stage - 1]:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connections[peer] = opened.enter_context(connection)
                connection.settimeout(CONNECT_LIMIT_S)
                connection.connect(str(places[peer][1]))
                socket.send_fds(connection, [rank.to_bytes(4, "little")], own[stage - 1])
        if stage + 1 in own:
            listener.settimeout(CONNECT_LIMIT_S)
            for _ in layout.ranks[stage + 1]:
                connection = opened.enter_context(listener.accept()[0])
                connection.settimeout(CONNECT_LIMIT_S)
                peer, files_of_peer = _receive_files(connection)
                connections[peer], files[peer] = connection, files_of_peer
                socket.send_fds(connection, [rank.to_bytes(4, "little")], own[stage + 1])
        if stage - 1 in own:
            for peer in layout.ranks[stage - 1]:
                _, files[peer] = _receive_files(connections[peer])
        opened.pop_all()
    return {
        number: SharedNeighbour(
            [
                Peer(connections[peer], [SharedBuffer(file) for file in files[peer]])
                for peer in layout.ranks[number]
            ],
            [SharedBuffer(file) for file in own[number]],
        )
        for number in neighbours
    }


def _receive_files(connection: socket.socket) -> tuple[int, list[int]]:
    """Return the rank of who is at the other end, and its memory files."""
    message, files, _, _ = socket.recv_fds(connection, 4, NUM_BUFFERS)
    if len(files) != NUM_BUFFERS:
        raise OSError("a neighbour sent no memory files")
    return int.from_bytes(message, "little"), files


def _gather(value: Value, group: ProcessGroup | None) -> list[Value]:
    """Return the value of each worker."""
    found: list[Value | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return cast(list[Value], found)
