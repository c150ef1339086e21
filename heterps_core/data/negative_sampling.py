"""Which rows without a click are left out of training: a keyed hash of a row's place in the source says so.

So each reader of a row group leaves out the same rows, and only how many stay of each has to be known to number them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heterps_core.data.hashing import mix

_KEY = np.uint64(0x6E65676174697665)
_HASHES = 2.0**64


def rows_to_keep(
    labels: npt.NDArray[np.uint8], *, first: int, num_train_rows: int, negative_share: float
) -> npt.NDArray[np.bool_]:
    """Return which rows of a part of the source are kept [n]: clicks, held-out rows, and a share of the others.

    Labels [n] are 1 for a click; `first` is the place of the first row in the source, whose rows from
    `num_train_rows` on are held out. The share lies in (0, 1].

    Example:
        >>> labels = np.zeros(10_000, dtype=np.uint8)
        >>> int(rows_to_keep(labels, first=0, num_train_rows=10_000, negative_share=0.25).sum())
        2426
    """
    places = np.arange(first, first + len(labels), dtype=np.uint64)
    is_held_out = places >= np.uint64(num_train_rows)
    kept: npt.NDArray[np.bool_] = (labels == 1) | is_held_out | are_drawn(places, negative_share)
    return kept


def are_drawn(places: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Return which places [n] of the source are in a share that a hash draws; of a request the first row's."""
    drawn: npt.NDArray[np.bool_] = mix(places ^ _KEY) < share * _HASHES
    return drawn
