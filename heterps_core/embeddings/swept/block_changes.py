"""Rows in the blocks of a file that changed since the last checkpoint, and the order of access to a block.

A checkpoint takes the rows that are in memory at its step at once. Those on disk are read later, beside the training.
Until then a block that has some is written once: a row of it that has come into memory meanwhile can leave no earlier
than at the second time, so its record is still that of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from heterps_core.embeddings.swept.block_rows import InMemory, move_marks

Places = npt.NDArray[Any]


class BlockChanges:
    """Threads ask for blocks with `at`, and call the other methods for a block only within it, but `forget`.

    Rows are relative to the first one of their block, and ascend.

    Args:
        num_blocks: Of the file.
        rows_per_block: A multiple of 8.
    """

    def __init__(self, num_blocks: int, rows_per_block: int) -> None:
        self._num_blocks, self._rows_per_block = num_blocks, rows_per_block
        self._bits = np.zeros((num_blocks, rows_per_block // 8), dtype=np.uint8)
        """A bit for each row that has changed and left memory since the last checkpoint."""

        self._pending: dict[int, npt.NDArray[np.uint8]] = {}
        """By block the bits of rows on disk that a checkpoint has not read yet."""

        self._written: set[int] = set()
        """Pending blocks that were written since."""

        self._busy: set[int] = set()
        self._turn = threading.Condition()
        self._last_written = -1

    @contextmanager
    def at(self, block: int, *, writes: bool = False) -> Iterator[None]:
        """Have a block alone; before it is written a second time the checkpoint under way must have read it."""
        with self._turn:
            self._turn.wait_for(lambda: block not in self._busy and not (writes and block in self._written))
            self._busy.add(block)
            if writes:
                self._last_written = block
        try:
            yield
        finally:
            with self._turn:
                self._busy.remove(block)
                if writes and block in self._pending:
                    self._written.add(block)
                self._turn.notify_all()

    def take(self, block: int, is_changed: npt.NDArray[np.bool_], leaving: InMemory) -> None:
        """Take the marks of rows that leave memory, by slot, from those that have changed."""
        move_marks(is_changed, leaving, self._bits[block])

    def begin_checkpoint(self, block: int, in_memory: Places) -> Places:
        """Let a checkpoint have the changed rows of a block, and count its changes from here on.

        Args:
            in_memory: Rows that are not read from the file.

        Returns:
            Those of them that have changed and left memory in between.
        """
        bits = self._bits[block]
        if not bits.any():
            return np.empty(0, dtype=np.int64)
        changed = _rows_of(bits)
        is_there = np.isin(changed, in_memory, assume_unique=True)
        if not is_there.all():
            self._pending[block] = self._packed(changed[~is_there])
        bits.fill(0)
        return changed[is_there]

    def pending_blocks(self) -> list[int]:
        """Return the blocks that a checkpoint still has to read, those first that are written next."""
        blocks = np.array(sorted(self._pending), dtype=np.int64)
        next_one = int(np.searchsorted(blocks, self._last_written, side="right"))
        return [*blocks[next_one:].tolist(), *blocks[:next_one].tolist()]

    def pending(self, block: int) -> Places:
        """Return the rows of a block that a checkpoint still has to read."""
        return _rows_of(self._pending[block])

    def finish(self, block: int) -> None:
        """Let a block be written: what a checkpoint has of it is copied."""
        del self._pending[block]
        self._written.discard(block)

    def forget(self, *, pending_only: bool = False) -> None:
        """Forget what has changed; or let the checkpoint that is being made go without what it has not read."""
        with self._turn:
            self._pending.clear()
            self._written.clear()
            if not pending_only:
                self._bits.fill(0)
            self._turn.notify_all()

    def _packed(self, rows: Places) -> npt.NDArray[np.uint8]:
        is_in = np.zeros(self._rows_per_block, dtype=bool)
        is_in[rows] = True
        return np.packbits(is_in)


def _rows_of(bits: npt.NDArray[np.uint8]) -> Places:
    return np.flatnonzero(np.unpackbits(bits))
