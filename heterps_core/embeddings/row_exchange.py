"""Rows that the replicas of a stage request from one another: a message of rows for each batch, of requests for some.

Shapes: as in `sharded_table`; L look-ups, P replicas, N rows that replicas request of this shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.embeddings.row_lists import Indices
from heterps_core.transport.peer_sockets import PeerSockets
from heterps_core.transport.rank_layout import SILENCE_LIMIT_S, START_LIMIT_S, RankLayout

if TYPE_CHECKING:
    from heterps_core.embeddings.sharded_table import ShardedTable

Counts = list[int]

_ROW_INDEX_BYTES = 8


@dataclass(slots=True)
class RowExchange:
    """The rows of one table that replicas request from one another for a batch; gradients go the opposite way."""

    local_rows: Tensor
    """Rows of this shard that replicas request [N], on the table's device and relative to the shard's first one.
    Dynamic ids are here until the first look-up finds their rows."""

    sent_counts: Counts = field(default_factory=list)
    """Rows that this replica requests, by owner; none without replicas."""

    received_counts: Counts = field(default_factory=list)
    """Rows of this shard that are requested, by replica."""

    found_rows: Tensor | None = None
    """The answer of `IdIndex.find` for `local_rows` with dynamic ids, until the first look-up."""

    rows_UD: Tensor | None = None
    """The requested rows as they were after `num_updates` updates of the table."""

    num_updates: int = 0

    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Positions in the requested rows and gradients, a pair for each backward pass since the last update."""

    of_batch: list[tuple[ShardedTable, RowExchange]] = field(default_factory=list)
    """The exchanges of all tables of the batch, whose rows and gradients share a message."""


@dataclass(frozen=True, slots=True)
class LookupRows:
    """The rows that a look-up reads."""

    rows_BS: Tensor
    """Positions in the requested rows of the exchange; without replicas rows of the shard in memory."""

    exchange: RowExchange | None = None

    def part(self, first: int, stop: int) -> LookupRows:
        """Return the rows that samples first..stop - 1 read, of the same exchange."""
        return LookupRows(self.rows_BS[first:stop], self.exchange)


class TablePeers(NamedTuple):
    """The replicas of a stage with tables, which each exchange messages on two threads."""

    requests: PeerSockets
    """For row indices of batches to come, beside a running step."""

    rows: PeerSockets
    """For rows and gradients."""

    cards_group: ProcessGroup | None = None
    """For rows and gradients on CUDA devices."""

    @classmethod
    def connect(
        cls,
        group: ProcessGroup,
        *,
        layout: RankLayout | None = None,
        silence_limit_s: float = SILENCE_LIMIT_S,
        cards_group: ProcessGroup | None = None,
        uses_unix: bool = True,
    ) -> TablePeers:
        """Connect the members of a group; raises and takes what `PeerSockets.connect` does.

        Args:
            silence_limit_s: Longest wait for rows. Reading batches ahead may take a replica longer.
            cards_group: The same members, joined by NCCL.
        """
        requests, rows = (
            PeerSockets.connect(group, layout=layout, silence_limit_s=limit_s, uses_unix=uses_unix)
            for limit_s in (max(START_LIMIT_S, silence_limit_s), silence_limit_s)
        )
        return cls(requests, rows, cards_group)

    def exchange(
        self, rows: Sequence[Tensor], sent_counts: Sequence[Counts], received_counts: Sequence[Counts]
    ) -> list[Tensor]:
        """Do what `PeerSockets.exchange_rows` does, for tensors on any device; those of CUDA devices stay there."""
        if self.cards_group is None:
            arrived = self.rows.exchange_rows([each.cpu() for each in rows], sent_counts, received_counts)
            return [found.to(each.device) for found, each in zip(arrived, rows, strict=True)]
        arrived = []
        for each, sent, received in zip(rows, sent_counts, received_counts, strict=True):
            arrived.append(each.new_empty(sum(received), *each.shape[1:]))
            dist.all_to_all_single(arrived[-1], each, received, sent, group=self.cards_group)
        return arrived


def share_messages(announced: Sequence[tuple[ShardedTable, LookupRows]]) -> None:
    """Let the tables that a batch looks up send rows, and gradients, in one message."""
    of_batch = [(table, rows.exchange) for table, rows in announced if rows.exchange is not None]
    for _, exchange in of_batch:
        exchange.of_batch = of_batch


def trade_requests(
    requests: Sequence[tuple[Indices, Indices]], *, peers: PeerSockets
) -> list[tuple[Tensor, Counts, Counts]]:
    """Send replicas the rows that this one requests, in one message for all look-ups.

    Args:
        requests: For each look-up the requested rows [U], in the order of owners, and their number by owner [P].

    Returns:
        For each look-up the rows [N] that replicas request of this shard, and the numbers of both, by replica.
    """
    num_lookups = len(requests)
    counts_PL = np.stack([counts_P for _, counts_P in requests], axis=1)
    contents = [rows_U.view(np.uint8).data for rows_U, _ in requests]
    ends = [accumulate(_ROW_INDEX_BYTES * counts_P, initial=0) for _, counts_P in requests]
    pieces = [
        [content[first:stop] for first, stop in pairwise(own)]
        for content, own in zip(contents, ends, strict=True)
    ]
    messages = [
        b"".join([counts_L.tobytes(), *of_peer])
        for counts_L, *of_peer in zip(counts_PL, *pieces, strict=True)
    ]
    arrived = [np.frombuffer(message, np.int64) for message in peers.exchange_sized(messages)]
    received = [message[:num_lookups].tolist() for message in arrived]
    firsts, found = [num_lookups] * len(arrived), []
    for lookup in range(num_lookups):
        counts = [of_peer[lookup] for of_peer in received]
        stops = [first + count for first, count in zip(firsts, counts, strict=True)]
        own = [message[first:stop] for message, first, stop in zip(arrived, firsts, stops, strict=True)]
        found.append((torch.from_numpy(np.concatenate(own)), counts_PL[:, lookup].tolist(), counts))
        firsts = stops
    return found
