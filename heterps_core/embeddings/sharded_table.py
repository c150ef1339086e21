"""An embedding table whose rows are divided among the replicas of a stage.

A look-up sends each distinct row number to its owner and gets the row back; the backward pass sends the summed
gradients the same way, and the owner applies them once a step. With one replica nothing is exchanged, and the
arithmetic is the same. Every replica of a stage must make the same look-ups in the same order, also with no rows.

Shapes: N row numbers of a look-up, U distinct ones, R rows of this shard, D width of a row, S replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.embeddings.initialization import initial_rows
from heterps_core.embeddings.row_optimizers import RowOptimizer, sum_repeated_rows
from heterps_core.embeddings.row_range import rows_per_shard, shard_rows


@dataclass(frozen=True, slots=True)
class _Exchange:
    """How the rows of one look-up went out, so that gradients can follow the same way."""

    inverse_N: Tensor
    """Position in the distinct rows of each looked-up row."""
    num_distinct: int
    send_counts_S: list[int]
    receive_counts_S: list[int]
    local_rows: Tensor
    """Rows of this shard that the replicas asked for, relative to its first row."""


class ShardedTable:
    """The shard of one replica, with its optimizer state.

    Args:
        name: Name of the table, for seeding and checkpoints.
        num_rows: Rows of the whole table.
        dimension: Width of a row (D).
        optimizer: Applies gradients to rows.
        seed: Seed of the training run.
        initial_standard_deviation: Of the initial values.
        group: Replicas that share the table; None for one process.
    """

    def __init__(
        self,
        *,
        name: str,
        num_rows: int,
        dimension: int,
        optimizer: RowOptimizer,
        seed: int,
        initial_standard_deviation: float,
        group: ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self.num_rows = num_rows
        self.dimension = dimension
        self.optimizer = optimizer
        self.group = group
        self.num_shards = 1 if group is None else dist.get_world_size(group)
        shard = 0 if group is None else dist.get_rank(group)
        self.rows = shard_rows(num_rows, self.num_shards, shard)
        self.weight_RD = initial_rows(
            self.rows,
            table=name,
            dimension=dimension,
            seed=seed,
            standard_deviation=initial_standard_deviation,
        )
        self.state = optimizer.new_state(self.rows.num_rows)
        self._pending: list[tuple[Tensor, Tensor]] = []
        # Autograd calls a function's backward only where an input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    def lookup(self, rows_N: Tensor) -> Tensor:
        """Return the rows [N, D] of row numbers [N] (int64, of the whole table)."""
        return _Lookup.apply(rows_N, self._anchor, self)  # type: ignore[no-any-return, no-untyped-call]

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Apply all gradients that arrived since the last call; once a step, after all backward passes."""
        if not self._pending:
            return
        rows = torch.cat([rows for rows, _ in self._pending])
        gradients = torch.cat([gradients for _, gradients in self._pending])
        self._pending.clear()
        rows_U, gradients_UD = sum_repeated_rows(rows, gradients)
        if rows_U.numel():
            self.optimizer.update(
                self.weight_RD, self.state, rows_U, gradients_UD, learning_rate=learning_rate
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return the shard's tensors by their name in a checkpoint; the first size is `rows.num_rows`."""
        return {"weight": self.weight_RD, **self.state}

    def _gather(self, rows_N: Tensor) -> tuple[Tensor, _Exchange]:
        rows_U, inverse_N = torch.unique(rows_N, return_inverse=True)
        if self.group is None:
            local = _Exchange(inverse_N, len(rows_U), [], [], rows_U)
            return self.weight_RD.index_select(0, rows_U), local
        # Distinct rows are ascending and shards are contiguous, so they are in the owners' order already.
        owner_U = rows_U // rows_per_shard(self.num_rows, self.num_shards)
        send_counts_S = torch.bincount(owner_U, minlength=self.num_shards)
        receive_counts_S = torch.empty_like(send_counts_S)
        dist.all_to_all_single(receive_counts_S, send_counts_S, group=self.group)
        send, receive = send_counts_S.tolist(), receive_counts_S.tolist()
        asked = torch.empty(sum(receive), dtype=torch.int64)
        dist.all_to_all_single(asked, rows_U, receive, send, group=self.group)
        local_rows = asked - self.rows.first
        found_UD = torch.empty(len(rows_U), self.dimension)
        answer = self.weight_RD.index_select(0, local_rows)
        dist.all_to_all_single(found_UD, answer, send, receive, group=self.group)
        return found_UD, _Exchange(inverse_N, len(rows_U), send, receive, local_rows)

    def _scatter(self, exchange: _Exchange, gradients_UD: Tensor) -> None:
        if self.group is None:
            self._pending.append((exchange.local_rows, gradients_UD))
            return
        received = torch.empty(len(exchange.local_rows), self.dimension)
        dist.all_to_all_single(
            received, gradients_UD, exchange.receive_counts_S, exchange.send_counts_S, group=self.group
        )
        self._pending.append((exchange.local_rows, received))


class _Lookup(torch.autograd.Function):
    """Exchange rows forward and their gradients backward."""

    @staticmethod
    def forward(ctx: Any, rows_N: Tensor, anchor: Tensor, table: ShardedTable) -> Tensor:
        rows_UD, exchange = table._gather(rows_N)
        ctx.table, ctx.exchange = table, exchange
        return rows_UD.index_select(0, exchange.inverse_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (gradients_ND,) = gradients
        exchange: _Exchange = ctx.exchange
        gradients_UD = torch.zeros(exchange.num_distinct, gradients_ND.shape[1])
        gradients_UD.index_add_(0, exchange.inverse_N, gradients_ND)
        ctx.table._scatter(exchange, gradients_UD)
        return None, None, None
