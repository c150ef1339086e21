"""Windows of consecutive batches whose rows are in memory in time, and how the memory is divided.

Shapes: U distinct rows of a batch or window, C slots of a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterps_core.embeddings.cold_rows import rows_per_block
from heterps_core.errors import ConfigurationError
from heterps_core.units import BYTES_PER_FLOAT32

Rows = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.int64]

LARGEST_ROW = 2**32 - 1
"""No shard has it: 4 bytes in place of 8 for each row of a window."""

INDEX_BYTES_PER_SLOT = 24
"""Row index and slot of what is in memory, and of the rows of six windows, each a third of that or less."""

NUM_PARTS = 4
"""A sweep takes as many windows, and memory holds the rows of one more: with more parts the file is swept less often,
with fewer a window has more batches to visit a part beside."""

SWEEPING_THREADS = 2
"""One block is read or written while rows are copied from or to another."""

BUFFERED_BLOCKS = 5
"""A buffer of each thread with as much for what it copies, and one for checkpoints."""

PARTS_OF_MEMORY = 32
"""A checkpoint takes rows in parts of this share of the memory; two or three of them exist at a time."""


def _no_rows() -> Rows:
    return np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCounts:
    """What sweeps of a worker's tables have done in training."""

    rows_asked: int = 0
    """Distinct rows of each batch, summed over batches."""

    rows_fetched: int = 0
    """Of these, rows that came from disk, once for all batches of a window."""

    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: SweepCounts) -> SweepCounts:
        return SweepCounts(
            rows_asked=self.rows_asked + other.rows_asked,
            rows_fetched=self.rows_fetched + other.rows_fetched,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
        )


class RowWindow:
    """The distinct rows of a window.

    Args:
        rows: Ascending [U], relative to the first row of the shard; none by default.
        num_asked: Sum over the batches of their distinct rows.

    Attributes:
        slots: Where each lies in memory [U], once a sweep has brought it there.
    """

    def __init__(self, rows: Rows | None = None, *, num_asked: int = 0) -> None:
        self.rows = _no_rows() if rows is None else rows
        self.num_asked = num_asked
        self.slots: Slots = np.empty(len(self.rows), dtype=np.int32)

    def slots_of(self, rows: npt.NDArray[np.int64]) -> Slots:
        """Return the slots of rows that are all in the window."""
        found: Slots = self.slots[self.places(rows)]
        return found

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Return how many rows of the window come before each of some rows, which must ascend to be found fast."""
        return np.searchsorted(self.rows, np.minimum(rows, LARGEST_ROW).astype(np.uint32))


class WindowPlan:
    """Cuts batches into windows, one table's part of it.

    While a window is trained one of `NUM_PARTS` parts of the shard is visited: the rows of the part that this window
    or the next `NUM_PARTS` have are in memory then, until the part is visited again. So each part holds the rows of
    `NUM_PARTS` + 1 windows, which may be other ones than those of its neighbour; the largest of each are counted.

    Args:
        parts: First row of each part, then the number of rows of the shard.
        num_slots: Rows that memory has room for (C).
    """

    def __init__(self, parts: npt.NDArray[np.int64], num_slots: int) -> None:
        self._parts, self._num_slots = parts, num_slots
        self._seen = _RowSet(int(parts[-1]))
        """Rows of the last windows and of this one."""

        self._last: deque[Rows] = deque(maxlen=NUM_PARTS)
        self._sizes: deque[Sizes] = deque(maxlen=NUM_PARTS - 1)
        """By part what it held if its visit was for one of the windows that ended last."""

        self._start()

    def _start(self) -> None:
        self._batches: list[Rows] = []
        self._size = np.zeros(len(self._parts) - 1, dtype=np.int64)
        self._seen.clear()
        for rows in self._last:
            self._see(rows.astype(np.int64))

    def fits(self, rows_U: npt.NDArray[np.int64]) -> bool:
        """Tell whether the window has room for a batch with these distinct rows.

        Any batch finds room in a window that comes after enough empty ones.
        """
        size = self._size + self._by_part(rows_U[~self._seen.has(rows_U)])
        return int(np.max([size, *self._sizes], axis=0).sum()) <= self._num_slots

    def add(self, rows_U: npt.NDArray[np.int64]) -> None:
        """Take a batch with these distinct rows, ascending, into the window."""
        self._see(rows_U)
        self._batches.append(rows_U.astype(np.uint32))

    def end_window(self) -> RowWindow:
        """Return the window, which may be empty, and begin the next."""
        rows = np.unique(np.concatenate(self._batches)) if self._batches else _no_rows()
        window = RowWindow(rows, num_asked=sum(map(len, self._batches)))
        self._last.append(rows)
        self._sizes.append(self._size)
        self._start()
        return window

    def _see(self, rows: npt.NDArray[np.int64]) -> None:
        more = rows[~self._seen.has(rows)]
        self._seen.add(more)
        self._size = self._size + self._by_part(more)

    def _by_part(self, rows: npt.NDArray[np.int64]) -> Sizes:
        """Return how many of some ascending rows each part has."""
        return np.diff(np.searchsorted(rows, self._parts))


class WindowLength:
    """How many batches a window has: more until one fills the memory, then as many as the last had on average.

    Windows of one length leave each visit the same time.
    """

    def __init__(self) -> None:
        self.most_batches = 1
        self._lengths: deque[int] = deque(maxlen=NUM_PARTS + 1)
        self._has_been_full = False
        self._num_since_full = 0

    def end_window(self, num_batches: int, *, is_full: bool) -> None:
        """Take in how many batches a window has, and whether it has no more because they would not fit."""
        self._lengths.append(num_batches)
        if is_full:
            self._has_been_full, self._num_since_full = True, 0
            self.most_batches = max(1, sum(self._lengths) // len(self._lengths))
        elif not self._has_been_full:
            self.most_batches += max(1, self.most_batches // 2)
        else:
            self._num_since_full += 1
            self.most_batches += self._num_since_full % (NUM_PARTS + 1) == 0


class _RowSet:
    """A set of rows, as one bit for each row that there is."""

    def __init__(self, num_rows: int) -> None:
        self._bits = np.zeros(-(-num_rows // 8), dtype=np.uint8)

    def has(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self._bits[rows >> 3] >> (rows & 7).astype(np.uint8) & 1).astype(bool)
        return found

    def add(self, rows: npt.NDArray[np.int64]) -> None:
        """Take in rows in ascending order."""
        if len(rows):
            places = rows >> 3
            firsts = np.flatnonzero(np.diff(places, prepend=-1))
            bits = np.uint8(1) << (rows & 7).astype(np.uint8)
            self._bits[places[firsts]] |= np.bitwise_or.reduceat(bits, firsts)

    def clear(self) -> None:
        self._bits.fill(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSize:
    """What decides how much memory a table shard gets."""

    num_rows: int
    width: int
    """Float32 of a row with its optimizer state."""

    most_rows: int
    """Distinct rows of the shard that one batch can look up."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * BYTES_PER_FLOAT32

    @property
    def whole_bytes(self) -> int:
        """Of the shard in memory."""
        return self.num_rows * self.row_bytes

    @property
    def fixed_bytes(self) -> int:
        """Memory that sweeping takes beside the slots."""
        buffered = BUFFERED_BLOCKS * rows_per_block(self.width) * self.row_bytes
        return buffered + self.num_rows // 8

    @property
    def slot_bytes(self) -> int:
        """Memory that a slot takes, with its share of what lists rows and of parts for checkpoints."""
        return self.row_bytes + 3 * self.row_bytes // PARTS_OF_MEMORY + INDEX_BYTES_PER_SLOT

    @property
    def least_bytes(self) -> int:
        """Least memory to train it in: whole, or the rows of one batch and what sweeping takes."""
        return min(self.whole_bytes, self.fixed_bytes + self.most_rows * self.slot_bytes)

    def num_slots(self, memory_bytes: int) -> int | None:
        """Return how many rows find room; None where all do, and nothing needs to be swept."""
        if memory_bytes >= self.whole_bytes:
            return None
        return (memory_bytes - self.fixed_bytes) // self.slot_bytes


def slots_by_table(shards: Mapping[str, ShardSize], memory_bytes: int) -> dict[str, int | None]:
    """Divide memory among the table shards of a worker, beyond the least of each by the bytes that a batch can touch.

    Returns:
        Slots by table; None for one that is in memory whole.

    Raises:
        ConfigurationError: Not even one batch fits; the message has the memory that it needs.
    """
    left = memory_bytes - sum(shard.least_bytes for shard in shards.values())
    if left < 0:
        raise ConfigurationError(
            f"embedding_memory_bytes must hold the rows of a batch on each worker, here "
            f"{memory_bytes - left:,} bytes for {', '.join(shards)}, got {memory_bytes:,}; raise it to that, or use "
            f"smaller batches or more replicas"
        )
    weights = {name: shard.most_rows * shard.row_bytes for name, shard in shards.items()}
    missing = {name: shard.whole_bytes - shard.least_bytes for name, shard in shards.items()}
    found: dict[str, int | None] = {}
    # Those that need least beside their weight come first: what they leave is for the others.
    for name in sorted(shards, key=lambda name: missing[name] / max(weights[name], 1)):
        total = sum(weights[other] for other in shards if other not in found)
        more = min(left * weights[name] // max(total, 1), missing[name])
        left -= more
        found[name] = shards[name].num_slots(shards[name].least_bytes + more)
    return found
