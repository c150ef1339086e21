"""Connects a replica with the neighbouring stages that run on its machine, for `SharedMemoryBoundary`."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU
from heterps_core.training.pipeline.shared_memory_boundary import NUM_BUFFERS, Peer, SharedNeighbour
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory import (
    SMALLEST_BUFFER_BYTES,
    SharedBuffer,
    connect_locally,
    new_file,
    receive_files,
)


def connect_neighbours(
    layout: RankLayout, *, rank: int, device: torch.device = CPU, group: ProcessGroup | None = None
) -> dict[int, SharedNeighbour]:
    """Connect a replica with those neighbouring stages that compute on the same machine's cores as it does.

    Every process of the group calls it; those whose rank is not in `layout.ranks` are connected with none.

    Args:
        layout: Of all workers.
        rank: Of this one.
        device: That it computes on. Rows for another device than the host go through pinned memory of its own.
        group: All workers, by default the whole world.

    Returns:
        By number of the stage. Empty, on all workers, where memory cannot be shared.
    """
    stages = [number for number, ranks in enumerate(layout.ranks) if rank in ranks]
    own = [peer for stage in stages for peer in layout.ranks[stage]]
    beside = [
        layout.ranks[number]
        for stage in stages
        for number in (stage - 1, stage + 1)
        if number in range(layout.num_stages)
    ]

    def wanted(machines: Mapping[int, str]) -> list[int]:
        return [
            peer
            for ranks in beside
            if len({machines.get(each) for each in (*own, *ranks)}) == 1
            for peer in ranks
        ]

    connections = connect_locally(
        rank,
        wanted=wanted,
        group=group,
        takes_part=device == CPU and bool(stages),
    )
    if not connections:
        return {}
    return {
        number: _trade_files({peer: connections[peer] for peer in ranks})
        for number, ranks in enumerate(layout.ranks)
        if ranks[0] in connections
    }


def _trade_files(connections: Mapping[int, socket.socket]) -> SharedNeighbour:
    """Give own memory files to the replicas of a stage, and take theirs."""
    own = [new_file(SMALLEST_BUFFER_BYTES) for _ in range(NUM_BUFFERS)]
    for connection in connections.values():
        socket.send_fds(connection, [b"memory"], own)
    peers = [
        Peer(connection, [SharedBuffer(file) for file in receive_files(connection, NUM_BUFFERS)])
        for connection in connections.values()
    ]
    return SharedNeighbour(peers, [SharedBuffer(file) for file in own])
