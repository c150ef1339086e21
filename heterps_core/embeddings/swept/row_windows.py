"""Windows of consecutive batches whose rows are in memory in time.

Shapes: U distinct rows of a batch or window, C slots of a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from heterps_core.embeddings.row_lists import Indices, Rows, RowSet, Slots, union_of, values_at
from heterps_core.embeddings.swept.sweep_memory import MOST_BATCHES, NUM_PARTS

BATCHES_AHEAD = MOST_BATCHES - 1
"""After so many windows memory holds nothing of one any more."""

_LARGEST_ROW = 2**32 - 1
"""No shard has it: 4 bytes in place of 8 for each row of a window."""


class RowWindow:
    """The distinct rows of a window.

    Args:
        rows: Ascending [U], relative to the first row of the shard; none by default.
        num_asked: Sum over the batches of their distinct rows.

    Attributes:
        slots: Where each lies in memory [U], once a sweep has brought it there.
    """

    def __init__(self, rows: Rows | None = None, *, num_asked: int = 0) -> None:
        self.rows = union_of([]) if rows is None else rows
        self.num_asked = num_asked
        self.slots: Slots = np.empty(len(self.rows), dtype=np.int32)

    def slots_of(self, rows: Indices) -> Indices:
        """Return the slots of rows that are all in the window; fast where the rows ascend."""
        return values_at(rows, listed=self.rows, values=self.slots)

    def places(self, rows: Indices) -> npt.NDArray[np.intp]:
        """Return how many rows of the window come before each of some rows."""
        return np.searchsorted(self.rows, np.minimum(rows, _LARGEST_ROW).astype(np.uint32))


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
        self.num_slots, self._num_parts = num_slots, len(parts) - 1
        self._seen, self._staying = RowSet(parts), RowSet(parts)
        """Rows of the last windows and of this one; the same without the first of them, as the next window begins."""

        self._last: deque[Rows] = deque(maxlen=NUM_PARTS)
        self._sizes: deque[Indices] = deque(maxlen=NUM_PARTS - 1)
        """By part what it held if its visit was for one of the windows that ended last."""

        self._start()

    def _start(self) -> None:
        self._batches: list[Rows] = []
        self._size, self._staying_size = np.zeros((2, self._num_parts), dtype=np.int64)
        self._seen.clear()
        self._staying.clear()
        for index, rows_U in enumerate(self._last):
            self._size += self._seen.count_new(rows_U, adds=True)
            if len(self._last) - index < NUM_PARTS:
                self._staying_size += self._staying.count_new(rows_U, adds=True)

    def fits(self, rows_U: Rows, following: Sequence[Rows] = ()) -> bool:
        """Tell whether the window has room for a batch with these distinct rows, ascending.

        A window without a batch would stop the training, so one of several leaves room for the next `BATCHES_AHEAD`:
        where each of these needs a window of its own, this one does not count any more after the last of them.
        So memory is too small only where it does not suffice for windows of one batch.

        Args:
            following: Distinct rows of each of the next batches.
        """
        slots = self.slots_with(rows_U)
        if self._batches and slots + sum(map(len, following)) > self.num_slots:
            # No more than what the next window would have with all of them.
            new = [self._staying.count_new(rows) for rows in (rows_U, *following)]
            sizes = [self._size + self._seen.count_new(rows_U), *list(self._sizes)[-2:]]
            slots = max(slots, int(np.max([self._staying_size + np.sum(new, axis=0), *sizes], axis=0).sum()))
        return slots <= self.num_slots

    def slots_with(self, rows_U: Rows) -> int:
        """Return the slots that memory must have for the window with one more batch."""
        size = self._size + self._seen.count_new(rows_U)
        return int(np.max([size, *self._sizes], axis=0).sum())

    def add(self, rows_U: Rows) -> None:
        """Take a batch with these distinct rows, ascending, into the window."""
        self._size += self._seen.count_new(rows_U, adds=True)
        self._staying_size += self._staying.count_new(rows_U, adds=True)
        self._batches.append(rows_U)

    def end_window(self) -> RowWindow:
        """Return the window, which may be empty, and begin the next."""
        window = RowWindow(union_of(self._batches), num_asked=sum(map(len, self._batches)))
        self._last.append(window.rows)
        self._sizes.append(self._size)
        self._start()
        return window


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
