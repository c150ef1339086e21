"""Which rows are of one request: candidates that were shown together, with the same user and history.

Shapes: Q requests of the source, n rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterps_core.data.epoch_order import Int64Array

LEFT_OUT, WHOLE, DRAWN = 0, 1, 2
"""Of a request: not trained on; trained on as any; in the place of others without a click."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a prepared data set."""

    source_starts: Int64Array
    """First row of each request, then the number of rows, of all rows of the source [Q + 1]."""

    kinds: npt.NDArray[np.uint8]
    """One of `LEFT_OUT`, `WHOLE` and `DRAWN` for each [Q]."""

    @property
    def starts(self) -> Int64Array:
        """First row of each request that is kept, then the number of rows, as the rows that are kept are numbered."""
        sizes = np.diff(self.source_starts)[self.kinds != LEFT_OUT]
        return np.cumsum([0, *sizes], dtype=np.int64)

    def kinds_of_rows(self, first: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the kinds of the requests of rows first..stop - 1 of the source."""
        return self.kinds[np.searchsorted(self.source_starts, np.arange(first, stop), side="right") - 1]


def start_before(starts: Int64Array, row: int) -> int:
    """Return the first row of the request that a row is of; of the first request the row after its last.

    Example:
        >>> start_before(np.array([0, 4, 6, 9]), 8), start_before(np.array([0, 4, 6, 9]), 2)
        (6, 4)
    """
    place = int(np.searchsorted(starts, row, side="right")) - 1
    return int(starts[max(place, 1)])


def is_same_request(starts: Int64Array, rows: Int64Array) -> Bools:
    """Return for each of some rows [n] whether the row before it among them is of the same request."""
    numbers = np.searchsorted(starts, rows, side="right")
    is_same: Bools = np.diff(numbers, prepend=-1) == 0
    return is_same


def kinds_of_requests(
    starts: Int64Array, is_click: Bools, is_drawn: Bools, *, num_train_rows: int
) -> npt.NDArray[np.uint8]:
    """Return the kind of each request [Q]: all with a click and all that are held out stay, and others if drawn.

    Args:
        is_click: Of the training rows of the source.
        is_drawn: Of each request [Q], which have a share of the training's requests without a click.
    """
    kinds = np.where(is_drawn, DRAWN, LEFT_OUT).astype(np.uint8)
    of_training = starts[:-1] < num_train_rows
    has_click = np.zeros(len(kinds), dtype=bool)
    has_click[of_training] = np.logical_or.reduceat(is_click, starts[:-1][of_training])
    kinds[has_click | ~of_training] = WHOLE
    return kinds
