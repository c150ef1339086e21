"""Rows that the replicas of a stage request from one another, once a batch for all its micro-batches and tables.

Shapes: as in `sharded_table`; T tables, P replicas, N rows that replicas request of this shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU

Counts = list[int]


@dataclass(slots=True)
class RowExchange:
    """The rows of one table that replicas request from one another for a batch; gradients go the opposite way."""

    local_rows: Tensor
    """Rows of this shard that replicas request [N], on the table's device and relative to the shard's first one.
    Dynamic ids stand here until the first look-up finds their rows."""

    sent_counts: Counts = field(default_factory=list)
    """Rows that this replica requests, by owner; none without replicas."""

    received_counts: Counts = field(default_factory=list)
    """Rows of this shard that are requested, by replica."""

    found_rows: Tensor | None = None
    """With dynamic ids the answer of `IdIndex.find` for `local_rows`, until the first look-up."""

    rows_UD: Tensor | None = None
    """The requested rows as they were after `num_updates` updates of the table."""

    num_updates: int = 0

    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Positions in the requested rows and gradients, a pair for each backward pass since the last update."""


@dataclass(frozen=True, slots=True)
class LookupRows:
    """What a look-up reads."""

    rows_BS: Tensor
    """Positions in the requested rows of the exchange; without replicas rows of the shard in memory."""

    exchange: RowExchange | None = None

    def part(self, first: int, stop: int) -> LookupRows:
        """Return what samples first..stop - 1 read, of the same exchange."""
        return LookupRows(self.rows_BS[first:stop], self.exchange)


def trade_requests(
    requests: Sequence[tuple[Tensor, npt.NDArray[np.int64]]], *, group: ProcessGroup
) -> list[tuple[Tensor, Counts, Counts]]:
    """Send replicas the rows that this one requests, in two messages for all tables.

    Args:
        requests: For each table the requested rows [U], in the order of their owners, and their number by owner [P].

    Returns:
        For each table the rows [N] that replicas request of this shard, and the numbers of both, by replica.
    """
    sent_PT = torch.from_numpy(np.stack([counts_P for _, counts_P in requests], axis=1))
    received_PT = torch.empty_like(sent_PT)
    dist.all_to_all_single(received_PT, sent_PT, group=group)
    sent, received = sent_PT.T.tolist(), received_PT.T.tolist()
    message = _by_replica([rows_U for rows_U, _ in requests], sent)
    arrived = torch.empty(int(received_PT.sum()), dtype=torch.int64, device=CPU)
    dist.all_to_all_single(
        arrived, message, received_PT.sum(1).tolist(), sent_PT.sum(1).tolist(), group=group
    )
    return list(zip(_by_table(arrived, received), sent, received, strict=True))


def _by_replica(rows: Sequence[Tensor], counts: Sequence[Counts]) -> Tensor:
    """Return the rows of all tables, each in the order of replicas, ordered by replica and then by table."""
    if len(rows) == 1:
        return rows[0]
    pieces = [torch.split(of_table, of_replicas) for of_table, of_replicas in zip(rows, counts, strict=True)]
    return torch.cat([piece for of_replica in zip(*pieces, strict=True) for piece in of_replica])


def _by_table(rows: Tensor, counts: Sequence[Counts]) -> list[Tensor]:
    """Return rows that are ordered by replica and then by table as one tensor for each table."""
    if len(counts) == 1:
        return [rows]
    pieces = torch.split(rows, [count for of_replica in zip(*counts, strict=True) for count in of_replica])
    return [torch.cat(pieces[table :: len(counts)]) for table in range(len(counts))]
