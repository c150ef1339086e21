"""An embedding table whose rows are divided among the replicas of a stage.

A look-up sends each distinct row index to its owner and gets the row back; the backward pass sends the summed
gradients the same way, and the owner applies them once a step. With one replica nothing is exchanged, and the
arithmetic is the same. Every replica of a stage must make the same look-ups in the same order, also with no rows.

Shapes: B samples of a look-up, S rows that each looks up, U distinct ones, R rows of this shard, D width of a row,
X = S * D; with bags, which sum rows, X = G * D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU, to_device
from heterps_core.data.features import BUCKET_ROWS, KEY_BITS
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.id_index import IdIndex, IdLayout
from heterps_core.embeddings.initial_rows import initial_rows
from heterps_core.embeddings.row_kernels import kernels_for
from heterps_core.embeddings.row_lists import distinct_rows
from heterps_core.embeddings.row_optimizers import RowOptimizer, State, sum_by_row
from heterps_core.embeddings.row_range import RowRange, rows_per_shard, shard_rows
from heterps_core.transport.shared_memory import use_huge_pages


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Rows that replicas request from one another in one look-up; gradients go the opposite way."""

    inverse_BS: Tensor
    """Position in the distinct rows of each looked-up row."""

    num_distinct: int
    sent_counts: list[int]
    """Rows asked for, by owner."""

    received_counts: list[int]
    """Rows of this shard that were asked for, by replica."""

    local_rows: Tensor
    """On the table's device, as the positions are: those rows, relative to the first one of the shard; dynamic ids
    as they are."""

    found_rows: Tensor | None = None
    """Answer of `IdIndex.find` for `local_rows`, with dynamic ids."""


class ShardedTable:
    """The shard of one replica, with its optimizer state.

    Args:
        name: Name of the table, for seeding and checkpoints.
        num_rows: Rows of the whole table.
        dimension: Width of a row (D).
        optimizer: Applies gradients to rows.
        seed: Seed of the training run.
        initial_standard_deviation: Of the initial values.
        group: Replicas that share the table, by messages on the host; None for one process.
        device: Where the shard lies, and what is looked up goes to.
        rows_group: The same replicas, for rows and gradients on the device; by default `group`.
        bags: Which rows of a sample are pooled; None where each row is returned as it is.
        wire_dtype: Of the rows and gradients that replicas send each other: float32 or bfloat16.
        ids: Where the table has the rows of dynamic ids, which are then looked up in the place of row indices; a
            look-up that is trained gives new ones a row. Shards have whole buckets.
        day: On which ids are seen.
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
        device: torch.device = CPU,
        rows_group: ProcessGroup | None = None,
        bags: Bags | None = None,
        wire_dtype: torch.dtype = torch.float32,
        ids: IdLayout | None = None,
        day: int = 0,
    ) -> None:
        self.name = name
        self.sent_bytes = 0
        """In rows and gradients, to other replicas."""

        self._wire_dtype = wire_dtype
        self.bags = bags
        self.device = device
        self.num_rows = num_rows
        self.dimension = dimension
        self.optimizer = optimizer
        self.group = group
        self._rows_group = rows_group or group
        self.num_shards = 1 if group is None else dist.get_world_size(group)
        self._shard = 0 if group is None else dist.get_rank(group)
        self._rows_multiple = 1 if ids is None else BUCKET_ROWS
        self.rows = shard_rows(num_rows, self.num_shards, self._shard, multiple=self._rows_multiple)
        self.ids = (
            None
            if ids is None
            else IdIndex.empty(ids, num_rows=self.rows.num_rows, first_row=self.rows.first, day=day)
        )
        self.weight_RD, self.state = self._new_rows(seed=seed, standard_deviation=initial_standard_deviation)
        self._changed_R = torch.zeros(len(self.weight_RD), dtype=torch.bool, device=device)
        for tensor in (*self._tensors().values(), self._changed_R):
            use_huge_pages(tensor)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._expected: RowExchange | None = None
        # Autograd calls a function's backward only where an input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True, device=device)

    @property
    def looks_ahead(self) -> bool:
        """The rows of a look-up are asked for, or found, by `exchange_row_numbers` before it."""
        return self.group is not None or self.ids is not None

    def exchange_row_numbers(self, rows_BS: Tensor, *, group: ProcessGroup | None = None) -> RowExchange:
        """Tell the owners which rows a look-up will ask for, who find those of dynamic ids.

        `group` are the same replicas, for messages that do not mix with those of look-ups; by default the table's.

        It may run ahead of the look-up, also on a thread of its own: nothing is read but row indices. Hand the
        result to `expect` right before the look-up.

        Raises:
            IndexError: A row is not in the table.
        """
        group = group or self.group
        if group is None:
            assert self.ids is not None
            return RowExchange(rows_BS, rows_BS.numel(), [], [], rows_BS, self.ids.find(rows_BS))
        rows_U, inverse_BS = self._distinct(rows_BS)
        # Distinct rows are ascending and shards are contiguous, so they are in the owners' order already.
        first_U = (
            rows_U if self.ids is None else torch.from_numpy(self.ids.layout.bucket_rows(rows_U.numpy()))
        )
        owner_U = first_U // rows_per_shard(self.num_rows, self.num_shards, multiple=self._rows_multiple)
        send_counts = torch.bincount(owner_U, minlength=self.num_shards)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=group)
        send, receive = send_counts.tolist(), receive_counts.tolist()
        asked = torch.empty(sum(receive), dtype=torch.int64, device=CPU)
        dist.all_to_all_single(asked, rows_U, receive, send, group=group)
        found_rows = None if self.ids is None else self.ids.find(asked)
        local_rows = to_device(asked if self.ids is not None else asked - self.rows.first, self.device)
        inverse_BS = to_device(inverse_BS, self.device)
        return RowExchange(inverse_BS, len(rows_U), send, receive, local_rows, found_rows)

    def expect(self, exchange: RowExchange) -> None:
        """Let the next look-up, which must be the one that it was made for, use what was asked for ahead."""
        self._expected = exchange

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
            rows_BS: Row indices [B, S] of the whole table, or dynamic ids, int64.
            before_BW: Columns to put before the rows.
            after_BV: Columns to put after them; they get no gradient.
            dtype: Of what is returned, float32 or bfloat16; the table stays float32.

        Returns:
            Tensor [B, W + X + V].

        Raises:
            IndexError: A row is not in the table.
        """
        if self.ids is not None:
            rows_BS = self._rows_of_ids(self.ids, rows_BS)
        return _Lookup.apply(rows_BS, self._anchor, before_BW, after_BV, dtype, self)  # type: ignore[no-any-return, no-untyped-call]

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Apply all gradients that arrived since the last call; once a step, after all backward passes."""
        # Gradients that came from replicas are of single rows.
        self._apply(self._pending, learning_rate, bags=self.bags if self.group is None else None)
        self._pending.clear()

    def _apply(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        learning_rate: float,
        *,
        bags: Bags | None,
        shard: RowRange | None = None,
    ) -> None:
        """Update rows by gradients as `RowOptimizer.update_repeated` takes them."""
        if parts:
            self.optimizer.update_repeated(
                self.weight_RD,
                self.state,
                parts,
                learning_rate=learning_rate,
                shard=shard,
                bags=bags,
                changed_R=self._changed_R,
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return the shard's tensors by their name in a checkpoint; the first size is `rows.num_rows`."""
        if self.ids is not None:
            # A copy: whole rows are written beside the training, which goes on to mark rows.
            self.ids.note_seen(self._changed_R.clone())
        return self._tensors()

    def weights(self) -> dict[str, Tensor]:
        """Return those of the shard's tensors that are no state of the optimizer."""
        return {"weight": self.weight_RD, **({} if self.ids is None else self.ids.tensors())}

    def whole_rows(self, piece_bytes: int) -> Iterator[tuple[RowRange, dict[str, Tensor]]]:
        """Yield copies of all rows of the shard, some at a time, with their tensors as a checkpoint names them.

        The table may be trained meanwhile; what is hashed and what is written are the same bytes.
        """
        tensors = self.tensors()
        size = max(piece_bytes // sum(tensor[:1].nbytes for tensor in tensors.values()), 1)
        for first in range(0, self.rows.num_rows, size):
            part = {name: tensor[first : first + size].to(CPU, copy=True) for name, tensor in tensors.items()}
            stop = min(first + size, self.rows.num_rows)
            yield RowRange(self.rows.first + first, self.rows.first + stop), part

    def forget_changes(self) -> None:
        """Count changed rows from here on."""
        self._changed_R.zero_()

    def take_changes(self, piece_bytes: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield copies of the rows that `apply_gradients` changed since the last call, and count from here on.

        Args:
            piece_bytes: About what is copied at once.

        Yields:
            Rows [U] of the shard on the host, ascending, and what `tensors` holds of them.
        """
        kernels = kernels_for(self.weight_RD)
        if kernels is not None:
            changed_U = kernels.take_changed(self._changed_R)
        else:
            changed_U = self._changed_R.nonzero()[:, 0]
            self._changed_R.zero_()
        if self.ids is not None:
            self.ids.note_seen(changed_U)
        row_bytes = sum(tensor[:1].nbytes for tensor in self._tensors().values())
        size = max(piece_bytes // max(row_bytes, 1), 1)
        for first in range(0, len(changed_U), size):
            rows_U = changed_U[first : first + size]
            yield rows_U.to(CPU), {name: copied.to(CPU) for name, copied in self.copies_of(rows_U).items()}

    def remaining_changes(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield, as `take_changes`, what need not be copied before the training goes on: here nothing."""
        return iter(())

    def copies_of(self, rows_U: Tensor) -> dict[str, Tensor]:
        """Return what `tensors` holds of some rows of the shard, copied."""
        copies = {}
        for name, tensor in self._tensors().items():
            copies[name] = torch.empty(len(rows_U), *tensor.shape[1:], dtype=tensor.dtype, device=self.device)
            source, target = (each if each.ndim == 2 else each[:, None] for each in (tensor, copies[name]))
            copy_rows(source, rows_U[:, None], target)
        return copies

    def _tensors(self) -> dict[str, Tensor]:
        return self.weights() | self.state

    def _rows_of_ids(self, ids: IdIndex, ids_BS: Tensor) -> Tensor:
        """Find the rows of a look-up's ids, or of those that replicas ask this one for, in the expected exchange."""

        def rows(of: Tensor, found: Tensor | None) -> Tensor:
            return (
                ids.rows_seen(of, self._changed_R, found) if torch.is_grad_enabled() else ids.rows(of, found)
            )

        exchange, self._expected = self._expected, None
        if self.group is None:
            return rows(ids_BS, None if exchange is None else exchange.found_rows)
        exchange = exchange or self.exchange_row_numbers(ids_BS)
        self._expected = replace(exchange, local_rows=rows(exchange.local_rows, exchange.found_rows))
        return ids_BS

    def _new_rows(self, *, seed: int, standard_deviation: float) -> tuple[Tensor, State]:
        """Return the initial rows of the shard [R, D] and their optimizer state."""
        weight_RD = initial_rows(
            self.rows,
            table=self.name,
            dimension=self.dimension,
            seed=seed,
            standard_deviation=standard_deviation,
            out=self._new_weight(),
        )
        return weight_RD, self.optimizer.new_state(self.rows.num_rows, self.dimension, device=self.device)

    def _new_weight(self) -> Tensor:
        """Return memory for the shard [R, D]."""
        return torch.empty(self.rows.num_rows, self.dimension, device=self.device)

    def _distinct(self, rows_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return on the host the distinct rows [U], ascending, and the position in them of each row [B, S]."""
        # Counts and row indices are needed on the host, and may be asked for beside what a device is computing.
        num_rows = self.num_rows if self.ids is None else 1 << KEY_BITS
        try:
            rows_U, inverse_BS = distinct_rows(
                rows_BS.cpu().numpy(), num_rows=num_rows, allows_none=self.bags is not None
            )
        except IndexError as error:
            raise IndexError(f"table {self.name!r}: {error}") from None
        return torch.from_numpy(rows_U), torch.from_numpy(inverse_BS)

    def _gather(self, rows_BS: Tensor, out_BX: Tensor) -> RowExchange | None:
        """Write the rows into columns; returns how they were exchanged, None where this process has them all."""
        if self.group is None:
            copy_rows(self.weight_RD, rows_BS, out_BX, self.bags)
            return None
        exchange = self.exchange_row_numbers(rows_BS) if self._expected is None else self._expected
        self._expected = None
        asked_UD = torch.empty(len(exchange.local_rows), self.dimension, device=self.device)
        copy_rows(self.weight_RD, exchange.local_rows[:, None], asked_UD)
        found = self._send(asked_UD, exchange.received_counts, exchange.sent_counts)
        copy_rows(found, exchange.inverse_BS, out_BX, self.bags)
        return exchange

    def _scatter(self, rows_BS: Tensor, exchange: RowExchange | None, gradients_BX: Tensor) -> None:
        """Take the gradients of a look-up's columns."""
        if exchange is None:
            self._pending.append((rows_BS, gradients_BX))
            return
        gradients_UD = sum_by_row(
            [(exchange.inverse_BS, gradients_BX)], exchange.num_distinct, self.dimension, self.bags
        )
        received = self._send(gradients_UD, exchange.sent_counts, exchange.received_counts)
        self._pending.append((exchange.local_rows[:, None], received))

    def _send(self, rows_UD: Tensor, sent_counts: list[int], received_counts: list[int]) -> Tensor:
        """Send consecutive rows to replicas in order, so many to each, and return the rows that they send."""
        message = rows_UD.to(self._wire_dtype)
        received = message.new_empty(sum(received_counts), self.dimension)
        dist.all_to_all_single(received, message, received_counts, sent_counts, group=self._rows_group)
        num_away = len(rows_UD) - sent_counts[self._shard]
        self.sent_bytes += num_away * self.dimension * self._wire_dtype.itemsize
        return received.float()


def copy_rows(weight_RD: Tensor, rows_BS: Tensor, out_BX: Tensor, bags: Bags | None = None) -> None:
    """Copy rows [B, S] of a table, or the sums of bags, into columns [B, X], which may belong to a wider tensor."""
    kernels = kernels_for(weight_RD)
    if kernels is not None:
        kernels.gather(weight_RD, rows_BS, out_BX, bags)
    elif bags is not None:
        out_BX.copy_(bags.pool(weight_RD, rows_BS).flatten(1))
    else:
        out_BX.copy_(weight_RD.index_select(0, rows_BS.reshape(-1)).view(out_BX.shape))


class _Lookup(torch.autograd.Function):
    """Bring rows together forward and hand their gradients to the table backward."""

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
        num_vectors = num_slots if table.bags is None else table.bags.num_bags
        first = 0 if before_BW is None else before_BW.shape[1]
        stop = first + num_vectors * table.dimension
        width = stop + (0 if after_BV is None else after_BV.shape[1])
        leaving = torch.empty(num_samples, width, dtype=dtype, device=rows_BS.device)
        if before_BW is not None:
            leaving[:, :first] = before_BW
        if after_BV is not None:
            leaving[:, stop:] = after_BV
        ctx.exchange = table._gather(rows_BS, leaving[:, first:stop])
        ctx.scales = None if table.bags is None else table.bags.scales(rows_BS)
        if ctx.scales is not None:
            leaving[:, first:stop].view(num_samples, num_vectors, table.dimension).mul_(ctx.scales)
        ctx.table, ctx.rows_BS, ctx.columns = table, rows_BS, (first, stop)
        ctx.before_dtype = None if before_BW is None else before_BW.dtype
        return leaving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor | None, None, None, None]:
        (gradient,) = gradients
        first, stop = ctx.columns
        of_vectors = gradient[:, first:stop]
        if ctx.scales is not None:
            shape = (*ctx.scales.shape[:2], ctx.table.dimension)
            of_vectors = (of_vectors.reshape(shape) * ctx.scales.to(of_vectors.dtype)).flatten(1)
        ctx.table._scatter(ctx.rows_BS, ctx.exchange, of_vectors)
        before = None if ctx.before_dtype is None else gradient[:, :first].to(ctx.before_dtype)
        return None, None, before, None, None, None
