"""Joins rows with the last events of their keys: two searches in sorted files, for all rows at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.epoch_order import Int64Array
from heterps_core.data.hashing import UInt64Array
from heterps_core.data.history.event_store import (
    BUCKETS_LOG2,
    STORE_NAME,
    Events,
    EventStore,
    as_times,
    find_events,
    hash_keys,
    kind_of_keys,
    kind_of_times,
    link_events,
    plain,
)
from heterps_core.data.manifest import Folder, folder_of
from heterps_core.data.reading.arrow_errors import ARROW_ERRORS, one_line
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.column_texts import column_texts
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import check_schema, is_text, parquet_rows
from heterps_core.data.reading.row_batch import RowBatch, clean
from heterps_core.data.reading.text_reader import find_layout
from heterps_core.data.schema import DataSchema, EventHistory
from heterps_core.errors import DataError

_ROWS_AT_ONCE, _EVENTS_AT_ONCE = 1 << 16, 1 << 21
"""Their places take some tens of MB, and an Arrow array holds 2 GB of their texts."""

_COPIED_BYTES = 1 << 24

_UNITS = {"s": "second", "ms": "millisecond", "us": "microsecond", "ns": "nanosecond"}


class _Bucket(NamedTuple):
    """m events of k keys in the order of key and time, mapped into memory."""

    keys: UInt64Array
    """[k], sorted."""

    stops: npt.NDArray[np.int32]
    """[k], one after the last event of each key."""

    times: npt.NDArray[Any]
    columns: list[pa.Array]
    time_type: pa.DataType

    def between(
        self, keys: UInt64Array, times: npt.NDArray[Any], max_length: int
    ) -> tuple[Int64Array, Int64Array]:
        """Return for each of n rows the first of its last events before its time, and where they stop."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        end = self.stops[at].astype(np.int64)
        first = np.where(at > 0, self.stops[at - 1], 0)
        # A key without events has none from there on.
        first = np.where(self.keys[at] == keys, first, end)
        low, high = first, end
        while (is_open := low < high).any():
            middle = (low + high) // 2
            is_earlier = self.times[np.minimum(middle, len(self.times) - 1)] < times
            low, high = (
                np.where(is_open & is_earlier, middle + 1, low),
                np.where(is_open & ~is_earlier, middle, high),
            )
        return np.maximum(first, low - max_length), low


class EventJoin:
    """The events that a prepared data set is linked to, or those of a model that predicts.

    Attributes:
        store: The files of events that they were made from.
    """

    def __init__(self, schema: DataSchema, folder: Folder, *, where: object) -> None:
        assert schema.history is not None
        self._schema, self._history = schema, schema.history
        try:
            with folder(STORE_NAME) as file:
                self.store = EventStore.from_json(json.loads(file.read()))
            self._buckets = {
                int(number): _map(folder, name, Path(str(where)))
                for number, name in self.store.buckets.items()
            }
        except ARROW_ERRORS as error:
            raise DataError(
                where, f"the events of its history cannot be read: {one_line(error)}; prepare it again"
            ) from error
        some = next(iter(self._buckets.values()))
        self._time_type, self._none = some.time_type, [column[:0] for column in some.columns]

    def joined(self, rows: RowBatch, *, path: object) -> RowBatch:
        """Return rows with the lists of their histories as their last texts; `path` is for messages.

        Raises:
            DataError: A row has no time, or one that cannot be compared with those of events.
        """
        assert rows.pointers is not None
        keys, times = rows.pointers
        comparable = self._times(times, path)
        if comparable.null_count:
            raise DataError(
                path,
                f"column {self._history.time} must hold the time of each row, before which its history ends, but is "
                f"empty in {comparable.null_count} rows of {len(comparable):,}; write it, or leave these rows out",
            )
        return replace(rows, texts=(*rows.texts, *self._lists(keys, comparable)))

    def lists(self, keys: pa.Array, times: pa.Array | None, *, path: object) -> list[pa.ListArray]:
        """Return for each sequence the last events of each key [n] before its time; all events where it has none.

        Raises:
            DataError: A time cannot be compared with those of events.
        """
        times = pa.nulls(len(keys), self._time_type) if times is None else self._times(times, path)
        return self._lists(keys, times)

    def _times(self, times: pa.Array, path: object) -> pa.Array:
        """Return times of rows in the type of those of events, rounded up: the same events are earlier."""
        wanted, column = self._time_type, plain(times)
        try:
            if is_text(column.type):
                column = pc.utf8_trim_whitespace(column)
                column = pc.if_else(pc.equal(column, ""), None, column)
                column = column.cast(wanted) if pa.types.is_date(wanted) else column
            if column.null_count == len(column):
                return pa.nulls(len(column), wanted)
            found = as_times(column)
            _check_kind(path, self._history, pa.null() if found is None else found.type, wanted)
            if pa.types.is_timestamp(wanted):
                # In UTC no hour comes twice.
                found = found.cast(pa.timestamp(found.type.unit, wanted.tz and "UTC"))
                found = pc.ceil_temporal(found, 1, unit=_UNITS[wanted.unit])
            elif pa.types.is_integer(wanted) and pa.types.is_floating(found.type):
                found = pc.ceil(found)
            return found.cast(wanted, safe=not pa.types.is_floating(wanted))
        except ARROW_ERRORS as error:
            raise DataError(
                path,
                f"column {self._history.time} must hold {kind_of_times(wanted)}, as the events of its history do: "
                f"{one_line(error)}; write both alike",
            ) from error

    def _lists(self, keys: pa.Array, times: pa.Array) -> list[pa.ListArray]:
        keys = clean(plain(keys), self._schema, is_padded=self._schema.is_padded, in_any_form=True)
        spans = [(first, first + _ROWS_AT_ONCE) for first in range(0, max(len(keys), 1), _ROWS_AT_ONCE)]
        parts = [self._part(keys[first:stop], _as_numbers(times[first:stop])) for first, stop in spans]
        return [pa.concat_arrays(of_column) for of_column in zip(*parts, strict=True)]

    def _part(self, keys: pa.Array, times: npt.NDArray[Any]) -> list[pa.ListArray]:
        hashes, has_key = hash_keys(keys)
        numbers = np.where(has_key, (hashes >> np.uint64(64 - BUCKETS_LOG2)).astype(np.int64), -1)
        firsts, starts, counts = np.zeros((3, len(keys)), np.int64)
        rows_of = {
            number: np.flatnonzero(numbers == number) for number in {*numbers.tolist()} & {*self._buckets}
        }
        for number, rows in rows_of.items():
            firsts[rows], stops = self._buckets[number].between(
                hashes[rows], times[rows], self._history.max_length
            )
            counts[rows] = stops - firsts[rows]
        if counts.sum() > _EVENTS_AT_ONCE and len(keys) > 1:
            half = len(keys) // 2
            parts = self._part(keys[:half], times[:half]), self._part(keys[half:], times[half:])
            return [pa.concat_arrays(of_column) for of_column in zip(*parts, strict=True)]
        found: list[list[pa.Array]] = [[none] for none in self._none]
        num_found = 0
        # Neighbours of one key and time, as candidates of a request are, have the events of the first of them.
        is_other = np.append(True, (hashes[1:] != hashes[:-1]) | (times[1:] != times[:-1]))[: len(keys)]
        for number, of_bucket in rows_of.items():
            rows = of_bucket[is_other[of_bucket]]
            starts[rows] = num_found + np.cumsum(counts[rows]) - counts[rows]
            num_found += int(counts[rows].sum())
            places = pa.array(_ranges(firsts[rows], counts[rows]))
            for column, values in zip(self._buckets[number].columns, found, strict=True):
                values.append(column.take(places))
        places = pa.array(_ranges(starts[is_other][is_other.cumsum() - 1], counts))
        offsets = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
        return [pa.ListArray.from_arrays(offsets, self._texts(values).take(places)) for values in found]

    def _texts(self, values: list[pa.Array]) -> pa.DictionaryArray:
        different = pa.concat_arrays(values).dictionary_encode()
        texts = column_texts(different.dictionary)
        return clean(pa.DictionaryArray.from_arrays(different.indices, texts), self._schema, is_padded=False)


def _check_kind(path: object, history: EventHistory, found: pa.DataType, wanted: pa.DataType) -> None:
    """Check that times of rows can be compared with those of events.

    Raises:
        DataError: They cannot.
    """
    if kind_of_times(found) != kind_of_times(wanted):
        raise DataError(
            path,
            f"column {history.time} must hold {kind_of_times(wanted)}, as the events of {history.table} do, got "
            f"{kind_of_times(found) or 'no times'}; write both alike",
        )


def check_pointers(
    file: SourcePath, schema: DataSchema, events: Events, *, columns: pa.Schema | None = None
) -> None:
    """Check the columns of a file of rows, where they are not given, that point to a history; text has no types.

    Raises:
        DataError: Keys are texts in one and numbers in the other, times are of another kind, or a sequence of the
            history is a column of the rows.
    """
    history = schema.history
    assert history is not None
    if not is_parquet(file):
        columns = pa.schema([(name, pa.null()) for name in find_layout(file, schema).columns])
    elif columns is None:
        with parquet_rows(file) as rows:
            check_schema(file, rows, schema)
            columns = rows.columns
    for name in history.columns:
        if name in columns.names:
            raise DataError(
                file,
                f"must not have the column {name}, as the history makes it; give the sequence another name in the "
                f"schema, or list {name} in sequence_columns in place of the history",
            )
    key, time = (columns.field(name).type for name in schema.pointer_columns)
    wanted = kind_of_keys(events.columns.field(history.key).type)
    if not pa.types.is_null(key) and kind_of_keys(key) != wanted:
        raise DataError(
            file,
            f"column {history.key} must hold {wanted}, as the events of {history.table} do, got {kind_of_keys(key)}; "
            f"write both alike",
        )
    if not (pa.types.is_null(time) or is_text(time)):
        _check_kind(file, history, time, events.columns.field(history.time).type)


def check_history(files: Sequence[SourcePath], schema: DataSchema) -> None:
    """Check that a schema's history has events that rows of some files can point to, by first lines and footers.

    Raises:
        DataError: See `find_events` and `check_pointers`.
    """
    if schema.history is not None:
        events = find_events(schema.history)
        for file in files:
            check_pointers(file, schema, events)


def newest_events(schema: DataSchema, folder: Path) -> EventJoin:
    """Return the events of a history as they are now, by the store below a folder; raises as `find_events`."""
    assert schema.history is not None
    with TemporaryDirectory(dir=folder) as directory:
        link_events(find_events(schema.history), folder, Path(directory))
        # Files that are mapped stay when their names go.
        return EventJoin(schema, folder_of(Path(directory)), where=directory)


def _as_numbers(times: pa.Array) -> npt.NDArray[Any]:
    """Return times [n] as the numbers that they are stored as, the largest for a null: all events are before it."""
    if pa.types.is_date(times.type):
        times = times.view(pa.int32())
    elif pa.types.is_timestamp(times.type):
        times = times.view(pa.int64())
    is_whole = pa.types.is_integer(times.type)
    largest = np.iinfo(times.type.to_pandas_dtype()).max if is_whole else np.inf
    numbers: npt.NDArray[Any] = times.fill_null(largest).to_numpy(zero_copy_only=False)
    return numbers


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return start, start + 1 and so on for each of some ranges, one after the other.

    Example:
        >>> _ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    before = np.cumsum(counts) - counts
    ranges: Int64Array = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return ranges


def _map(folder: Folder, name: str, where: Path) -> _Bucket:
    """Map a file of events into memory: of this machine, or a copy of one from elsewhere, which has no name."""
    path = where / name
    if path.exists():
        source = pa.memory_map(str(path))
    else:
        with NamedTemporaryFile() as copy, folder(name) as file:
            shutil.copyfileobj(file, copy, _COPIED_BYTES)
            copy.flush()
            source = pa.memory_map(copy.name)
    events = pa.ipc.open_file(source).read_all().combine_chunks()
    keys, times, *columns = (column.chunk(0) for column in events.columns)
    return _Bucket(keys.values.to_numpy(), keys.run_ends.to_numpy(), _as_numbers(times), columns, times.type)
