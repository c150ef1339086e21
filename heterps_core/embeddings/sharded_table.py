"""An embedding table whose rows are divided among the replicas of a stage.

A look-up sends each distinct row index to its owner and gets the row back; the backward pass sends the summed
gradients the same way, and the owner applies them once a step. With one replica nothing is exchanged, and the
arithmetic is the same. Every replica of a stage must make the same look-ups in the same order, also with no rows.

Shapes: B samples of a look-up, S rows that each looks up, U distinct ones, R rows of this shard, D width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU, to_device
from heterps_core.embeddings.initialization import initial_rows
from heterps_core.embeddings.lookup_table import LookupTable, copy_rows
from heterps_core.embeddings.row_optimizers import RowOptimizer, sum_by_row
from heterps_core.embeddings.row_range import rows_per_shard, shard_rows
from heterps_core.transport.huge_pages import use_huge_pages


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
    """On the table's device, as the positions are: those rows, relative to the first one of the shard."""


class ShardedTable(LookupTable[RowExchange | None]):
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
    ) -> None:
        super().__init__(name=name, num_rows=num_rows, dimension=dimension, device=device)
        self.optimizer = optimizer
        self.group = group
        self._rows_group = rows_group or group
        self.num_shards = 1 if group is None else dist.get_world_size(group)
        shard = 0 if group is None else dist.get_rank(group)
        self.rows = shard_rows(num_rows, self.num_shards, shard)
        self.weight_RD = initial_rows(
            self.rows,
            table=name,
            dimension=dimension,
            seed=seed,
            standard_deviation=initial_standard_deviation,
            out=self._new_weight(),
        )
        self.state = optimizer.new_state(self.rows.num_rows, dimension, device=device)
        for tensor in self.tensors().values():
            use_huge_pages(tensor)
        self._pending: list[tuple[Tensor, Tensor]] = []

    def exchange_row_numbers(self, rows_BS: Tensor, *, group: ProcessGroup | None = None) -> RowExchange:
        """Tell the owners which rows a look-up will ask for.

        It may run ahead of the look-up, also on a thread of its own: nothing is read but row indices. Hand the
        result to `expect` right before the look-up.

        Args:
            rows_BS: As in `lookup`.
            group: The same replicas, for messages that do not mix with those of look-ups; by default the table's.

        Raises:
            IndexError: A row is not in the table.
        """
        group = group or self.group
        # Counts and row indices are needed on the host, and may be asked for beside what a device is computing.
        rows_U, inverse_BS = self._distinct(rows_BS.cpu())
        # Distinct rows are ascending and shards are contiguous, so they are in the owners' order already.
        owner_U = rows_U // rows_per_shard(self.num_rows, self.num_shards)
        send_counts = torch.bincount(owner_U, minlength=self.num_shards)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=group)
        send, receive = send_counts.tolist(), receive_counts.tolist()
        asked = torch.empty(sum(receive), dtype=torch.int64, device=CPU)
        dist.all_to_all_single(asked, rows_U, receive, send, group=group)
        local_rows = to_device(asked - self.rows.first, self.device)
        return RowExchange(to_device(inverse_BS, self.device), len(rows_U), send, receive, local_rows)

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Apply all gradients that arrived since the last call; once a step, after all backward passes."""
        if self._pending:
            self.optimizer.update_repeated(
                self.weight_RD, self.state, self._pending, learning_rate=learning_rate
            )
            self._pending.clear()

    def read_rows(self, local_rows_U: Tensor) -> Tensor:
        """Return rows [U, D] of this shard; numbers are relative to its first row."""
        rows_UD = torch.empty(len(local_rows_U), self.dimension, device=self.device)
        copy_rows(self.weight_RD, local_rows_U[:, None], rows_UD)
        return rows_UD

    def update_rows(self, local_rows_U: Tensor, gradients_UD: Tensor, *, learning_rate: float) -> None:
        """Apply gradients to rows of this shard at once; numbers are relative to its first row."""
        self.optimizer.update_repeated(
            self.weight_RD, self.state, [(local_rows_U[:, None], gradients_UD)], learning_rate=learning_rate
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the shard's tensors by their name in a checkpoint; the first size is `rows.num_rows`."""
        return {"weight": self.weight_RD, **self.state}

    def _new_weight(self) -> Tensor:
        """Return memory for the shard [R, D]."""
        return torch.empty(self.rows.num_rows, self.dimension, device=self.device)

    def _gather(self, rows_BS: Tensor, out_BX: Tensor) -> RowExchange | None:
        """Write the rows into columns; returns how they were exchanged, None where this process has them all."""
        if self.group is None:
            copy_rows(self.weight_RD, rows_BS, out_BX)
            return None
        exchange = self.exchange_row_numbers(rows_BS) if self._expected is None else self._expected
        self._expected = None
        answer = self.read_rows(exchange.local_rows)
        found_UD = torch.empty(exchange.num_distinct, self.dimension, device=self.device)
        dist.all_to_all_single(
            found_UD, answer, exchange.sent_counts, exchange.received_counts, group=self._rows_group
        )
        copy_rows(found_UD, exchange.inverse_BS, out_BX)
        return exchange

    def _scatter(self, rows_BS: Tensor, exchange: RowExchange | None, gradients_BX: Tensor) -> None:
        if exchange is None:
            self._pending.append((rows_BS, gradients_BX))
            return
        gradients_UD = sum_by_row(
            [(exchange.inverse_BS, gradients_BX)], exchange.num_distinct, self.dimension
        )
        received = torch.empty(len(exchange.local_rows), self.dimension, device=self.device)
        dist.all_to_all_single(
            received, gradients_UD, exchange.received_counts, exchange.sent_counts, group=self._rows_group
        )
        self._pending.append((exchange.local_rows[:, None], received))
