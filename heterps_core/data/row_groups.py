"""The row groups of a prepared data set: where each lies, and its rows; those in use stay in memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from heterps_core.data.epoch_order import Int64Array
from heterps_core.data.manifest import DatasetManifest, Folder
from heterps_core.data.reading.parquet_reader import open_parquet, read_group, read_group_labels
from heterps_core.data.reading.row_batch import RowBatch
from heterps_core.errors import DataError

STARTS_NAME = "row_groups.npy"
"""First row of each row group, then the number of rows, [G + 1] int64."""

_OPEN_FILES = 64


def parquet_name(index: int) -> str:
    """Return the name of a file of a prepared data set: of its own, or a link to one of the source."""
    return f"rows-{index:05d}.parquet"


class RowGroups:
    """Reads row groups by their number over all files.

    Attributes:
        starts: First row of each row group, then the number of rows [G + 1].

    Args:
        where: The folder, for messages.
    """

    def __init__(self, folder: Folder, manifest: DatasetManifest, *, where: object) -> None:
        self._folder, self._where, self._schema = folder, where, manifest.schema
        self._ends = np.cumsum(manifest.file_groups)
        path = f"{where}/{STARTS_NAME}"
        try:
            with folder(STARTS_NAME) as file:
                self.starts: Int64Array = np.load(io.BytesIO(file.read()))
        except (OSError, ValueError) as error:
            raise DataError(path, f"cannot be read: {error}; prepare the dataset again") from error
        if (len(self.starts) - 1, self.starts[-1]) != (self._ends[-1], manifest.num_rows):
            raise DataError(
                path,
                f"must list the {self._ends[-1]} row groups and {manifest.num_rows} rows of the manifest, got "
                f"{len(self.starts) - 1} and {self.starts[-1]}; prepare the dataset again",
            )
        self._open: Callable[[int], pq.ParquetFile] = lru_cache(_OPEN_FILES)(self._open_file)
        if len(self._ends) <= _OPEN_FILES:
            # Now, so that files that are replaced later are still read as they were.
            for number in range(len(self._ends)):
                self._open(number)

    def read(self, group: int) -> RowBatch:
        """Return the rows of a row group.

        Raises:
            DataError: It is damaged, a row breaks the schema, or the file is another one than was prepared.
        """
        file, index = self._place(group)
        return read_group(self._open(file), index, self._schema, path=self._path(file))

    def read_labels(self, group: int) -> npt.NDArray[np.uint8]:
        """Return the labels of a row group, without reading its features; raises as `read`."""
        file, index = self._place(group)
        return read_group_labels(self._open(file), index, self._schema, path=self._path(file))

    def between(self, first: int, stop: int) -> range:
        """Return the row groups that hold rows first..stop - 1."""
        if first >= stop:
            return range(0)
        low, high = np.searchsorted(self.starts, [first, stop - 1], side="right") - 1
        return range(int(low), int(high) + 1)

    def _place(self, group: int) -> tuple[int, int]:
        """Return the file of a row group and its number there."""
        file = int(np.searchsorted(self._ends, group, side="right"))
        return file, group - self._first_group(file)

    def _first_group(self, file: int) -> int:
        return int(self._ends[file - 1]) if file else 0

    def _path(self, file: int) -> str:
        return f"{self._where}/{parquet_name(file)}"

    def _open_file(self, number: int) -> pq.ParquetFile:
        path = self._path(number)
        try:
            source = self._folder(parquet_name(number))
        except OSError as error:
            raise DataError(path, f"cannot be read: {error}; prepare the dataset again") from error
        file = open_parquet(path, self._schema, source=source)
        known = np.diff(self.starts[self._first_group(number) : int(self._ends[number]) + 1]).tolist()
        found = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        if known != found:
            raise DataError(
                path,
                f"must hold the rows that the dataset was prepared from, {sum(known)} in {len(known)} row groups, "
                f"but has {sum(found)} in {len(found)}; prepare the dataset again",
            )
        return file


class RowBuffer:
    """Row groups that batches are gathered from: those of the last batch stay, as the next one needs most of them.

    Args:
        starts: First row of each row group, then the number of rows [G + 1].
        read: Returns arrays of the rows of a row group, each [n, ...].
    """

    def __init__(self, starts: Int64Array, read: Callable[[int], tuple[npt.NDArray[Any], ...]]) -> None:
        self._starts, self._read = starts, read
        self._slot_rows = int(np.diff(starts).max())
        self._slots: dict[int, int] = {}
        self._arrays: tuple[npt.NDArray[Any], ...] = ()
        self._num_slots = 0

    def gather(self, rows: Int64Array) -> tuple[npt.NDArray[Any], ...]:
        """Return each array's rows [n, ...] by their indices [n], in that order."""
        group = np.searchsorted(self._starts, rows, side="right") - 1
        needed, number = np.unique(group, return_inverse=True)
        self._hold(needed.tolist())
        slot = np.array([self._slots[each] for each in needed.tolist()], dtype=np.int64)
        places = slot[number] * self._slot_rows + rows - self._starts[group]
        return tuple(array.take(places, axis=0) for array in self._arrays)

    def _hold(self, needed: list[int]) -> None:
        """Read the row groups that are not held, in place of those that are not needed any more."""
        wanted = set(needed)
        self._slots = {group: slot for group, slot in self._slots.items() if group in wanted}
        missing = [group for group in needed if group not in self._slots]
        free = sorted(set(range(self._num_slots)) - set(self._slots.values()), reverse=True)
        for group in missing:
            arrays = self._read(group)
            if not free:
                free = self._grow(len(needed), arrays)
            slot = free.pop()
            first = slot * self._slot_rows
            for held, array in zip(self._arrays, arrays, strict=True):
                held[first : first + len(array)] = array
            self._slots[group] = slot

    def _grow(self, num_slots: int, like: tuple[npt.NDArray[Any], ...]) -> list[int]:
        """Make room for so many row groups and a few more; returns the new slots, the first one last."""
        before, self._num_slots = self._num_slots, num_slots + num_slots // 8
        grown = tuple(
            np.empty((self._num_slots * self._slot_rows, *array.shape[1:]), dtype=array.dtype)
            for array in like
        )
        for new, old in zip(grown, self._arrays, strict=False):
            new[: len(old)] = old
        self._arrays = grown
        return list(range(self._num_slots - 1, before - 1, -1))
