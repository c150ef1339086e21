"""Lists of row indices, and copies of rows to and from blocks of a file: in C++ where it can be compiled, else NumPy.

Both give the same. Shapes: N rows that may repeat, U distinct ones, C slots of a table in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from heterps_core.data.features import NO_ID
from heterps_core.embeddings.row_kernels import compiled_functions

Rows = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

MOST_ROWS = 2**32
"""Rows of a table that the library can sort: an index and a position share eight bytes."""

LARGEST_INT32 = 2**31 - 1


class _Column(ctypes.Structure):
    _fields_ = (("values", c_void_p), ("width", c_int64))


def distinct_rows(rows: Indices, *, num_rows: int, allows_none: bool = False) -> tuple[Indices, Indices]:
    """Return the distinct rows [U], ascending, and the position in them of each row, in the shape of the rows.

    Args:
        rows: Indices, int64.
        num_rows: Of the table.
        allows_none: `NO_ID` is no row, and has the position `NO_ID`.

    Raises:
        IndexError: A row is not in 0..num_rows - 1; the message has it.
    """
    library = compiled_functions(_declare)
    if library is None or num_rows > MOST_ROWS or rows.size >= LARGEST_INT32:
        found, inverse = np.unique(rows, return_inverse=True)
        if allows_none and len(found) and found[0] == NO_ID:
            # What is no row comes first: without it other positions are one less, and its own is `NO_ID` again.
            found, inverse = found[1:], inverse - 1
        for row in found[:1].tolist() + found[-1:].tolist():
            _check_row(row, num_rows)
        return found, inverse.reshape(rows.shape)
    rows = np.ascontiguousarray(rows)
    found, inverse = np.empty(rows.size, dtype=np.int64), np.empty(rows.shape, dtype=np.int64)
    count = library.heterps_distinct(
        rows.ctypes.data, rows.size, num_rows, allows_none, found.ctypes.data, inverse.ctypes.data
    )
    if count < 0:
        _check_row(int(rows.reshape(-1)[-1 - count]), num_rows)
    return found[:count], inverse


def union_of(lists: Sequence[Rows] | Sequence[Indices]) -> Rows:
    """Return the distinct rows of some lists, ascending."""
    rows = np.concatenate([*lists, np.empty(0)], dtype=np.uint32, casting="unsafe")
    if len(lists) == 1 and _ascends(rows):
        return rows
    library = compiled_functions(_declare)
    if library is None:
        return np.unique(rows)
    found = np.empty_like(rows)
    # Rows of several batches are several times as many as distinct ones, which are kept for long.
    found.resize(library.heterps_union(rows.ctypes.data, len(rows), found.ctypes.data), refcheck=False)
    return found


def values_at(rows: Indices, *, listed: Rows, values: Slots) -> Indices:
    """Return the values of rows, found in a list that ascends and has a value for each; fast where the rows ascend.

    Raises:
        IndexError: A row is not in the list.
    """
    library = compiled_functions(_declare)
    if library is None:
        places = np.searchsorted(listed, rows)
        is_there = (
            bool((listed[np.minimum(places, len(listed) - 1)] == rows).all())
            if len(listed)
            else not rows.size
        )
        found = values[places].astype(np.int64) if is_there else np.empty(0, dtype=np.int64)
    else:
        rows, found = np.ascontiguousarray(rows), np.empty(len(rows), dtype=np.int64)
        is_there = library.heterps_look_up(
            listed.ctypes.data,
            values.ctypes.data,
            len(listed),
            rows.ctypes.data,
            len(rows),
            found.ctypes.data,
        )
    if not is_there:
        raise IndexError(f"of {len(rows)} rows some are not among the {len(listed)} of their window")
    return found


class RowSet:
    """A set of rows, as one bit for each row that there is.

    Args:
        parts: First row of each part of the table, then the number of its rows.
    """

    def __init__(self, parts: Indices) -> None:
        self._parts = np.ascontiguousarray(parts, dtype=np.int64)
        self._bits = np.zeros(-(-int(parts[-1]) // 8), dtype=np.uint8)

    def count_new(self, rows: Rows, *, adds: bool = False) -> Indices:
        """Return by part how many of some distinct, ascending rows are not in the set, and add them if asked to."""
        counts = np.zeros(len(self._parts) - 1, dtype=np.int64)
        library = compiled_functions(_declare)
        if library is not None:
            rows = np.ascontiguousarray(rows, dtype=np.uint32)
            library.heterps_count_new(
                self._bits.ctypes.data,
                rows.ctypes.data,
                len(rows),
                self._parts.ctypes.data,
                adds,
                counts.ctypes.data,
            )
            return counts
        bits = np.uint8(1) << (rows & 7).astype(np.uint8)
        new = rows[(self._bits[rows >> 3] & bits) == 0]
        if adds:
            np.bitwise_or.at(self._bits, rows >> 3, bits)
        return np.diff(np.searchsorted(new, self._parts))

    def clear(self) -> None:
        """Take all rows out."""
        self._bits.fill(0)


def copy_records(
    columns: Sequence[Values], slots: Slots, block: Values, places: Slots, *, to_block: bool
) -> None:
    """Copy rows between their slots in memory and their places in a block of records.

    Args:
        columns: Matrices [C, width], contiguous; a record has a row of each, side by side.
        slots: Of the rows in memory [U].
        block: Contiguous [rows, width of a record].
        places: Of the rows in the block [U].
        to_block: From memory to the block; else the other way.
    """
    library = compiled_functions(_declare)
    if library is None:
        first = 0
        for values in columns:
            own = slice(first, first + values.shape[1])
            if to_block:
                block[places, own] = values[slots]
            else:
                values[slots] = block[places, own]
            first = own.stop
        return
    described = (_Column * len(columns))(
        *(_Column(values.ctypes.data, values.shape[1]) for values in columns)
    )
    slots, places = (np.ascontiguousarray(each, dtype=np.int32) for each in (slots, places))
    library.heterps_copy_records(
        described,
        len(columns),
        slots.ctypes.data,
        places.ctypes.data,
        len(slots),
        block.ctypes.data,
        block.shape[1],
        to_block,
    )


def _check_row(row: int, num_rows: int) -> None:
    if not 0 <= row < num_rows:
        raise IndexError(f"rows must lie in 0..{num_rows - 1}, got {row}")


def _ascends(rows: Rows) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def _declare(library: ctypes.CDLL) -> None:
    library.heterps_distinct.argtypes = (c_void_p, *[c_int64] * 3, *[c_void_p] * 2)
    library.heterps_union.argtypes = (c_void_p, c_int64, c_void_p)
    library.heterps_count_new.argtypes = (*[c_void_p] * 2, c_int64, c_void_p, c_int64, c_void_p)
    library.heterps_count_new.restype = None
    library.heterps_look_up.argtypes = (*[c_void_p] * 2, c_int64, c_void_p, c_int64, c_void_p)
    library.heterps_copy_records.argtypes = (
        POINTER(_Column),
        c_int64,
        *[c_void_p] * 2,
        c_int64,
        c_void_p,
        *[c_int64] * 2,
    )
    library.heterps_copy_records.restype = None
    for function in (library.heterps_distinct, library.heterps_union, library.heterps_look_up):
        function.restype = c_int64
