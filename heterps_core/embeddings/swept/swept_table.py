"""A table shard that is larger than the memory for it: rows that are needed soon are in memory, all others on disk.

Which batches come is known, so nothing is fetched row by row. The file of cold rows is swept again and again, a
part of it beside each window of batches: after the visit of a part those of its rows are in memory that this window
has or one until the next visit, all others are on disk. Frequent rows are in every window, so they never touch the
disk. Look-ups and updates work on slots: the same kernels on a smaller tensor, so every row gets bit for bit what it
gets in a table that is in memory.

Shapes: as in `sharded_table`, but R of the tensors in memory is the number of slots.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.features import NO_ID
from heterps_core.embeddings.initial_rows import blocks_of, initial_rows
from heterps_core.embeddings.row_exchange import LookupRows, RowExchange
from heterps_core.embeddings.row_lists import Slots, copy_records
from heterps_core.embeddings.row_optimizers import State
from heterps_core.embeddings.row_range import RowRange
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.embeddings.swept.block_changes import BlockChanges
from heterps_core.embeddings.swept.block_rows import NOTHING, change_of, write_slots
from heterps_core.embeddings.swept.cold_rows import ColdRows
from heterps_core.embeddings.swept.row_windows import RowWindow, WindowPlan
from heterps_core.embeddings.swept.sweep_memory import (
    NUM_PARTS,
    PARTS_OF_MEMORY,
    SWEEPING_THREADS,
    ShardSize,
    SweepCounts,
)
from heterps_core.units import BYTES_PER_FLOAT32

Block = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdRowsPlace:
    """Where the rows of a shard are that are not in memory, and how many are."""

    folders: Sequence[Path]
    """For the files of cold rows, one on each disk."""

    num_slots: int
    """Rows that memory has room for."""


class SweptTable(ShardedTable):
    """The shard of one replica, of which some rows are in memory.

    Each look-up must be announced: by `exchange_row_numbers` before its window is planned, by `with_slots` after the
    window has been swept in, and by `expect` right before the look-up.

    Args:
        place: Where the rows are that are not in memory.
        others: Arguments of `ShardedTable`.

    Raises:
        ConfigurationError: The folder has no room for the rows.
    """

    looks_ahead = True

    def __init__(self, *, place: ColdRowsPlace, **others: Any) -> None:
        self._place = place
        super().__init__(**others)
        self._columns = _columns(self.tensors())
        self._matrices = [values for values, _ in self._columns]
        self._free, self._num_free = np.arange(place.num_slots, dtype=np.int32), place.num_slots
        self._part_blocks = self.cold.num_blocks * np.arange(NUM_PARTS + 1) // NUM_PARTS
        self._in_memory = [NOTHING] * self.cold.num_blocks
        """By block the rows that are in memory, relative to its first one, and their slots."""

        self._changes = BlockChanges(self.cold.num_blocks, self.cold.rows_per_block)
        self._slots_change = threading.Lock()
        self.counts = SweepCounts()

    @property
    def folder(self) -> Path:
        """Where cold rows are, and other scratch may be; the first of several."""
        return self._place.folders[0]

    @property
    def slot_bytes(self) -> int:
        """Memory that a row in memory takes."""
        return ShardSize(num_rows=self.rows.num_rows, width=self.cold.width, most_rows=0).slot_bytes

    def new_plan(self) -> WindowPlan:
        """Return what cuts batches into windows that fit."""
        firsts = np.minimum(self._part_blocks * self.cold.rows_per_block, self.rows.num_rows)
        return WindowPlan(firsts, self._place.num_slots)

    def with_slots(self, announced: LookupRows, window: RowWindow) -> LookupRows:
        """Return what a look-up reads in slots, for `expect`; its window must have been swept in."""
        assert announced.exchange is not None
        slots_U = window.slots_of(announced.exchange.local_rows.numpy())
        if self.peers is not None:
            exchange = replace(announced.exchange, local_rows=torch.from_numpy(slots_U))
            return LookupRows(announced.rows_BS, exchange)
        # Columns after the end of a bag have the position NO_ID, -1, which is that of the last.
        slots_U = np.append(slots_U, NO_ID)
        return LookupRows(torch.from_numpy(slots_U[announced.rows_BS.numpy()]))

    def visit(self, part: int, windows: Sequence[RowWindow], *, writes: bool = True) -> None:
        """Bring the rows of a part of the shard into memory that some windows have; all others of the part leave.

        Rows that leave must not be in use any more, and are written where `writes`; their updates are lost otherwise.

        Args:
            part: In 0..`NUM_PARTS` - 1.
            windows: The one that is trained, and those until the next visit and its window.

        Raises:
            TrainingError: The file cannot be read or written.
        """
        visit = _Visit(self, windows, writes=writes)
        visit.run(range(*self._part_blocks[part : part + 2].tolist()))
        if writes:
            self.counts += SweepCounts(
                rows_asked=sum(window.num_asked for window in windows[:1]),
                rows_fetched=visit.num_fetched,
                bytes_read=visit.num_read * self.cold.block_bytes,
                bytes_written=visit.num_written * self.cold.block_bytes,
            )

    def empty(self, *, writes: bool = True) -> None:
        """Take all rows out of memory."""
        for part in range(NUM_PARTS):
            self.visit(part, [], writes=writes)

    def whole_rows(self, piece_bytes: int) -> Iterator[tuple[RowRange, dict[str, Tensor]]]:
        """Yield all rows of the shard, as many at a time as `row_blocks`."""
        return self.row_blocks()

    def row_blocks(self, *, writes: bool = False) -> Iterator[tuple[RowRange, dict[str, Tensor]]]:
        """Yield all rows of the shard as they are, some at a time, with their tensors as a checkpoint names them.

        What the caller writes to the tensors is kept where `writes`; no row may be in memory then.
        """
        size = self.cold.rows_per_block
        blocks_of_part = max(1, self._place.num_slots // (PARTS_OF_MEMORY * size))
        buffer = self.cold.new_buffer()
        for first_block in range(0, self.cold.num_blocks, blocks_of_part):
            blocks = range(first_block, min(first_block + blocks_of_part, self.cold.num_blocks))
            first, stop = blocks.start * size, min(blocks.stop * size, self.rows.num_rows)
            tensors = self._new_tensors(stop - first)
            columns = _columns(tensors)
            for block in blocks:
                with self._changes.at(block):
                    self._read_newest(block, buffer)
                for values, own in columns:
                    part = values[(block - first_block) * size :][:size]
                    part[:] = buffer[: len(part), own]
            yield RowRange(self.rows.first + first, self.rows.first + stop), tensors
            for block in blocks if writes else ():
                for values, own in columns:
                    part = values[(block - first_block) * size :][:size]
                    buffer[: len(part), own] = part
                self.cold.write(block, buffer)

    def forget_changes(self) -> None:
        """Count changed rows from here on."""
        self._changed_R.zero_()
        self._changes.forget()

    def take_changes(self, piece_bytes: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield copies of changed rows that are in memory, as the table in memory does; no row may change meanwhile.

        `remaining_changes` has all others.
        """
        is_changed = self._changed_R.numpy()
        places: list[npt.NDArray[np.int64]] = []
        slots: list[Slots] = []
        num_bytes = 0
        for block in range(self.cold.num_blocks):
            with self._changes.at(block):
                rows, own = self._in_memory[block]
                is_taken = is_changed[own] | np.isin(rows, self._changes.begin_checkpoint(block, rows))
                is_changed[own] = False
            places.append(rows[is_taken] + np.int64(block * self.cold.rows_per_block))
            slots.append(own[is_taken])
            num_bytes += len(slots[-1]) * self.cold.width * BYTES_PER_FLOAT32
            if num_bytes >= piece_bytes or block == self.cold.num_blocks - 1:
                if num_bytes:
                    yield (
                        torch.from_numpy(np.concatenate(places)),
                        self.copies_of(torch.from_numpy(np.concatenate(slots).astype(np.int64))),
                    )
                places, slots, num_bytes = [], [], 0

    def remaining_changes(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the changed rows that were on disk when `take_changes` came to its end; the training goes on."""
        buffer = self.cold.new_buffer()
        try:
            for block in self._changes.pending_blocks():
                with self._changes.at(block):
                    self.cold.read(block, buffer)
                    rows = self._changes.pending(block)
                    self._changes.finish(block)
                tensors = self._new_tensors(len(rows))
                for values, own in _columns(tensors):
                    values[:] = buffer[rows, own]
                yield torch.from_numpy(rows + block * self.cold.rows_per_block), tensors
        finally:
            # Where it failed there is no checkpoint, and sweeps must not wait for it.
            self._changes.forget(pending_only=True)

    def _new_rows(self, *, seed: int, standard_deviation: float) -> tuple[Tensor, State]:
        """Write the initial rows to disk and return the memory for slots."""
        slots = {"weight": torch.zeros(self._place.num_slots, self.dimension, device=CPU)}
        slots |= self.optimizer.new_state(self._place.num_slots, self.dimension)
        columns = _columns(slots)
        self.cold = ColdRows(
            self._place.folders,
            what=f"table {self.name!r}",
            num_rows=self.rows.num_rows,
            width=columns[-1][1].stop,
        )
        buffer = self.cold.new_buffer()
        for values, own in columns:
            buffer[:, own] = values[0]
        num_filled = block = 0
        for rows in blocks_of(self.rows):
            drawn = initial_rows(
                rows,
                table=self.name,
                dimension=self.dimension,
                seed=seed,
                standard_deviation=standard_deviation,
            ).numpy()
            while len(drawn):
                taken, drawn = np.split(drawn, [self.cold.rows_per_block - num_filled])
                buffer[num_filled : num_filled + len(taken), : self.dimension] = taken
                num_filled += len(taken)
                if num_filled == self.cold.rows_per_block or (rows.stop == self.rows.stop and not len(drawn)):
                    self.cold.write(block, buffer)
                    num_filled, block = 0, block + 1
        return slots.pop("weight"), slots

    def _new_tensors(self, num_rows: int) -> dict[str, Tensor]:
        """Return memory for some rows, by the names of the table's tensors."""
        return {
            name: torch.empty(num_rows, *tensor.shape[1:], device=CPU)
            for name, tensor in self.tensors().items()
        }

    def _read_newest(self, block: int, buffer: Block) -> None:
        """Read a block, and put the rows over it that are in memory."""
        self.cold.read(block, buffer)
        rows, slots = self._in_memory[block]
        copy_records(self._matrices, slots, buffer, rows, to_block=True)

    def _take_slots(self, count: int) -> Slots | None:
        with self._slots_change:
            if count > self._num_free:
                return None
            self._num_free -= count
            return self._free[self._num_free :][:count].copy()

    def _free_slots(self, slots: Slots) -> None:
        with self._slots_change:
            self._free[self._num_free :][: len(slots)] = slots
            self._num_free += len(slots)

    def _announced_alone(self, rows_BS: Tensor) -> LookupRows:
        rows_U, inverse_BS = self._distinct(rows_BS)
        return LookupRows(torch.from_numpy(inverse_BS), RowExchange(torch.from_numpy(rows_U)))

    def _unannounced(self, rows_BS: Tensor) -> LookupRows:
        raise RuntimeError(f"a look-up in table {self.name!r}, whose rows are swept, must be announced")


class _Visit:
    """One pass over some blocks of a table's file, several at once."""

    def __init__(self, table: SweptTable, windows: Sequence[RowWindow], *, writes: bool) -> None:
        self._table, self._windows, self._writes = table, windows, writes
        self._cold = table.cold
        firsts = np.arange(self._cold.num_blocks + 1) * self._cold.rows_per_block
        self._bounds = [window.places(firsts) for window in windows]
        self._buffers = threading.local()
        self._count = threading.Lock()
        self.num_fetched = self.num_read = self.num_written = 0

    def run(self, blocks: Iterable[int]) -> None:
        """Go through blocks; again through those for whose rows the first time had left no room."""
        with ThreadPoolExecutor(SWEEPING_THREADS, thread_name_prefix="sweep") as threads:
            blocks = list(blocks)
            is_done = list(threads.map(self._exchange_rows, blocks))
            rest = [block for block, done in zip(blocks, is_done, strict=True) if not done]
            if not all(threads.map(self._exchange_rows, rest)):
                raise RuntimeError("a planned window does not fit into its slots")

    def _exchange_rows(self, block: int) -> bool:
        """Write rows of a block that leave, and fetch those that come; returns whether these found room."""
        with self._table._changes.at(block, writes=True):
            return self._exchange(block)

    def _exchange(self, block: int) -> bool:
        table, num_rows = self._table, self._cold.rows_per_block
        first = block * num_rows
        parts = [slice(bounds[block], bounds[block + 1]) for bounds in self._bounds]
        wanted = [window.rows[part] for window, part in zip(self._windows, parts, strict=True)]
        change = change_of(table._in_memory[block], wanted, first=first, num_rows=num_rows)
        leaving, slots = change.leaving
        is_written = self._writes and len(leaving) > 0
        buffer = self._buffer()
        if is_written or len(change.coming):
            self._cold.read(block, buffer)
        if is_written:
            copy_records(table._matrices, slots, buffer, leaving, to_block=True)
            self._cold.write(block, buffer)
            table._changes.take(block, table._changed_R.numpy(), change.leaving)
        table._free_slots(slots)
        taken = table._take_slots(len(change.coming))
        table._in_memory[block] = change.staying
        if taken is not None:
            copy_records(table._matrices, taken, buffer, change.coming, to_block=False)
            table._in_memory[block] = change.entered(taken)
            own_slots = [window.slots[part] for window, part in zip(self._windows, parts, strict=True)]
            write_slots(table._in_memory[block], wanted, own_slots, first=first, num_rows=num_rows)
        with self._count:
            self.num_read += is_written or len(change.coming) > 0
            self.num_written += is_written
            self.num_fetched += 0 if taken is None else len(taken)
        return taken is not None

    def _buffer(self) -> Block:
        if not hasattr(self._buffers, "block"):
            self._buffers.block = self._cold.new_buffer()
        block: Block = self._buffers.block
        return block


def _columns(tensors: dict[str, Tensor]) -> Sequence[tuple[Block, slice]]:
    """Return each tensor of rows as a matrix, with its columns in a record."""
    found, first = [], 0
    for tensor in tensors.values():
        values = tensor.numpy().reshape(len(tensor), -1)
        found.append((values, slice(first, first + values.shape[1])))
        first += values.shape[1]
    return found
