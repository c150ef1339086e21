"""Windows of consecutive batches whose rows lie in memory together, and how the memory is divided.

A window ends where the rows of it and of its neighbours would need more slots than there are. Shapes: U distinct rows
of a batch or window, C slots of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from heterps_core.embeddings.cold_rows import rows_per_block
from heterps_core.errors import ConfigurationError
from heterps_core.units import BYTES_PER_FLOAT32

Rows = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.int32]

LARGEST_ROW = 2**32 - 1
"""No shard has it: 4 bytes in place of 8 for each row of a window."""

INDEX_BYTES_PER_SLOT = 24
"""Row index and slot of the rows of three windows, each somewhat more than half the slots, the row indices of a
fourth, and what sorting them takes."""

BITS_PER_ROW = 2
"""Of a shard: whether the window that is planned, and the one before it, have the row."""

SWEEPING_THREADS = 2
"""One block is read or written while rows are copied from or to another."""

BUFFERED_BLOCKS = 5
"""A buffer of each thread with as much for what it copies, and one for checkpoints."""

PARTS_OF_MEMORY = 32
"""A checkpoint takes rows in parts of this share of the memory; two or three of them exist at a time."""


def _no_slots() -> Slots:
    return np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class RowWindow:
    """The distinct rows of a window."""

    rows: Rows = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    """Ascending [U], relative to the first row of the shard."""

    slots: Slots = field(default_factory=_no_slots)
    """Where each lies in memory [U], once a sweep has brought them there."""

    num_asked: int = 0
    """Sum over the batches of their distinct rows."""

    def slots_of(self, rows: npt.NDArray[np.int64]) -> Slots:
        """Return the slots of rows that are all in the window."""
        found: Slots = self.slots[self.places(rows)]
        return found

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Return how many rows of the window come before each of some rows, which must ascend to be found fast."""
        return np.searchsorted(self.rows, np.minimum(rows, LARGEST_ROW).astype(np.uint32))


class WindowPlan:
    """Cuts batches into windows, one table's part of it.

    In a sweep the rows of a window and of the one before it lie in memory. It must also be possible that the next
    window has a single batch with nothing but new rows, so a window keeps room for one.

    Args:
        num_rows: Of the shard.
        num_slots: Rows that memory has room for (C), at least twice `most_rows`.
        most_rows: Distinct rows of the shard that one batch can look up.
    """

    def __init__(self, *, num_rows: int, num_slots: int, most_rows: int) -> None:
        self._num_slots, self._most_rows = num_slots, most_rows
        self._is_in_window = _RowSet(num_rows)
        self._is_in_last = _RowSet(num_rows)
        self._last_size = 0
        self._start()

    def _start(self) -> None:
        self._parts: list[Rows] = []
        self._size = self._num_new = self._num_asked = 0

    def fits(self, rows_U: npt.NDArray[np.int64]) -> bool:
        """Tell whether the window has room for a batch with these distinct rows; the first always finds it."""
        more = rows_U[~self._is_in_window.has(rows_U)]
        size = self._size + len(more)
        num_new = self._num_new + len(more) - int(np.count_nonzero(self._is_in_last.has(more)))
        # The next window is expected to have as many new rows as this one.
        return (
            size + self._most_rows <= self._num_slots
            and max(size, self._last_size) + num_new <= self._num_slots
        )

    def add(self, rows_U: npt.NDArray[np.int64]) -> None:
        """Take a batch with these distinct rows, ascending, into the window."""
        more = rows_U[~self._is_in_window.has(rows_U)]
        self._num_new += len(more) - int(np.count_nonzero(self._is_in_last.has(more)))
        self._is_in_window.add(more)
        self._parts.append(more.astype(np.uint32))
        self._size += len(more)
        self._num_asked += len(rows_U)

    def end_window(self) -> RowWindow:
        """Return the window, and begin the next."""
        rows = np.concatenate(self._parts)
        rows.sort()
        window = RowWindow(rows, num_asked=self._num_asked)
        self._last_size = self._size
        self._is_in_last, self._is_in_window = self._is_in_window, self._is_in_last
        self._is_in_window.clear()
        self._start()
        return window


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
        return buffered + self.num_rows * BITS_PER_ROW // 8

    @property
    def slot_bytes(self) -> int:
        """Memory that a slot takes, with its share of what lists rows and of parts for checkpoints."""
        return self.row_bytes + 3 * self.row_bytes // PARTS_OF_MEMORY + INDEX_BYTES_PER_SLOT

    @property
    def least_bytes(self) -> int:
        """Least memory to train it in: whole, or the rows of two batches and what sweeping takes."""
        return min(self.whole_bytes, self.fixed_bytes + 2 * self.most_rows * self.slot_bytes)

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
        ConfigurationError: Not even two batches fit; the message has the memory that they need.
    """
    left = memory_bytes - sum(shard.least_bytes for shard in shards.values())
    if left < 0:
        raise ConfigurationError(
            f"embedding_memory_bytes must hold the rows of two batches on each worker, here "
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
