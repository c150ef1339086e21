"""Where a worker stands in a plan, and what connects it with the others."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU
from heterps_core.training.pipeline.shared_memory_boundary import NUM_BUFFERS, Peer, SharedNeighbour
from heterps_core.training.pipeline.stage_device import join_by_nccl
from heterps_core.transport.rank_layout import SILENCE_LIMIT_S, START_LIMIT_S, RankLayout
from heterps_core.transport.shared_memory import (
    SMALLEST_BUFFER_BYTES,
    SharedBuffer,
    connect_locally,
    new_file,
    receive_files,
)
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from heterps_core.transport.token_connections import connect_by_token

Neighbour: TypeAlias = SharedNeighbour | list[socket.socket]
"""A stage with which a replica shares memory, or connections with its replicas in order."""

_START_LIMIT = timedelta(seconds=START_LIMIT_S)

_GROUP_LIMIT = timedelta(seconds=SILENCE_LIMIT_S)
"""Longest wait of one replica for the others of its stage; they do equal work."""

_ONE_WORKER = RankLayout(((0,),))


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlace:
    """A replica of a stage; by default the only worker of a plan."""

    layout: RankLayout = _ONE_WORKER
    """Ranks of all stages."""

    stage: int = 0
    replica: int = 0
    device: torch.device = CPU
    """Computes the layers; batches must be there too."""

    group: ProcessGroup | None = None
    """The replicas of this stage, for messages on the host; None for one."""

    cards_group: ProcessGroup | None = None
    """The same replicas, for tensors on CUDA devices."""

    sum_group: ProcessGroup | None = None
    """The same replicas, for sums that travel beside the passes; by default `device_group`."""

    link: SharedMemoryLink | None = None
    """Between the replicas, on one machine."""

    neighbours: Mapping[int, Neighbour] = field(default_factory=dict)
    """The stages before and after this one; see `connect_neighbours`."""

    checkpoint_group: ProcessGroup | None = None
    """All workers of the plan, for messages about checkpoints beside those of a running step."""

    silence_limit_s: float = SILENCE_LIMIT_S
    """Longest wait for a message, from the second step on."""

    @property
    def device_group(self) -> ProcessGroup | None:
        """The replicas of this stage, for tensors on `device`."""
        return self.cards_group or self.group

    @property
    def num_replicas(self) -> int:
        """Replicas of this stage."""
        return len(self.layout.ranks[self.stage])

    @property
    def num_stages(self) -> int:
        """Stages of the plan."""
        return self.layout.num_stages


ALONE = StagePlace()
"""The only worker of a plan."""


def join_stage(
    layout: RankLayout,
    rank: int,
    *,
    new_group: Callable[[Sequence[int], timedelta], ProcessGroup],
    device: torch.device = CPU,
    has_cards: bool = False,
    is_on_one_node: bool = True,
    silence_limit_s: float = SILENCE_LIMIT_S,
) -> StagePlace:
    """Connect a worker with the others of a plan; all processes of the world call it together.

    Args:
        new_group: Makes a group of ranks with a limit of time; every process makes every group, in the same order.
        device: Computes this worker's stage.
        has_cards: Some stage is planned for GPUs.
        is_on_one_node: All replicas of this stage are on one node.
        silence_limit_s: See `StagePlace`.
    """
    stage, replica = layout.position(rank)
    group, sum_group = ([new_group(ranks, _GROUP_LIMIT) for ranks in layout.ranks][stage] for _ in range(2))
    cards_group = join_by_nccl(layout, device, limit=_GROUP_LIMIT) if has_cards else None
    has_others = len(layout.ranks[stage]) > 1
    link = None
    if has_others and is_on_one_node and device == CPU:
        link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=START_LIMIT_S)
    return StagePlace(
        layout=layout,
        stage=stage,
        replica=replica,
        device=device,
        group=group if has_others else None,
        cards_group=cards_group,
        sum_group=sum_group if has_others and device == CPU else None,
        link=link,
        neighbours=connect_neighbours(layout, rank=rank, device=device),
        checkpoint_group=new_group(range(dist.get_world_size()), _START_LIMIT),
        silence_limit_s=silence_limit_s,
    )


def world_group(ranks: Sequence[int], limit: timedelta) -> ProcessGroup:
    """Return a new group of workers of one machine, which trust one another."""
    group: ProcessGroup = dist.new_group(list(ranks), timeout=limit)
    return group


def connect_neighbours(
    layout: RankLayout,
    *,
    rank: int,
    device: torch.device = CPU,
    group: ProcessGroup | None = None,
    shares_memory: bool = True,
) -> dict[int, Neighbour]:
    """Connect a replica with its neighbouring stages.

    Every process of the group calls it; those whose rank is not in `layout.ranks` are connected with none.

    Args:
        layout: Of all workers.
        rank: Of this one.
        device: That it computes on. Rows for another device than the host go through pinned memory of its own.
        group: All workers, by default the whole world.
        shares_memory: Stages that compute on the cores of one machine share memory, where the system allows it.

    Returns:
        By number of the stage: shared memory, or connections with its replicas.

    Raises:
        OSError: A neighbour could not be reached.
    """
    stages = [number for number, ranks in enumerate(layout.ranks) if rank in ranks]
    own = [peer for stage in stages for peer in layout.ranks[stage]]
    beside = {
        number: layout.ranks[number]
        for stage in stages
        for number in (stage - 1, stage + 1)
        if number in range(layout.num_stages)
    }

    def on_this_machine(machines: Mapping[int, str]) -> list[int]:
        return [
            peer
            for ranks in beside.values()
            if len({machines.get(each) for each in (*own, *ranks)}) == 1
            for peer in ranks
        ]

    local = None
    if shares_memory:
        takes_part = device == CPU and bool(stages)
        local = connect_locally(rank, wanted=on_this_machine, group=group, takes_part=takes_part)
    local = local or {}
    remote = connect_by_token(
        [peer for ranks in beside.values() for peer in ranks if peer not in local], group
    )
    return {
        number: _trade_files({peer: local[peer] for peer in ranks})
        if ranks[0] in local
        else [remote[peer] for peer in ranks]
        for number, ranks in beside.items()
    }


def close(neighbour: Neighbour) -> None:
    """Close the connections with a stage that no worker uses any more."""
    if isinstance(neighbour, SharedNeighbour):
        neighbour = [peer.connection for peer in neighbour.peers]
    for connection in neighbour:
        connection.close()


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
