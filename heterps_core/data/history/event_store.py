"""Events sorted for look-ups: files of keys that share leading bits of a hash, each in the order of key and time.

A file of events that is new changes the files of its own keys alone. The files of a version are never written again,
so a reader with links of its own goes on with the events of then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.hashing import UInt64Array, hash_texts, text_lengths
from heterps_core.data.manifest import SourceFile, describe_sources
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.column_texts import canonical_texts, column_texts
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import (
    check_names,
    columns_in_common,
    is_text,
    parquet_rows,
    plain_column,
)
from heterps_core.data.reading.readers import holds_rows, list_source_files
from heterps_core.data.reading.tables.listing import pinned
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.reading.time_order import comparable_times
from heterps_core.data.schema import EventHistory
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.json_file import read_json, replace_json

STORE_NAME = "events.json"

BUCKETS_LOG2 = 6

KEY = "0"
"""Columns are named by numbers, as a sequence may have any name: hashes of keys, times, and the history's columns."""

_BATCH_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class EventStore(JsonDocument):
    """The sorted files in a folder, and the files of events that they were made from."""

    json_form = JsonForm(what="store of events", version=1)

    table: str
    columns: tuple[str, ...]
    """Columns of the events with their types; events of other types make the store again."""

    version: int = 0
    buckets: Mapping[str, str] = field(default_factory=dict)
    """File by the number of its keys' leading bits; numbers without an event have none."""

    sources: tuple[SourceFile, ...] = ()
    snapshot: str | None = None


class Events(NamedTuple):
    """The files of a history's events now, and the columns that they have in common."""

    history: EventHistory
    files: tuple[SourcePath, ...]
    sources: tuple[SourceFile, ...]
    snapshot: str | None
    columns: pa.Schema


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
    is_number = types.is_integer(column) or types.is_floating(column) or types.is_decimal(column)
    return "numbers" if is_number else ""


def hash_keys(keys: pa.Array) -> tuple[UInt64Array, npt.NDArray[np.bool_]]:
    """Return a hash [n] of each key in its canonical text, and whether there is a key; 5 and 5.0 are one."""
    texts = canonical_texts(column_texts(keys))
    return hash_texts(texts, slot=0), text_lengths(texts) > 0


def find_events(history: EventHistory) -> Events:
    """Return the events of a history by the footers of their files.

    Raises:
        DataError: There are none, or they lack a column, or hold a type in it that cannot be used.
    """
    table = TablePath.parse(history.table)
    table = None if table is None else pinned(table)
    files = list_source_files(table or history.table)
    if texts := [file for file in files if not is_parquet(file)]:
        raise DataError(texts[0], "holds events, which must be Parquet; write them as such")
    columns = columns_in_common(files)
    check_names(files[0], columns.names, (history.key, history.time, *history.columns.values()))
    if not any(map(holds_rows, files)):
        raise DataError(history.table, "must hold at least one event of the history, got none")
    time = columns.field(history.time).type
    values = (history.key, *history.columns.values())
    nested = [name for name in values if pa.types.is_nested(columns.field(name).type)]
    if nested or not kind_of_times(time):
        name, wanted = (
            (nested[0], "texts or numbers, one in each event")
            if nested
            else (history.time, "numbers, dates or timestamps, alike in all files")
        )
        raise DataError(
            history.table,
            f"column {name} must hold {wanted}, got {columns.field(name).type}; write it so",
        )
    snapshot = None if table is None else table.snapshot_id
    sources = describe_sources(files, (history.key, history.time, *history.columns.values()))
    return Events(history, files, sources, snapshot, columns)


def link_events(events: Events, folder: Path, directory: Path) -> None:
    """Bring the store of events below `folder` up to date, and link its files into a directory.

    Processes that do so at the same time wait for one another.

    Raises:
        DataError: A file is damaged.
    """
    identity = repr(replace(events.history, max_length=1))
    place = folder / f"events-{sha256(identity.encode()).hexdigest()[:10]}"
    place.mkdir(parents=True, exist_ok=True)
    with exclusive(place):
        store = _update(place, events)
        replace_json(directory / STORE_NAME, store.to_json())
        for name in store.buckets.values():
            try:
                os.link(place / name, directory / name)
            except OSError:  # a file system without links
                shutil.copyfile(place / name, directory / name)


def _update(place: Path, events: Events) -> EventStore:
    """Return the store with all events in it: with the files that are new, or made again where others went."""
    columns = tuple(f"{column.name}: {column.type}" for column in events.columns)
    known = _read_store(place) or EventStore(table=events.history.table, columns=columns)
    if known.columns != columns or not {*known.sources} <= {*events.sources}:
        known = replace(known, columns=columns, buckets={}, sources=())
    old = {*known.sources}
    new = [file for file, source in zip(events.files, events.sources, strict=True) if source not in old]
    version, buckets = known.version + bool(new), dict(known.buckets)
    for stray in place.glob("tmp*"):  # of an update that was killed
        shutil.rmtree(stray)
    with TemporaryDirectory(dir=place) as scratch:
        for bucket, piece in _split(new, events, Path(scratch)).items():
            before = [place / known.buckets[bucket]] if bucket in known.buckets else []
            buckets[bucket] = f"events-{int(bucket):02d}-{version}.arrow"
            # A run may have a file of this name, where the list of files was lost: that one stays as it is.
            (place / buckets[bucket]).unlink(missing_ok=True)
            _write_sorted([*before, piece], place / buckets[bucket])
    if not buckets:
        raise DataError(
            known.table, "must hold an event with key, time and all columns of the history, got none"
        )
    sources, snapshot = events.sources, events.snapshot
    store = replace(known, version=version, buckets=buckets, sources=sources, snapshot=snapshot)
    replace_json(place / STORE_NAME, store.to_json())
    for path in {*place.glob("*.arrow")} - {place / name for name in buckets.values()}:
        path.unlink()
    return store


def _read_store(place: Path) -> EventStore | None:
    try:
        return EventStore.from_json(read_json(place / STORE_NAME, what="store of events"))
    except ConfigurationError:
        return None


def _split(files: Sequence[SourcePath], events: Events, scratch: Path) -> dict[str, Path]:
    """Write the events of files to a file for each bucket, in no order; returns these."""
    pieces: dict[str, Path] = {}
    with ExitStack() as stack:
        writers: dict[str, pa.RecordBatchWriter] = {}
        for file in files:
            for batch in _read_events(file, events):
                numbers = np.asarray(batch.column(KEY)) >> np.uint64(64 - BUCKETS_LOG2)
                for number in np.unique(numbers).tolist():
                    bucket = str(number)
                    if bucket not in writers:
                        pieces[bucket] = scratch / bucket
                        writer = pa.ipc.new_file(str(pieces[bucket]), batch.schema)
                        writers[bucket] = stack.enter_context(writer)
                    writers[bucket].write(batch.filter(pa.array(numbers == number)))
    return pieces


def _read_events(file: SourcePath, events: Events) -> Iterator[pa.RecordBatch]:
    """Yield hashes of keys, times and columns of events; those that lack any of them are left out."""
    history = events.history
    names = list(dict.fromkeys((history.key, history.time, *history.columns.values())))
    with parquet_rows(file) as rows:
        check_names(file, rows.columns.names, names)
        for batch in rows.batches(_BATCH_ROWS, names):
            columns = {
                name: plain(batch.column(name).cast(events.columns.field(name).type)) for name in names
            }
            hashes, has_key = hash_keys(columns[history.key])
            times = as_times(columns[history.time])
            values = [_without_bytes(columns[name]) for name in history.columns.values()]
            found = [pa.array(hashes), times, *values]
            kept = pa.array(has_key)
            for column in found:
                kept = pc.and_(kept, column.is_valid())
            yield pa.record_batch(found, names=list(map(str, range(len(found))))).filter(kept)


def plain(column: pa.Array) -> pa.Array:
    """Return a column without a dictionary, in a type that Arrow's functions take."""
    return plain_column(column.dictionary_decode() if pa.types.is_dictionary(column.type) else column)


def _without_bytes(column: pa.Array) -> pa.Array:
    """Return bytes as the texts that they are read as later; raises ArrowException where they are no UTF-8."""
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return column_texts(column) if any(is_kind(column.type) for is_kind in kinds) else column


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
    """Write the events of files as one batch by key, time, and the values of their columns, which end ties.

    Each key stands there once, with where its events stop.
    """
    tables = []
    for piece in pieces:
        with pa.memory_map(str(piece)) as source:
            table = pa.ipc.open_file(source).read_all()
        if pa.types.is_run_end_encoded(table.schema.field(KEY).type):
            table = table.set_column(0, KEY, pc.run_end_decode(table.column(KEY)))
        tables.append(table)
    events = pa.concat_tables(tables)
    events = events.sort_by([(name, "ascending") for name in events.column_names]).combine_chunks()
    events = events.set_column(0, KEY, pc.run_end_encode(events.column(KEY)))
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
