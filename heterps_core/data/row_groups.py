"""The row groups of a prepared data set: where each lies, and its rows; those in use stay in memory."""

from __future__ import annotations

import io
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.epoch_order import Int64Array
from heterps_core.data.history.event_join import EventJoin
from heterps_core.data.manifest import DatasetManifest, Folder
from heterps_core.data.negative_sampling import rows_to_keep
from heterps_core.data.reading.arrow_errors import named_reading
from heterps_core.data.reading.bucket_path import BucketPath, tag_of
from heterps_core.data.reading.parquet_reader import (
    check_schema,
    encoded_rows,
    read_group,
    read_group_targets,
)
from heterps_core.data.reading.parquet_rows import AS_STORED, NO_POSITIONS, FileView, ParquetRows, Positions
from heterps_core.data.reading.row_batch import RowBatch
from heterps_core.data.requests.request_checks import differing_row
from heterps_core.data.requests.request_rows import DRAWN, LEFT_OUT, Requests, is_same_request
from heterps_core.errors import DataError

STARTS_NAME = "row_groups.npy"
"""First row of each row group, then the number of rows, [G + 1] int64."""

SOURCE_STARTS_NAME = "source_row_groups.npy"
"""The same of all rows of the source, where some of them are left out."""

REQUESTS_NAME = "requests.npy"
"""First row in the source of each request, and its kind [Q + 1, 2] int64, where the schema has requests; then the
number of rows."""

logger = logging.getLogger(__name__)

_OPEN_FILES = 64

_TRIED_AGAIN_AFTER_S = (1.0, 4.0, 16.0)
"""Arrow itself repeats requests that fail for about six seconds."""

_THREADS, _BYTES_AHEAD = 8, 1 << 27
"""Row groups that are read from a bucket at the same time, and their bytes in memory."""

_LARGEST_BRIDGED_HOLE = 8_192
"""Between columns, in bytes: what Arrow reads with them; it makes two requests of a range above 32 MiB."""

_Rows = TypeVar("_Rows")


def parquet_name(index: int) -> str:
    """Return the name of a file of a prepared data set: of its own, or a link to one of the source."""
    return f"rows-{index:05d}.parquet"


def footer_name(index: int) -> str:
    """Return the name of the footer of a file that lies in a bucket, compressed: many workers read it."""
    return f"rows-{index:05d}.footer.zst"


def deleted_name(index: int) -> str:
    """Return the name of the list of a file's rows that do not count, `Positions`, where there are any."""
    return f"rows-{index:05d}.deleted.npy"


def sampled_runs(num_rows: int, *, at_most: int, num_runs: int) -> list[tuple[int, int]]:
    """Return runs of rows (first, stop) of at most so many rows together, spread evenly: few row groups are read.

    Example:
        >>> sampled_runs(30, at_most=100, num_runs=50), sampled_runs(10**6, at_most=1_000, num_runs=50)[:2]
        ([(0, 30)], [(0, 20), (20000, 20020)])
    """
    if num_rows <= at_most:
        return [(0, num_rows)]
    num_runs = min(num_runs, at_most)
    firsts = [number * num_rows // num_runs for number in range(num_runs)]
    return [(first, first + at_most // num_runs) for first in firsts]


class _OpenFile(NamedTuple):
    source: pa.NativeFile
    footer: pq.FileMetaData
    view: FileView
    deleted: Positions


class RowGroups:
    """Reads row groups by their number over all files, without the rows that are left out of training.

    Attributes:
        starts: First row of each row group, then the number of rows [G + 1].
        largest_group_rows: Rows that are read at once, rows left out of training included.
        num_threads: So many may call `read` at the same time with gain; 1 where all files are on this machine.
        num_requests: Requests to buckets of the source, repeats after errors not counted.
        num_bytes: Bytes that the buckets sent.
        events: What rows are joined with; None where the schema has no history.
        requests: Which rows are of one request; None where the schema has no requests.
    """

    def __init__(self, folder: Folder, manifest: DatasetManifest, *, where: object) -> None:
        self._folder, self._where, self._schema = folder, where, manifest.schema
        has_history = manifest.schema.history is not None
        self.events = EventJoin(manifest.schema, folder, where=where) if has_history else None
        self._in_bucket = {
            number: (BucketPath.parse(manifest.sources[number].path), manifest.sources[number].tag)
            for number in manifest.bucket_files
        }
        self._views = manifest.views
        self._ends = np.cumsum(manifest.file_groups)
        self.starts = self._read_starts(STARTS_NAME, manifest.num_rows)
        self._source_starts, self._num_left_out = self.starts, manifest.num_left_out_rows
        if self._num_left_out:
            num_source_rows = manifest.num_rows + self._num_left_out
            self._source_starts = self._read_starts(SOURCE_STARTS_NAME, num_source_rows)
        self.requests = None
        if self._schema.request_column is not None:
            with folder(REQUESTS_NAME) as file:
                source_starts, kinds = np.load(io.BytesIO(file.read())).T
            self.requests = Requests(source_starts, kinds[:-1].astype(np.uint8))
        self._num_source_train_rows = manifest.num_train_rows + self._num_left_out
        self.largest_group_rows = int(np.diff(self._source_starts).max())
        largest_bytes = self.largest_group_rows * manifest.row_bytes
        self.num_threads = max(1, min(_THREADS, _BYTES_AHEAD // largest_bytes)) if self._in_bucket else 1
        self.num_requests = self.num_bytes = 0
        # A cache of a bound method would hold this object, and its files, until cycles are collected.
        this = weakref.proxy(self)
        self._open: Callable[[int], _OpenFile] = lru_cache(_OPEN_FILES)(
            lambda number: this._open_file(number)
        )
        if len(self._ends) <= _OPEN_FILES:
            # Now, so that files of this machine that are replaced later are still read as they were.
            for number in set(range(len(self._ends))) - set(self._in_bucket):
                self._open(number)

    def read(self, group: int) -> RowBatch:
        """Return the rows of a row group.

        Raises:
            DataError: It is damaged, a row breaks the schema, or the file is another one than was prepared.
        """
        batch = self._read(group, read_group, self._schema.used_columns)
        kept = np.ones(len(batch.labels), dtype=bool)
        if self._num_left_out:
            kept = self._kept(group, batch.labels)
            batch = batch.where(kept)
        if self.events is not None:
            batch = self.events.joined(batch, path=self._path_of(group))
        if self.requests is None:
            return batch
        rows = int(self._source_starts[group]) + np.flatnonzero(kept)
        is_same = is_same_request(self.requests.source_starts, rows)
        found = differing_row(batch, self._schema, is_same)
        if found is not None:
            number = int(np.searchsorted(self._ends, group, side="right"))
            row = int(rows[found[0]] - self._source_starts[self._first_group(number)]) + 1
            raise DataError(
                self._path_of(group),
                f"column {found[1]} must be equal in all rows of a request, but row {row:,} differs from the row "
                f"before it; write it alike, or leave {found[1]} out of request_columns",
            )
        return replace(batch, weights=self._weights(group, kept, batch.weights))

    def read_targets(self, group: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        """Return labels and weights of a row group, without reading its features; raises as `read`."""
        labels, weights = self._read(group, read_group_targets, self._schema.target_columns)
        if not self._num_left_out:
            return labels, weights
        kept = self._kept(group, labels)
        return labels[kept], self._weights(group, kept, None if weights is None else weights[kept])

    def num_kept(self, group: int) -> int:
        """Return how many rows of a row group stay by the schema's `negative_share`; raises as `read`."""
        labels, _ = self._read(group, read_group_targets, self._schema.target_columns)
        return int(self._kept(group, labels).sum())

    def between(self, first: int, stop: int) -> range:
        """Return the row groups that hold rows first..stop - 1."""
        if first >= stop:
            return range(0)
        low, high = np.searchsorted(self.starts, [first, stop - 1], side="right") - 1
        return range(int(low), int(high) + 1)

    def _weights(
        self, group: int, kept: npt.NDArray[np.bool_], weights: npt.NDArray[np.float32] | None
    ) -> npt.NDArray[np.float32] | None:
        """Return the weights [n] of the rows that are kept of a row group, where requests stand for others, too."""
        weight = self._schema.request_weight
        if self.requests is None or weight is None:
            return weights
        kinds = self.requests.kinds_of_rows(*self._source_starts[group : group + 2].tolist())[kept]
        factors = np.where(kinds == DRAWN, np.float32(weight), np.float32(1.0))
        return factors if weights is None else factors * weights

    def _kept(self, group: int, labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        if self.requests is not None:
            first, stop = self._source_starts[group : group + 2].tolist()
            is_kept: npt.NDArray[np.bool_] = self.requests.kinds_of_rows(first, stop) != LEFT_OUT
            return is_kept
        return rows_to_keep(
            labels,
            first=int(self._source_starts[group]),
            num_train_rows=self._num_source_train_rows,
            negative_share=self._schema.negative_share,
        )

    def _read_starts(self, name: str, num_rows: int) -> Int64Array:
        path, num_groups = f"{self._where}/{name}", int(self._ends[-1])
        try:
            with self._folder(name) as file:
                starts: Int64Array = np.load(io.BytesIO(file.read()))
        except (OSError, ValueError) as error:
            raise DataError(path, f"cannot be read: {error}; prepare the dataset again") from error
        if (len(starts) - 1, starts[-1]) != (num_groups, num_rows):
            raise DataError(
                path,
                f"must list the {num_groups} row groups and {num_rows} rows of the manifest, got "
                f"{len(starts) - 1} and {starts[-1]}; prepare the dataset again",
            )
        return starts

    def _path_of(self, group: int) -> str:
        return self._path(int(np.searchsorted(self._ends, group, side="right")))

    def _read(self, group: int, read: Callable[..., _Rows], columns: tuple[str, ...]) -> _Rows:
        number = int(np.searchsorted(self._ends, group, side="right"))

        def rows() -> _Rows:
            index = group - self._first_group(number)
            source, footer, view, deleted = self._open(number)
            file = encoded_rows(source, footer, self._schema, [index], view, deleted=deleted)
            return read(file, index, self._schema, path=self._path(number))

        if number not in self._in_bucket:
            return rows()
        opened = self._open(number)
        held = [opened.view.name_in_file(name) for name in columns if name not in opened.view.values]
        self._count(opened.footer.row_group(group - self._first_group(number)), held)
        for wait_s in _TRIED_AGAIN_AFTER_S:
            try:
                return self._unreplaced(number, rows)
            except DataError as error:
                if error.__cause__ is None:  # replaced, or its rows break the schema
                    raise
                logger.warning("%s; tried again in %.0f s", error, wait_s)
            time.sleep(wait_s)
        return self._unreplaced(number, rows)

    def _count(self, group: pq.RowGroupMetaData, columns: Sequence[str]) -> None:
        """Count what reading columns of a row group asks for: ranges that Arrow reads as one, and the ETag."""
        chunks = [group.column(index) for index in range(group.num_columns)]
        spans = sorted(
            (start, start + chunk.total_compressed_size)
            for chunk in chunks
            # The path of a list goes on after the column's name.
            if {chunk.path_in_schema, chunk.path_in_schema.partition(".")[0]} & {*columns}
            for start in [chunk.dictionary_page_offset or chunk.data_page_offset]
        )
        holes = [start - stop for (_, stop), (start, _) in pairwise(spans)]
        bridged = [hole for hole in holes if hole <= _LARGEST_BRIDGED_HOLE]
        self.num_requests += 2 + len(holes) - len(bridged)
        self.num_bytes += sum(stop - start for start, stop in spans) + sum(bridged)

    def _unreplaced(self, number: int, rows: Callable[[], _Rows]) -> _Rows:
        """Return rows of an object in a bucket if it is still the one that was prepared once they are read."""
        path, tag = self._in_bucket[number]
        try:
            return rows()
        finally:
            try:
                found, _ = path.tag_and_size()
            except OSError as error:
                raise DataError(path, f"cannot be read: {error}; write or get the file again") from error
            _check_tag(path, tag, found)

    def _first_group(self, file: int) -> int:
        return int(self._ends[file - 1]) if file else 0

    def _path(self, number: int) -> str:
        """Return the file for messages: that of the source where the data set has a link to it."""
        if number in self._in_bucket:
            return str(self._in_bucket[number][0])
        path = Path(str(self._where), parquet_name(number))
        return str(path.readlink() if path.is_symlink() else path)

    def _open_file(self, number: int) -> _OpenFile:
        path, view, deleted = self._path(number), self._views.get(str(number), AS_STORED), NO_POSITIONS
        try:
            if view.num_deleted:
                with self._folder(deleted_name(number)) as file:
                    deleted = np.load(io.BytesIO(file.read()))
            if number in self._in_bucket:
                place, tag = self._in_bucket[number]
                self.num_requests += 1
                source = place.open_ranges()
                # Without a request of its own: opening has asked for it.
                _check_tag(place, tag, tag_of(source))
                with (
                    self._folder(footer_name(number)) as file,
                    pa.CompressedInputStream(file, "zstd") as footer,
                ):
                    known = pq.read_metadata(pa.BufferReader(footer.read()))
                    return _OpenFile(source, known, view, deleted)
            source = self._folder(parquet_name(number))
        except OSError as error:
            raise DataError(path, f"cannot be read: {error}; prepare the dataset again") from error
        with named_reading(path):
            rows = ParquetRows(source, view, deleted=deleted)
        check_schema(path, rows, self._schema)
        known = np.diff(self._source_starts[self._first_group(number) : int(self._ends[number]) + 1]).tolist()
        found = rows.group_rows
        if known != found:
            raise DataError(
                path,
                f"must hold the rows that the dataset was prepared from, {sum(known)} in {len(known)} row groups, "
                f"but has {sum(found)} in {len(found)}; prepare the dataset again",
            )
        return _OpenFile(source, rows.footer, view, deleted)


def _check_tag(path: BucketPath, tag: str, found: str) -> None:
    if found != tag:
        raise DataError(
            path,
            f"must stay as it was when the dataset was prepared, with the ETag {tag}, but was replaced by one with "
            f"{found}; start the run once more, and write new rows to a new name",
        )


class RowBuffer:
    """Row groups that batches are gathered from: those of the last batch stay, as the next one needs most of them.

    `read` returns arrays of the rows of a row group, each [n, ...].
    """

    def __init__(
        self, starts: Int64Array, read: Callable[[int], tuple[npt.NDArray[Any], ...]], *, num_threads: int = 1
    ) -> None:
        self._starts, self._read, self._num_threads = starts, read, num_threads
        # None where one thread does: forked processes may share such a buffer.
        self._pool = ThreadPoolExecutor(num_threads, "row groups") if num_threads > 1 else None
        self._coming: dict[int, Future[tuple[npt.NDArray[Any], ...]]] = {}
        self._slot_rows = int(np.diff(starts).max())
        self._slots: dict[int, int] = {}
        self._arrays: tuple[npt.NDArray[Any], ...] = ()
        self._num_slots = 0

    def expect(self, rows: Int64Array) -> None:
        """Begin to read row groups of rows that are gathered soon, once any were gathered."""
        if self._slots:
            groups = np.unique(np.searchsorted(self._starts, rows, side="right") - 1)
            self._begin([group for group in groups.tolist() if group not in self._slots])

    def _begin(self, groups: list[int]) -> None:
        """Begin to read as many of some row groups as there are threads."""
        for group in groups[: self._num_threads]:
            if self._pool is not None and group not in self._coming:
                self._coming[group] = self._pool.submit(self._read, group)
        while len(self._coming) > 2 * self._num_threads:
            # Row groups of a batch that was not gathered.
            self._coming.pop(next(iter(self._coming)))

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
        for number, group in enumerate(missing):
            if group not in self._coming:
                self._begin(missing[number:])
            coming = self._coming.pop(group, None)
            arrays = self._read(group) if coming is None else coming.result()
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
