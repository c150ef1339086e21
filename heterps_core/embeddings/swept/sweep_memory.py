"""Sweeps in numbers: how memory is divided among tables that are larger than it, and what sweeps have done."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction

from heterps_core.embeddings.swept.cold_rows import rows_per_block
from heterps_core.errors import ConfigurationError
from heterps_core.units import BYTES_PER_FLOAT32

INDEX_BYTES_PER_SLOT = 33
"""Row index and slot of what is in memory, and of the rows of seven windows, each three eighths of that or less (at
Zipf 1.05 with a third of the rows in memory); the list of free slots, and the mark of a row that has changed."""

BITS_PER_ROW = 4
"""For each row of the shard: whether a window has it and whether one of the last three has, whether it has changed
since the last checkpoint, and must be read for this checkpoint."""

NUM_PARTS = 4
"""A sweep takes as many windows, and memory holds the rows of one more: with more parts the file is swept less often,
with fewer a window has more batches to visit a part beside."""

SWEEPING_THREADS = 2
"""One block is read or written while rows are copied from or to another."""

MOST_BATCHES = 2 * NUM_PARTS
"""Batches whose rows are in memory at most where each window has one batch: those of `NUM_PARTS` + 1 windows, and in
parts that were visited earlier those of windows before them."""

_BUFFERED_BLOCKS = 5
"""A buffer of each thread with as much for what it copies, and one for checkpoints."""

PARTS_OF_MEMORY = 32
"""A checkpoint takes rows in parts of this share of the memory; two or three of them exist at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCounts:
    """Counts of the sweeps of a worker's tables in training."""

    rows_asked: int = 0
    """Distinct rows of each batch, summed over batches."""

    rows_fetched: int = 0
    """Rows among them that came from disk, once for all batches of a window."""

    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: SweepCounts) -> SweepCounts:
        return SweepCounts(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSize:
    """Sizes of a table shard that decide its share of the memory."""

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
        """Bytes of the whole shard in memory."""
        return self.num_rows * self.row_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory for blocks that are read and written."""
        return _BUFFERED_BLOCKS * rows_per_block(self.num_rows, self.width) * self.row_bytes

    @property
    def fixed_bytes(self) -> int:
        """Memory that sweeping takes beside the slots."""
        return self.buffer_bytes + self.num_rows * BITS_PER_ROW // 8

    @property
    def least_bytes(self) -> int:
        """Memory beside which it can have slots."""
        return min(self.fixed_bytes, self.whole_bytes)

    @property
    def slot_bytes(self) -> int:
        """Memory that a slot takes, with its share of what lists rows and of parts for checkpoints."""
        return self.row_bytes + 3 * self.row_bytes // PARTS_OF_MEMORY + INDEX_BYTES_PER_SLOT

    @property
    def batch_bytes(self) -> int:
        """Memory for the slots of a batch."""
        return self.most_rows * self.slot_bytes

    def num_slots(self, memory_bytes: int) -> int | None:
        """Return how many rows find room; None where all do, and nothing needs to be swept."""
        if memory_bytes >= self.whole_bytes:
            return None
        return (memory_bytes - self.fixed_bytes) // self.slot_bytes


def slots_by_table(shards: Mapping[str, ShardSize], memory_bytes: int) -> dict[str, int | None]:
    """Divide memory among the table shards of a worker, beyond what sweeps take by what a batch can look up.

    Returns:
        Slots by table; None for one that is in memory whole.

    Raises:
        ConfigurationError: Nothing is left for rows; the message has the memory that always suffices.
    """
    fixed = {name: shard.least_bytes for name, shard in shards.items()}
    left = memory_bytes - sum(fixed.values())
    if left <= 0:
        raise ConfigurationError(
            f"embedding_memory_bytes must hold the buffers of sweeps and rows of {MOST_BATCHES} batches on each "
            f"worker, at most {memory_of_batches(shards.values(), MOST_BATCHES):,} bytes for {', '.join(shards)}, "
            f"got {memory_bytes:,}; raise it to that, or use smaller batches or more replicas"
        )
    weights = {name: shard.batch_bytes for name, shard in shards.items()}
    missing = {name: shard.whole_bytes - fixed[name] for name, shard in shards.items()}
    found: dict[str, int | None] = {}
    # Those that need least beside their weight come first: what they leave is for the others.
    for name in sorted(shards, key=lambda name: missing[name] / max(weights[name], 1)):
        total = sum(weights[other] for other in shards if other not in found)
        more = min(left * weights[name] // max(total, 1), missing[name])
        left -= more
        found[name] = shards[name].num_slots(fixed[name] + more)
    return found


def memory_of_batches(shards: Collection[ShardSize], num_batches: Fraction | int) -> int:
    """Return the memory of which `slots_by_table` gives each table the rows of some batches, or all its rows.

    Args:
        num_batches: None of which has a row of another.
    """
    least_bytes = sum(shard.least_bytes for shard in shards)
    batch_bytes = sum(shard.batch_bytes for shard in shards)
    return min(sum(shard.whole_bytes for shard in shards), least_bytes + math.ceil(num_batches * batch_bytes))
