"""Rows of a block of a file that enter or leave memory for some windows: in C++, else by NumPy.

Both give the same. Rows ascend; they are relative to the first one of the block, those of windows to that of the
shard. Each row in memory has a slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterps_core.embeddings.row_kernels import compiled_functions
from heterps_core.embeddings.row_lists import Rows, Slots

InMemory = tuple[Slots, Slots]
"""Rows of a block and their slots."""

NOTHING: InMemory = (np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class _BlockChange:
    """Effect of the windows of a visit on a block."""

    staying: InMemory
    leaving: InMemory
    coming: Slots
    """Rows that are not in memory yet."""

    def entered(self, taken: Slots) -> InMemory:
        """Return what is in memory once the coming rows have their slots."""
        rows = np.concatenate([self.staying[0], self.coming])
        order = np.argsort(rows, kind="stable")
        return rows[order], np.concatenate([self.staying[1], taken])[order]


class _Lists(ctypes.Structure):
    _fields_ = (("rows", POINTER(c_void_p)), ("lengths", POINTER(c_int64)), ("count", c_int64))


def change_of(in_memory: InMemory, windows: Sequence[Rows], *, first: int, num_rows: int) -> _BlockChange:
    """Return which rows of a block stay, leave and come so that those of the windows are in memory.

    Args:
        in_memory: Before.
        windows: Rows of each window that are in the block.
        first: Row of the shard with which the block begins.
        num_rows: Of the block.
    """
    library = compiled_functions(_declare)
    rows, slots = in_memory
    if library is None:
        is_wanted = np.zeros(num_rows, dtype=bool)
        for own in windows:
            is_wanted[own.astype(np.int64) - first] = True
        stays = is_wanted[rows]
        is_wanted[rows] = False
        coming = np.flatnonzero(is_wanted).astype(np.int32)
        return _BlockChange((rows[stays], slots[stays]), (rows[~stays], slots[~stays]), coming)
    # One more: both are written before it is known which of them counts.
    made = [np.empty(len(rows) + 1, dtype=np.int32) for _ in range(4)]
    coming = np.empty(sum(map(len, windows)), dtype=np.int32)
    counts = np.empty(3, dtype=np.int64)
    library.heterps_change_block(
        rows.ctypes.data,
        slots.ctypes.data,
        len(rows),
        byref(_described(windows)),
        first,
        num_rows,
        *(own.ctypes.data for own in made),
        coming.ctypes.data,
        counts.ctypes.data,
    )
    num_staying, num_leaving, num_coming = counts.tolist()
    staying, leaving = (made[0], made[1]), (made[2], made[3])
    return _BlockChange(
        (staying[0][:num_staying], staying[1][:num_staying]),
        (leaving[0][:num_leaving], leaving[1][:num_leaving]),
        coming[:num_coming],
    )


def write_slots(
    in_memory: InMemory, windows: Sequence[Rows], slots: Sequence[Slots], *, first: int, num_rows: int
) -> None:
    """Write the slot of each row of the windows, all of which are in memory.

    Args:
        in_memory: Rows of the block.
        windows: As in `change_of`.
        slots: Where to write, by window; contiguous.
        first: As in `change_of`.
        num_rows: Of the block.
    """
    library = compiled_functions(_declare)
    if library is None:
        slot_of_row = np.empty(num_rows, dtype=np.int32)
        slot_of_row[in_memory[0]] = in_memory[1]
        for own, found in zip(windows, slots, strict=True):
            found[:] = slot_of_row[own.astype(np.int64) - first]
        return
    library.heterps_slots_in_block(
        in_memory[0].ctypes.data,
        in_memory[1].ctypes.data,
        len(in_memory[0]),
        byref(_described(windows)),
        first,
        num_rows,
        (c_void_p * len(slots))(*(own.ctypes.data for own in slots)),
    )


def move_marks(is_changed: npt.NDArray[np.bool_], leaving: InMemory, bits: npt.NDArray[np.uint8]) -> None:
    """Move the marks of slots that have changed to bits of their rows, in the order of `np.packbits`.

    Args:
        is_changed: By slot; the marks of leaving rows are False afterwards.
        leaving: Rows that leave memory.
        bits: Of the block, a bit for each row.
    """
    rows, slots = leaving
    library = compiled_functions(_declare)
    if library is None:
        is_row = np.zeros(8 * len(bits), dtype=bool)
        is_row[rows[is_changed[slots]]] = True
        bits |= np.packbits(is_row)
        is_changed[slots] = False
        return
    library.heterps_move_marks(
        is_changed.ctypes.data, rows.ctypes.data, slots.ctypes.data, len(rows), bits.ctypes.data
    )


def _described(windows: Sequence[Rows]) -> _Lists:
    return _Lists(
        (c_void_p * len(windows))(*(own.ctypes.data for own in windows)),
        (c_int64 * len(windows))(*map(len, windows)),
        len(windows),
    )


def _declare(library: ctypes.CDLL) -> None:
    in_memory, block = (c_void_p, c_void_p, c_int64), (c_int64, c_int64)
    library.heterps_change_block.argtypes = (*in_memory, POINTER(_Lists), *block, *[c_void_p] * 6)
    library.heterps_slots_in_block.argtypes = (*in_memory, POINTER(_Lists), *block, c_void_p)
    library.heterps_move_marks.argtypes = (*[c_void_p] * 3, c_int64, c_void_p)
    for function in (
        library.heterps_change_block,
        library.heterps_slots_in_block,
        library.heterps_move_marks,
    ):
        function.restype = None
