"""Routes of a micro-batch's rows between stages with different numbers of replicas.

Each stage cuts a micro-batch into contiguous slices, one per replica, by its shares. Where the slices of two
neighbouring stages overlap, the overlap is one message. Sender and receiver compute the same list, so nothing is
negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from heterps_core.embeddings.row_range import RowRange
from heterps_core.transport.rank_layout import RankLayout


@dataclass(frozen=True, slots=True)
class _Route:
    """One message between two replicas of neighbouring stages."""

    peer_replica: int
    first: int
    """First row, relative to the slice of the replica that the route belongs to."""
    stop: int


def shared_slice(num_rows: int, shares: Sequence[int], replica: int) -> RowRange:
    """Return the rows of a micro-batch that one replica of a stage works on, by the shares of all, at least 1 each.

    Example:
        >>> [shared_slice(10, (3, 1, 1), i) for i in range(3)]
        [RowRange(first=0, stop=6), RowRange(first=6, stop=8), RowRange(first=8, stop=10)]
    """
    first, total = sum(shares[:replica]), sum(shares)
    return RowRange(num_rows * first // total, num_rows * (first + shares[replica]) // total)


def replica_slice(num_rows: int, num_replicas: int, replica: int) -> RowRange:
    """Return the rows of one replica where all have equal shares.

    Example:
        >>> [replica_slice(10, 3, i) for i in range(3)]
        [RowRange(first=0, stop=3), RowRange(first=3, stop=6), RowRange(first=6, stop=10)]
    """
    return RowRange(num_rows * replica // num_replicas, num_rows * (replica + 1) // num_replicas)


def batch_slices(
    num_rows: int, *, num_microbatches: int, shares: Sequence[int], replica: int
) -> list[tuple[int, RowRange]]:
    """Return for each micro-batch of a batch its size and a replica's rows of it, counted from the batch's first.

    Micro-batches without a row are left out.

    Example:
        >>> batch_slices(8, num_microbatches=2, shares=(1, 1), replica=1)
        [(4, RowRange(first=2, stop=4)), (4, RowRange(first=6, stop=8))]
    """
    slices = []
    for index in range(num_microbatches):
        microbatch = replica_slice(num_rows, num_microbatches, index)
        mine = shared_slice(microbatch.num_rows, shares, replica)
        if microbatch.num_rows:
            slices.append(
                (microbatch.num_rows, RowRange(microbatch.first + mine.first, microbatch.first + mine.stop))
            )
    return slices


def part_starts(slices: Sequence[tuple[int, RowRange]], layout: RankLayout) -> npt.NDArray[np.bool_]:
    """Return for each row of a replica's slices whether a part of a micro-batch begins with it, in any stage.

    Example:
        >>> part_starts([(4, RowRange(0, 4))], RankLayout(ranks=((0,), (1, 2)))).tolist()
        [True, False, True, False]
    """
    firsts = accumulate((size for size, _ in slices), initial=0)
    starts = [
        first + shared_slice(size, shares, replica).first
        for first, (size, _) in zip(firsts, slices, strict=False)
        for shares in map(layout.shares_of, range(len(layout.ranks)))
        for replica in range(len(shares))
    ]
    return np.isin(np.concatenate([np.arange(mine.first, mine.stop) for _, mine in slices]), starts)


@lru_cache(maxsize=1024)
def _routes_to_neighbour(
    num_rows: int, *, shares: tuple[int, ...], replica: int, peer_shares: tuple[int, ...]
) -> tuple[_Route, ...]:
    """Return the messages between one replica and a neighbouring stage, in the order of peers.

    Example:
        >>> _routes_to_neighbour(10, shares=(1,), replica=0, peer_shares=(1, 1))
        (_Route(peer_replica=0, first=0, stop=5), _Route(peer_replica=1, first=5, stop=10))
    """
    mine = shared_slice(num_rows, shares, replica)
    routes = []
    for peer in range(len(peer_shares)):
        theirs = shared_slice(num_rows, peer_shares, peer)
        first, stop = max(mine.first, theirs.first), min(mine.stop, theirs.stop)
        if first < stop:
            routes.append(_Route(peer, first - mine.first, stop - mine.first))
    return tuple(routes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSide:
    """A replica, and the stage that it sends rows to or receives them from."""

    layout: RankLayout
    """Ranks of all stages."""

    stage: int
    replica: int
    neighbour: int
    """The stage on the other side."""

    def rank_of(self, peer: int) -> int:
        """Return the rank of a replica of the neighbour."""
        return self.layout.ranks[self.neighbour][peer]

    def slice_of(self, num_rows: int) -> RowRange:
        """Return this replica's rows of a micro-batch of `num_rows` rows."""
        return shared_slice(num_rows, self.layout.shares_of(self.stage), self.replica)

    def routes(self, num_rows: int) -> tuple[_Route, ...]:
        """Return this replica's messages for a micro-batch of `num_rows` rows, in the order of peers."""
        return _routes_to_neighbour(
            num_rows,
            shares=self.layout.shares_of(self.stage),
            replica=self.replica,
            peer_shares=self.layout.shares_of(self.neighbour),
        )
