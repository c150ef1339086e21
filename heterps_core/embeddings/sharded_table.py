"""An embedding table whose rows are divided among the replicas of a stage.

Each distinct row of a batch travels once, however many micro-batches look it up (`row_exchange`): the first look-up
fetches the rows from their owners, and the update sends the summed gradients back. With one replica nothing is
exchanged, and the arithmetic is the same. Every replica of a stage must make the same look-ups in the same order,
also with no rows.

Shapes: B samples of a look-up, S rows that each looks up, U distinct rows of a batch, R rows of this shard, D width
of a row, X = S * D; with bags, which sum rows, X = G * D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from heterps_core.compute_device import CPU, to_device
from heterps_core.data.features import BUCKET_ROWS, KEY_BITS
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.id_index import IdIndex, IdLayout
from heterps_core.embeddings.initial_rows import initial_rows
from heterps_core.embeddings.row_exchange import (
    Counts,
    LookupRows,
    RowExchange,
    TablePeers,
    share_messages,
    trade_requests,
)
from heterps_core.embeddings.row_kernels import kernels_for
from heterps_core.embeddings.row_lists import Indices, distinct_rows
from heterps_core.embeddings.row_lookup import copy_rows, placed_rows
from heterps_core.embeddings.row_optimizers import RowOptimizer, State, sum_by_row
from heterps_core.embeddings.row_range import RowRange, rows_per_shard, shard_rows
from heterps_core.transport.shared_memory import use_huge_pages


class ShardedTable:
    """The shard of one replica, with its optimizer state.

    Args:
        name: Name of the table, for seeding and checkpoints.
        num_rows: Rows of the whole table.
        dimension: Width of a row (D).
        optimizer: Applies gradients to rows.
        seed: Seed of the training run.
        initial_standard_deviation: Standard deviation of the initial values.
        peers: Replicas that share the table by messages; None for one process.
        device: Device of the shard and of looked-up rows.
        bags: Groups of rows that are pooled; None to return each row.
        wire_dtype: Type of the rows and gradients that replicas send each other: float32 or bfloat16.
        ids: Layout of dynamic ids, which look-ups then take instead of row indices. In training a look-up gives new
            ids a row. Shards have whole buckets.
        day: Day on which ids are seen.
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
        peers: TablePeers | None = None,
        device: torch.device = CPU,
        bags: Bags | None = None,
        wire_dtype: torch.dtype = torch.float32,
        ids: IdLayout | None = None,
        day: int = 0,
    ) -> None:
        self.name = name
        self.sent_bytes = 0
        """Bytes of rows and gradients that this replica has sent to others."""

        self._wire_dtype = wire_dtype
        self.bags = bags
        self.device = device
        self.num_rows = num_rows
        self.dimension = dimension
        self.optimizer = optimizer
        self.peers = peers
        self.num_shards, self._shard = self._shards()
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
        self._expected: LookupRows | None = None
        self._trained: list[RowExchange] = []
        """Exchanges that have gradients to send."""

        self._num_updates = 0
        # Autograd calls a function's backward only where an input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True, device=device)

    @property
    def looks_ahead(self) -> bool:
        """A look-up must be announced to the owners of rows, or to the index of dynamic ids, to be fast."""
        return self.peers is not None or self.ids is not None

    def exchange_row_numbers(self, rows_BS: Tensor) -> LookupRows:
        """Request the rows of this table alone, as the function of that name does."""
        (((_, announced),),) = exchange_row_numbers([[(self, rows_BS)]])
        return announced

    def expect(self, announced: LookupRows) -> None:
        """Let the next look-up read announced rows."""
        self._expected = announced

    @property
    def is_announced(self) -> bool:
        """The next look-up needs no rows: `expect` gave them."""
        return self._expected is not None

    def lookup(
        self,
        rows_BS: Tensor | None,
        before_BW: Tensor | None = None,
        after_BV: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        packs: bool = False,
    ) -> Tensor:
        """Look rows up and put them side by side for each sample, between columns that come from elsewhere.

        Rows of sequences, which stand after those of all bags, are placed as `sequence_columns` says.

        Args:
            rows_BS: Row indices [B, S] of the whole table, or dynamic ids, int64; None where they are announced.
            before_BW: Columns to put before the rows.
            after_BV: Columns to put after the rows; they get no gradient.
            dtype: Type of the result, float32 or bfloat16; the table stays float32.
            packs: Place the rows of sequences without padding.

        Returns:
            Tensor [B, W + X + V].

        Raises:
            IndexError: A row is not in the table.
        """
        looked_up, self._expected = self._expected, None
        if looked_up is None:
            assert rows_BS is not None
            looked_up = self._unannounced(rows_BS)
        if looked_up.exchange is not None:
            for table, exchange in looked_up.exchange.of_batch:
                table._find_rows(exchange)
        return placed_rows(
            self, looked_up, self._anchor, before_BW=before_BW, after_BV=after_BV, dtype=dtype, packs=packs
        )

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Apply all gradients that arrived since the last call; once a step, after all backward passes."""
        for trained in self._trained:
            _send_gradients(trained.of_batch)
        self._trained.clear()
        self._num_updates += 1
        # Gradients that came from replicas are of single rows.
        self._apply(self._pending, learning_rate, bags=self.bags if self.peers is None else None)
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

        The table may be trained meanwhile; the same bytes are hashed and written.
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
            piece_bytes: About the bytes that are copied at once.

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
        """Yield, as `take_changes`, rows that are copied while the training goes on: here none."""
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

    def _unannounced(self, rows_BS: Tensor) -> LookupRows:
        """Return what a look-up reads that was not announced."""
        return self.exchange_row_numbers(rows_BS) if self.looks_ahead else LookupRows(rows_BS)

    def _announced_alone(self, rows_BS: Tensor) -> LookupRows:
        """Return what a look-up of one process reads, and find the rows of dynamic ids."""
        if self.ids is None:
            return LookupRows(rows_BS)
        rows_BS = rows_BS.contiguous()
        found_BS = self.ids.find(rows_BS)
        # The first look-up writes the rows of new ids to the answer.
        return LookupRows(found_BS, RowExchange(rows_BS, found_rows=found_BS))

    def _find_rows(self, exchange: RowExchange) -> None:
        """Find the rows of dynamic ids at the first look-up of a batch, and count that the ids were seen."""
        if self.ids is not None and exchange.found_rows is not None:
            found_rows, exchange.found_rows = exchange.found_rows, None
            if torch.is_grad_enabled():
                exchange.local_rows = self.ids.rows_seen(exchange.local_rows, self._changed_R, found_rows)
            else:
                exchange.local_rows = self.ids.rows(exchange.local_rows, found_rows)

    def _shards(self) -> tuple[int, int]:
        """Return the number of shards, and which one is this replica's."""
        return (1, 0) if self.peers is None else (self.peers.rows.num_members, self.peers.rows.member)

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

    def _distinct(self, rows_BS: Tensor) -> tuple[Indices, Indices]:
        """Return on the host the distinct rows [U], ascending, and the position in them of each row [B, S]."""
        # Counts and row indices are needed on the host, and may be requested while a device computes.
        num_rows = self.num_rows if self.ids is None else 1 << KEY_BITS
        try:
            return distinct_rows(rows_BS.cpu().numpy(), num_rows=num_rows, allows_none=self.bags is not None)
        except IndexError as error:
            raise IndexError(f"table {self.name!r}: {error}") from None

    def _counts_by_owner(self, rows_U: Indices) -> Indices:
        """Return how many of some rows or dynamic ids, which ascend as shards do, each replica owns."""
        rows = rows_U if self.ids is None else self.ids.layout.bucket_rows(rows_U)
        size = rows_per_shard(self.num_rows, self.num_shards, multiple=self._rows_multiple)
        return np.diff(np.searchsorted(rows, size * np.arange(self.num_shards + 1)))

    def _exchange(self, requested: Tensor, sent_counts: Counts, received_counts: Counts) -> RowExchange:
        """Return the exchange in which replicas request some rows of the whole table, or dynamic ids."""
        if self.ids is not None:
            return RowExchange(requested, sent_counts, received_counts, self.ids.find(requested))
        local_rows = to_device(requested - self.rows.first, self.device)
        return RowExchange(local_rows, sent_counts, received_counts)

    def gather(self, looked_up: LookupRows, out_BX: Tensor) -> None:
        """Write rows into columns."""
        exchange = looked_up.exchange
        found = self.weight_RD if exchange is None or self.peers is None else self._fetched(exchange)
        copy_rows(found, looked_up.rows_BS, out_BX, self.bags)

    def scatter(self, looked_up: LookupRows, gradients_BX: Tensor) -> None:
        """Take the gradients of a look-up's columns."""
        exchange = looked_up.exchange
        if exchange is None or self.peers is None:
            self._pending.append((looked_up.rows_BS, gradients_BX))
            return
        if not exchange.gradients:
            self._trained.append(exchange)
        exchange.gradients.append((looked_up.rows_BS, gradients_BX))

    def _fetched(self, exchange: RowExchange) -> Tensor:
        """Return the rows [U, D] that this replica requests, as they are now; only `apply_gradients` changes rows."""
        if exchange.rows_UD is None or exchange.num_updates != self._num_updates:
            _fetch_rows(exchange.of_batch)
        assert exchange.rows_UD is not None
        return exchange.rows_UD

    def _requested(self, exchange: RowExchange) -> Tensor:
        """Return copies of the rows [N, D] that replicas request."""
        requested_ND = torch.empty(
            len(exchange.local_rows), self.dimension, dtype=self._wire_dtype, device=self.device
        )
        copy_rows(self.weight_RD, exchange.local_rows[:, None], requested_ND)
        self._count_sent(exchange.received_counts)
        return requested_ND

    def _summed(self, exchange: RowExchange) -> Tensor:
        """Return the gradients of the requested rows [U, D], summed over a batch."""
        num_rows = sum(exchange.sent_counts)
        summed_UD = sum_by_row(exchange.gradients, num_rows, self.dimension, self.bags)
        self._count_sent(exchange.sent_counts)
        return summed_UD.to(self._wire_dtype)

    def _count_sent(self, counts: Counts) -> None:
        num_away = sum(counts) - counts[self._shard]
        self.sent_bytes += num_away * self.dimension * self._wire_dtype.itemsize


def _fetch_rows(of_batch: Sequence[tuple[ShardedTable, RowExchange]]) -> None:
    """Send replicas the rows that they request of some tables, and get those that this one requests."""
    peers = of_batch[0][0].peers
    assert peers is not None
    arrived = peers.exchange(
        [table._requested(exchange) for table, exchange in of_batch],
        [exchange.received_counts for _, exchange in of_batch],
        [exchange.sent_counts for _, exchange in of_batch],
    )
    for (table, exchange), rows_UD in zip(of_batch, arrived, strict=True):
        exchange.rows_UD, exchange.num_updates = rows_UD.float(), table._num_updates


def _send_gradients(of_batch: Sequence[tuple[ShardedTable, RowExchange]]) -> None:
    """Send the owners of rows the gradients of some tables, and get those of own rows."""
    trained = [(table, exchange) for table, exchange in of_batch if exchange.gradients]
    if not trained:
        # Another table of the batch was updated before, and sent them.
        return
    peers = trained[0][0].peers
    assert peers is not None
    arrived = peers.exchange(
        [table._summed(exchange) for table, exchange in trained],
        [exchange.sent_counts for _, exchange in trained],
        [exchange.received_counts for _, exchange in trained],
    )
    for (table, exchange), rows_ND in zip(trained, arrived, strict=True):
        table._pending.append((exchange.local_rows[:, None], rows_ND.float()))
        exchange.gradients, exchange.rows_UD = [], None


def exchange_row_numbers(
    batches: Sequence[Sequence[tuple[ShardedTable, Tensor]]],
) -> list[list[tuple[ShardedTable, LookupRows]]]:
    """Request the rows that batches look up in tables from their owners, who find those of dynamic ids.

    One message carries the requests of all batches. It may run ahead of the look-ups, also on a thread of its own: it
    reads nothing but row indices. Hand a part of each result to `ShardedTable.expect` right before the look-up of the
    part.

    Args:
        batches: For each batch the tables that it looks up, which the same replicas share, with its row indices
            [B, S] or dynamic ids.

    Raises:
        IndexError: A row is not in its table.
    """
    lookups = [lookup for batch in batches for lookup in batch]
    peers = lookups[0][0].peers if lookups else None
    if peers is None:
        announced = [table._announced_alone(rows_BS) for table, rows_BS in lookups]
    else:
        distinct = [table._distinct(rows_BS) for table, rows_BS in lookups]
        requests = [
            (rows_U, table._counts_by_owner(rows_U))
            for (table, _), (rows_U, _) in zip(lookups, distinct, strict=True)
        ]
        traded = trade_requests(requests, peers=peers.requests)
        announced = [
            LookupRows(to_device(torch.from_numpy(inverse_BS), table.device), table._exchange(*own))
            for (table, _), (_, inverse_BS), own in zip(lookups, distinct, traded, strict=True)
        ]
    remaining = iter(announced)
    by_batch = [[(table, next(remaining)) for table, _ in batch] for batch in batches]
    for of_batch in by_batch:
        share_messages(of_batch)
    return by_batch
