"""Events sorted for look-ups: files of keys that share leading bits of a hash, each in the order of key and time.

A file of events that is new changes the files of its own keys alone. The files of a version are never written again,
so whoever reads them, by links of its own, goes on with the events of then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heterps_core.data.hashing import hash_texts, text_lengths
from heterps_core.data.manifest import SourceFile, describe_source
from heterps_core.data.reading.arrow_errors import named_reading
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.column_texts import canonical_texts, column_texts
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import (
    check_names,
    columns_in_common,
    is_text,
    open_parquet,
    plain_column,
)
from heterps_core.data.reading.readers import list_source_files
from heterps_core.data.reading.tables.listing import pinned
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.reading.time_order import comparable_times
from heterps_core.data.schema import EventHistory
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.json_file import read_json, replace_json

STORE_NAME = "events.json"

BUCKETS_LOG2 = 6

KEY, TIME = "key", "time"

_BATCH_ROWS = 1 << 18

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTypes(JsonDocument):
    """Kinds of the columns that rows and events have both."""

    key: str
    """One of texts and numbers."""

    time: str
    """See `kind_of_times`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventStore(JsonDocument):
    """The files of events in a folder, and what they were made from."""

    json_form = JsonForm(what="store of events", version=1)

    table: str
    types: EventTypes
    columns: tuple[str, ...]
    """Key, time and columns of the events with their types, by which the store may be added to."""

    version: int
    buckets: Mapping[str, str]
    """File by the number of its keys' leading bits; numbers without an event have none."""

    num_events: int
    sources: tuple[SourceFile, ...]
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class _Events:
    """The files of a history's events now, and the types of their columns."""

    history: EventHistory
    files: tuple[SourcePath, ...]
    snapshot: str | None
    columns: pa.Schema

    @property
    def types(self) -> EventTypes:
        return EventTypes(
            key=kind_of_keys(self.columns.field(self.history.key).type),
            time=kind_of_times(self.columns.field(self.history.time).type),
        )


def bucket_name(bucket: str, version: int) -> str:
    """Return the name of a file of events."""
    return f"events-{int(bucket):02d}-{version}.arrow"


def kind_of_keys(column: pa.DataType) -> str:
    """Return texts or numbers, whichever a column holds."""
    column = column.value_type if pa.types.is_dictionary(column) else column
    return "texts" if is_text(plain_column(pa.nulls(0, column)).type) else "numbers"


def kind_of_times(column: pa.DataType) -> str:
    """Return the kind of times that a column holds, which others can be compared with; empty for no times."""
    types = pa.types
    if types.is_date(column):
        return "dates"
    if types.is_timestamp(column):
        return f"times with{'out' * (column.tz is None)} a time zone"
    return (
        "numbers" if types.is_integer(column) or types.is_floating(column) or types.is_decimal(column) else ""
    )


def event_types(history: EventHistory) -> EventTypes:
    """Return the kinds of key and time of a history's events, by the footers of their files.

    Raises:
        DataError: There are no events, or they lack a column, or hold in it what is no time.
    """
    return _find_events(history).types


def hash_keys(keys: pa.Array) -> tuple[UInt64Array, npt.NDArray[np.bool_]]:
    """Return a hash [n] of each key in its canonical text, and whether there is a key; 5 and 5.0 are one."""
    texts = canonical_texts(column_texts(keys))
    return hash_texts(texts, slot=0), text_lengths(texts) > 0


def link_events(history: EventHistory, folder: Path, directory: Path) -> EventStore:
    """Bring the store of a history's events below `folder` up to date, and link its files into a directory.

    Processes that do so at the same time wait for one another.

    Raises:
        DataError: See `event_types`; or a file is damaged.
    """
    events = _find_events(history)
    identity = sha256(f"{history.table} {history.key} {history.time} {history.columns}".encode()).hexdigest()
    place = folder / f"events-{identity[:10]}"
    place.mkdir(parents=True, exist_ok=True)
    with exclusive(place):
        store = _update(place, events)
        replace_json(directory / STORE_NAME, store.to_json())
        for name in store.buckets.values():
            try:
                os.link(place / name, directory / name)
            except OSError:  # a file system without links
                shutil.copyfile(place / name, directory / name)
    return store


def event_sources(history: EventHistory) -> tuple[SourceFile, ...]:
    """Return the files of a history's events as they are now; raises as `event_types`."""
    return _described(_find_events(history).files)


def _described(files: Sequence[SourcePath]) -> tuple[SourceFile, ...]:
    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(describe_source, files))


def _find_events(history: EventHistory) -> _Events:
    table = TablePath.parse(history.table)
    table = None if table is None else pinned(table)
    files = list_source_files(table or history.table)
    for file in files:
        if not is_parquet(file):
            raise DataError(
                file, "the events of a history must be Parquet, or a table of it, but this is text"
            )
    columns = columns_in_common(files)
    check_names(files[0], columns.names, (history.key, history.time, *history.columns.values()))
    if not any(_num_rows(file) for file in files):
        raise DataError(history.table, "must hold at least one event of the history, got none")
    nested = [name for name in history.columns.values() if pa.types.is_nested(columns.field(name).type)]
    if nested:
        raise DataError(
            history.table,
            f"column {nested[0]} must hold one text or number of each event, got {columns.field(nested[0]).type}; "
            f"write an event for each value, or leave it out of the history",
        )
    events = _Events(history, files, None if table is None else table.snapshot_id, columns)
    if not events.types.time:
        raise DataError(
            history.table,
            f"column {history.time} must hold the times of events as numbers, dates or timestamps, got "
            f"{columns.field(history.time).type}; write it as such",
        )
    return events


def _num_rows(file: SourcePath) -> int:
    with named_reading(file), open_parquet(file) as source:
        return int(pq.ParquetFile(source).metadata.num_rows)


def _update(place: Path, events: _Events) -> EventStore:
    """Return the store with all events in it: with the files that are new, or made again where others went."""
    sources = _described(events.files)
    columns = tuple(f"{field.name}: {field.type}" for field in events.columns)
    known = _read_store(place)
    if known is None or known.columns != columns or not {*known.sources} <= {*sources}:
        version = 0 if known is None else known.version
        known = EventStore(
            table=events.history.table,
            types=events.types,
            columns=columns,
            version=version,
            buckets={},
            num_events=0,
            sources=(),
        )
    new = [file for file, source in zip(events.files, sources, strict=True) if source not in {*known.sources}]
    version, buckets = known.version + bool(new), dict(known.buckets)
    with TemporaryDirectory(dir=place) as scratch:
        pieces, num_new = _split(new, events, Path(scratch))
        for bucket, piece in pieces.items():
            before = [place / known.buckets[bucket]] if bucket in known.buckets else []
            buckets[bucket] = bucket_name(bucket, version)
            _write_sorted([*before, piece], place / buckets[bucket])
    store = replace(
        known,
        version=version,
        buckets=buckets,
        num_events=known.num_events + num_new,
        sources=sources,
        snapshot=events.snapshot,
    )
    replace_json(place / STORE_NAME, store.to_json())
    for path in {*place.glob("*.arrow")} - {place / name for name in buckets.values()}:
        path.unlink()
    return store


def _read_store(place: Path) -> EventStore | None:
    try:
        return EventStore.from_json(read_json(place / STORE_NAME, what="store of events"))
    except ConfigurationError:
        return None


def _split(files: Sequence[SourcePath], events: _Events, scratch: Path) -> tuple[dict[str, Path], int]:
    """Write the events of files to a file for each bucket, in no order; returns these, and how many events."""
    pieces: dict[str, Path] = {}
    num_events = 0
    with ExitStack() as stack:
        writers: dict[str, pa.RecordBatchWriter] = {}
        for file in files:
            for batch in _read_events(file, events):
                num_events += batch.num_rows
                numbers = np.asarray(batch.column(KEY)) >> np.uint64(64 - BUCKETS_LOG2)
                for number in np.unique(numbers).tolist():
                    bucket = str(number)
                    if bucket not in writers:
                        pieces[bucket] = scratch / bucket
                        writer = pa.ipc.new_file(str(pieces[bucket]), batch.schema)
                        writers[bucket] = stack.enter_context(writer)
                    writers[bucket].write(batch.filter(pa.array(numbers == number)))
    return pieces, num_events


def _read_events(file: SourcePath, events: _Events) -> Iterator[pa.RecordBatch]:
    """Yield hashes of keys, times and columns of events; those that lack any of them are left out."""
    history = events.history
    names = list(dict.fromkeys((history.key, history.time, *history.columns.values())))
    with named_reading(file), open_parquet(file) as source:
        opened = pq.ParquetFile(source)
        check_names(file, opened.schema_arrow.names, names)
        for batch in opened.iter_batches(_BATCH_ROWS, columns=names):
            columns = {name: _plain(batch.column(name), events.columns.field(name).type) for name in names}
            hashes, has_key = hash_keys(columns[history.key])
            times = as_times(columns[history.time])
            found = [pa.array(hashes), times, *(columns[name] for name in history.columns.values())]
            kept = pa.array(has_key)
            for column in found:
                kept = pc.and_(kept, column.is_valid())
            yield pa.record_batch(found, names=[KEY, TIME, *history.columns]).filter(kept)


def _plain(column: pa.Array, common: pa.DataType) -> pa.Array:
    column = plain_column(column.cast(common))
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def as_times(column: pa.Array) -> pa.Array:
    """Return times as they are compared: dates by the day, numbers of 64 bits, NaN as null; others as they are.

    Raises:
        pa.ArrowException: A number is too large.
    """
    times = comparable_times(column)
    if times is None or pa.types.is_timestamp(times.type):
        return times
    if pa.types.is_date(times.type):
        return times.cast(pa.date32())
    return times.cast(pa.float64() if pa.types.is_floating(times.type) else pa.int64())


def _write_sorted(pieces: Sequence[Path], path: Path) -> None:
    """Write the events of files as one batch by key, time, and the values of their columns, which end ties."""
    tables = []
    for piece in pieces:
        with pa.memory_map(str(piece)) as source:
            tables.append(pa.ipc.open_file(source).read_all())
    events = pa.concat_tables(tables)
    events = events.sort_by([(name, "ascending") for name in events.column_names]).combine_chunks()
    with pa.ipc.new_file(str(path), events.schema) as writer:
        writer.write_table(events)


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold an advisory lock on a folder; it ends with the process, however that ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
