"""An embedding table whose rows are divided among the replicas of a stage.

A look-up sends each distinct row number to its owner and gets the row back; the backward pass sends the summed
gradients the same way, and the owner applies them once a step. With one replica nothing is exchanged, and the
arithmetic is the same. Every replica of a stage must make the same look-ups in the same order, also with no rows.

Shapes: B samples of a look-up, S rows that each looks up, U distinct ones, R rows of this shard, D width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.embeddings.huge_pages import use_huge_pages
from heterps_core.embeddings.initialization import initial_rows
from heterps_core.embeddings.row_kernels import kernels_for
from heterps_core.embeddings.row_optimizers import RowOptimizer, RowWiseSGD
from heterps_core.embeddings.row_range import rows_per_shard, shard_rows


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Who asks whom for which rows in one look-up; gradients follow the same way."""

    inverse_BS: Tensor
    """Position in the distinct rows of each looked-up row."""

    num_distinct: int
    sent_counts: list[int]
    """Rows asked for, by owner."""

    received_counts: list[int]
    """Rows of this shard that were asked for, by replica."""

    local_rows: Tensor
    """Those rows, relative to the first one of the shard."""


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
        self.state = optimizer.new_state(self.rows.num_rows, dimension)
        for tensor in self.tensors().values():
            use_huge_pages(tensor)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._expected: RowExchange | None = None
        # Autograd calls a function's backward only where an input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    def lookup(
        self,
        rows_BS: Tensor,
        before_BW: Tensor | None = None,
        after_BV: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Look rows up and put them side by side for each sample, between columns that come from elsewhere.

        Args:
            rows_BS: Row numbers [B, S] of the whole table, int64.
            before_BW: Columns to put before the rows.
            after_BV: Columns to put behind them; they get no gradient.
            dtype: Of what is returned, float32 or bfloat16; the table stays float32.

        Returns:
            Tensor [B, W + S * D + V].

        Raises:
            IndexError: A row is not in the table.
        """
        return _Lookup.apply(rows_BS, self._anchor, before_BW, after_BV, dtype, self)  # type: ignore[no-any-return, no-untyped-call]

    def exchange_row_numbers(self, rows_BS: Tensor, *, group: ProcessGroup | None = None) -> RowExchange:
        """Tell the owners which rows a look-up will ask for.

        It may run ahead of the look-up, also on a thread of its own: nothing is read but row numbers. Hand the
        result to `expect` right before the look-up.

        Args:
            rows_BS: As in `lookup`.
            group: The same replicas, for messages that do not mix with those of look-ups; by default the table's.

        Raises:
            IndexError: A row is not in the table.
        """
        group = group or self.group
        rows_U, inverse_BS = torch.unique(rows_BS, return_inverse=True)
        if len(rows_U) and not (rows_U[0] >= 0 and rows_U[-1] < self.num_rows):
            raise IndexError(
                f"rows must lie in 0..{self.num_rows - 1} of table {self.name!r}, got {rows_U[[0, -1]]}"
            )
        # Distinct rows are ascending and shards are contiguous, so they are in the owners' order already.
        owner_U = rows_U // rows_per_shard(self.num_rows, self.num_shards)
        send_counts = torch.bincount(owner_U, minlength=self.num_shards)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=group)
        send, receive = send_counts.tolist(), receive_counts.tolist()
        asked = torch.empty(sum(receive), dtype=torch.int64)
        dist.all_to_all_single(asked, rows_U, receive, send, group=group)
        return RowExchange(inverse_BS, len(rows_U), send, receive, asked - self.rows.first)

    def expect(self, exchange: RowExchange) -> None:
        """Let the next look-up, which must be the one that it was made for, use an exchange made ahead."""
        self._expected = exchange

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Apply all gradients that arrived since the last call; once a step, after all backward passes."""
        if self._pending:
            self.optimizer.update_repeated(
                self.weight_RD, self.state, self._pending, learning_rate=learning_rate
            )
            self._pending.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the shard's tensors by their name in a checkpoint; the first size is `rows.num_rows`."""
        return {"weight": self.weight_RD, **self.state}

    def _gather(self, rows_BS: Tensor, out_BX: Tensor) -> RowExchange | None:
        """Write the rows into columns; returns how they were exchanged, None where this process has them all."""
        if self.group is None:
            _copy_rows(self.weight_RD, rows_BS, out_BX)
            return None
        exchange = self.exchange_row_numbers(rows_BS) if self._expected is None else self._expected
        self._expected = None
        answer = torch.empty(len(exchange.local_rows), self.dimension)
        _copy_rows(self.weight_RD, exchange.local_rows[:, None], answer)
        found_UD = torch.empty(exchange.num_distinct, self.dimension)
        dist.all_to_all_single(
            found_UD, answer, exchange.sent_counts, exchange.received_counts, group=self.group
        )
        _copy_rows(found_UD, exchange.inverse_BS, out_BX)
        return exchange

    def _scatter(self, rows_BS: Tensor, exchange: RowExchange | None, gradients_BX: Tensor) -> None:
        if exchange is None:
            self._pending.append((rows_BS, gradients_BX))
            return
        gradients_UD = torch.zeros(exchange.num_distinct, self.dimension)
        # A step of -1 from zero is the sum.
        RowWiseSGD().update_repeated(
            gradients_UD, {}, [(exchange.inverse_BS, gradients_BX)], learning_rate=-1.0
        )
        received = torch.empty(len(exchange.local_rows), self.dimension)
        dist.all_to_all_single(
            received, gradients_UD, exchange.received_counts, exchange.sent_counts, group=self.group
        )
        self._pending.append((exchange.local_rows[:, None], received))


def _copy_rows(weight_RD: Tensor, rows_BS: Tensor, out_BX: Tensor) -> None:
    """Copy rows [B, S] of a table into columns [B, S * D], which may belong to a wider tensor."""
    kernels = kernels_for(weight_RD)
    if kernels is None:
        out_BX.copy_(weight_RD.index_select(0, rows_BS.reshape(-1)).view(out_BX.shape))
    else:
        kernels.gather(weight_RD, rows_BS, out_BX)


class _Lookup(torch.autograd.Function):
    """Bring rows together forward and send their gradients to the owners backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_BS: Tensor,
        anchor: Tensor,
        before_BW: Tensor | None,
        after_BV: Tensor | None,
        dtype: torch.dtype,
        table: ShardedTable,
    ) -> Tensor:
        num_samples, num_slots = rows_BS.shape
        first = 0 if before_BW is None else before_BW.shape[1]
        stop = first + num_slots * table.dimension
        width = stop + (0 if after_BV is None else after_BV.shape[1])
        leaving = torch.empty(num_samples, width, dtype=dtype)
        if before_BW is not None:
            leaving[:, :first] = before_BW
        if after_BV is not None:
            leaving[:, stop:] = after_BV
        ctx.exchange = table._gather(rows_BS, leaving[:, first:stop])
        ctx.table, ctx.rows_BS, ctx.columns = table, rows_BS, (first, stop)
        ctx.before_dtype = None if before_BW is None else before_BW.dtype
        return leaving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor | None, None, None, None]:
        (gradient,) = gradients
        first, stop = ctx.columns
        ctx.table._scatter(ctx.rows_BS, ctx.exchange, gradient[:, first:stop])
        before = None if ctx.before_dtype is None else gradient[:, :first].to(ctx.before_dtype)
        return None, None, before, None, None, None
