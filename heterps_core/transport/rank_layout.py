"""The process of each replica of each stage.

Every worker says which node and slot it runs in and by which documents it works, and the layout maps (stage, replica)
to the rank that its node gave it. The description of nodes decides who is who.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from heterps_core.cluster import Cluster
from heterps_core.errors import ConfigurationError, TrainingError

SILENCE_LIMIT_S = 20.0
"""Longest silence of a worker towards those who wait for a message of it, where no one says otherwise."""

START_LIMIT_S = 300.0
"""Longest wait for all workers at the start, where tables of one may take minutes to fill, and at checkpoints, which
one may have to upload."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks by stage and replica."""

    ranks: tuple[tuple[int, ...], ...]
    """`ranks[stage][replica]` is a rank of the whole world."""

    shares: tuple[tuple[int, ...], ...] = ()
    """`shares[stage][replica]` is the part of each batch that a replica takes; empty for equal parts."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    def shares_of(self, stage: int) -> tuple[int, ...]:
        """Return the part of each batch that each replica of a stage takes, in any unit."""
        return self.shares[stage] if self.shares else (1,) * len(self.ranks[stage])

    def position(self, rank: int) -> tuple[int, int]:
        """Return (stage, replica) of a rank."""
        for stage, ranks in enumerate(self.ranks):
            if rank in ranks:
                return stage, ranks.index(rank)
        raise ConfigurationError(f"rank {rank} has no place in the layout {self}")


class WorkerPlace(NamedTuple):
    """A worker's place, as it tells the others at the start."""

    node_id: str
    slot: int
    """Number of the worker on its node, from 0."""

    fingerprint: str
    """Hash of the documents that it works by."""


def fingerprint(*documents: Mapping[str, Any]) -> str:
    """Return a short hash that is the same where the documents are."""
    content = json.dumps(documents, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def layout_from_places(
    cluster: Cluster, places: Sequence[WorkerPlace], replicas_per_stage: Sequence[int]
) -> RankLayout:
    """Lay ranks out by the node and the local slot in which each runs.

    Replicas of a stage are numbered over the stage's nodes in the cluster's order, then by slot.

    Raises:
        ConfigurationError: The processes that came are not those that the job needs, or work by another job.
    """
    for rank, place in enumerate(places):
        if place.fingerprint != places[0].fingerprint:
            raise ConfigurationError(
                f"all workers must have the same job and cluster, but worker 0 on node {places[0].node_id} has "
                f"{places[0].fingerprint} and worker {rank} on node {place.node_id} has {place.fingerprint}; give "
                f"all nodes one run directory, and replace no file in it during a run"
            )
    rank_of = {(place.node_id, place.slot): rank for rank, place in enumerate(places)}
    wanted: list[list[tuple[str, int]]] = [[] for _ in replicas_per_stage]
    for node in cluster.nodes:
        wanted[node.stage].extend((node.node_id, slot) for slot in range(node.num_workers))
    counts = tuple(len(slots) for slots in wanted)
    if counts != tuple(replicas_per_stage) or set(rank_of) != {slot for slots in wanted for slot in slots}:
        raise ConfigurationError(
            f"the workers that joined must be those of the plan: it has {tuple(replicas_per_stage)} replicas "
            f"per stage, the cluster has room for {counts}, and {len(places)} workers joined"
        )
    return RankLayout(tuple(tuple(rank_of[slot] for slot in slots) for slots in wanted))


class LostWorkerError(TrainingError):
    """A neighbour died or does not answer."""

    def __init__(self, layout: RankLayout, rank: int, *, limit_s: float, has_ended: bool) -> None:
        stage, replica = layout.position(rank)
        observed = (
            "its connection broke, so its process has ended"
            if has_ended
            else "it is silent; its process or machine stands still, or the network between is down"
        )
        super().__init__(
            f"worker {rank} (stage {stage}, replica {replica}) must answer within {limit_s:.0f} s, but {observed}"
        )
        self.lost = (rank, stage, replica)


class StagePeers:
    """The connections of one replica with the others of its stage.

    Attributes:
        member: Number of this replica.
        num_members: Of the stage.
        silence_limit_s: Longest wait for another replica.
    """

    def __init__(
        self,
        peers: dict[int, socket.socket],
        *,
        ranks: Sequence[int],
        layout: RankLayout,
        silence_limit_s: float,
    ) -> None:
        self.num_members = len(peers) + 1
        self.member = next(number for number in range(self.num_members) if number not in peers)
        self.silence_limit_s = silence_limit_s
        self._peers, self._ranks, self._layout = peers, ranks, layout

    def _lost(self, number: int, *, has_ended: bool) -> LostWorkerError:
        return LostWorkerError(
            self._layout, self._ranks[number], limit_s=self.silence_limit_s, has_ended=has_ended
        )


def lost_worker(
    layout: RankLayout, rank: int, error: RuntimeError, *, silence_limit_s: float
) -> LostWorkerError:
    """Return what to say where a message of another worker did not come; `error` is gloo's."""
    has_ended = "imed out" not in str(error)
    return LostWorkerError(layout, rank, limit_s=silence_limit_s, has_ended=has_ended)


def is_loss_of_another(error: BaseException) -> bool:
    """Tell whether an error, or one of its causes, is gloo's: another worker died or was silent for too long."""
    seen: BaseException | None = error
    while seen is not None:
        if "gloo/transport" in str(seen) or "Connection closed by peer" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
