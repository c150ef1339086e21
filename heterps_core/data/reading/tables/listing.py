"""The files of a table in the order of time, all or by day: its library lists them, our reader reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, cast

from heterps_core.bucket_files import before_first_use
from heterps_core.data.reading.arrow_errors import one_line
from heterps_core.data.reading.bucket_path import BucketPath, SourcePath, source_path
from heterps_core.data.reading.parquet_rows import TableView, ViewedPath
from heterps_core.data.reading.tables.table_path import Commit, Snapshot, TableFile, TablePath
from heterps_core.errors import ConfigurationError, DataError


def snapshot_of(table: TablePath) -> Snapshot:
    """Return the content of a snapshot; one that is named is listed once per process.

    Raises:
        DataError: The table cannot be listed, or some of its files hold rows that do not count.
        ConfigurationError: The library is not installed, or the snapshot id is no number.
    """
    return _listed(table) if table.snapshot_id else _list(table)


def pinned(table: TablePath) -> TablePath:
    """Return the table with the snapshot that is the newest now, or the one that is named."""
    return table if table.snapshot_id else replace(table, snapshot_id=_ask(table, "newest_id"))


def _list(table: TablePath) -> Snapshot:
    number = table.snapshot_id
    if number is not None and not number.isdecimal():
        raise ConfigurationError(
            f"a snapshot must be a version of Delta or a snapshot id of Iceberg, both whole numbers, got {number!r}"
        )
    return cast(Snapshot, _ask(table, "list_table"))


def _ask(table: TablePath, function: str, *arguments: str) -> Any:
    """Call a function of the file of the table's kind, with all errors as one line."""
    for prepare in before_first_use:
        prepare()
    try:
        if table.kind == "delta":
            from heterps_core.data.reading.tables import delta

            return getattr(delta, function)(table, *arguments)
        from heterps_core.data.reading.tables import iceberg

        return getattr(iceberg, function)(table, *arguments)
    except ImportError as error:
        raise ConfigurationError(
            f"{table} needs a package that is missing ({error.name}): pip install 'heterps[{table.kind}]'"
        ) from error
    except DataError:
        raise
    # The libraries raise errors of many kinds, also of their stores and catalogs.
    except Exception as error:
        raise DataError(
            table,
            f"snapshot {table.snapshot_id or '(the newest)'} cannot be listed: {one_line(error)}; check its name, "
            f"its catalog, your credentials, and whether the snapshot has expired",
        ) from error


_listed = lru_cache(maxsize=4)(_list)


def files_of_table(table: TablePath) -> tuple[SourcePath, ...]:
    """Return the data files of a table by the first time in each, where the schema has a time, else by name.

    Raises:
        DataError: It cannot be listed, has no file, or files lack statistics of the time column.
    """
    snapshot = snapshot_of(table)
    files = _in_order(snapshot.files, table)
    if not files:
        raise DataError(table, "must hold at least one data file, got none")
    return _paths(snapshot, files)


class _Days(Mapping[date, tuple[SourcePath, ...]]):
    """The files of each day, days in order; paths are made of those that are asked for: a table may have years."""

    def __init__(self, table: TablePath, snapshot: Snapshot, days: dict[date, list[TableFile]]) -> None:
        self._table, self._snapshot, self._days = table, snapshot, {day: days[day] for day in sorted(days)}

    def __getitem__(self, day: date) -> tuple[SourcePath, ...]:
        return _paths(self._snapshot, _in_order(self._days[day], self._table))

    def __iter__(self) -> Iterator[date]:
        return iter(self._days)

    def __len__(self) -> int:
        return len(self._days)


def days_of_table(
    table: TablePath, day_of: Callable[[PurePosixPath], date | None]
) -> Mapping[date, tuple[SourcePath, ...]]:
    """Return the data files of each day by the values of partitions; nothing where they name no days."""
    snapshot = snapshot_of(table)
    return _Days(table, snapshot, _by_day(snapshot.files, day_of))


def changes_by_day(
    table: TablePath, snapshot_id: str, day_of: Callable[[PurePosixPath], date | None]
) -> tuple[dict[date, tuple[SourcePath, ...]], Collection[date]]:
    """Return the files that a table has got for each day since a snapshot, and the days with changed rows.

    Of these days there are no files: some rows in them may have been deleted since.

    Raises:
        DataError: That is not known any more.
    """
    table = pinned(table)
    commits = cast(list[Commit], _ask(table, "commits_after", snapshot_id))
    snapshot = snapshot_of(table)
    now = {file.uri: file for file in snapshot.files}
    added = _by_day([now.get(file.uri, file) for commit in commits for file in commit.added], day_of)
    changed = _by_day([now.get(file.uri, file) for commit in commits for file in commit.changed], day_of)
    return {day: _paths(snapshot, added[day]) for day in added if day not in changed}, changed


def _by_day(
    files: Iterable[TableFile], day_of: Callable[[PurePosixPath], date | None]
) -> dict[date, list[TableFile]]:
    days: dict[date, list[TableFile]] = {}
    known: dict[tuple[tuple[str, str], ...], date | None] = {}
    for file in files:
        if file.partition not in known:
            known[file.partition] = day_of(
                PurePosixPath(*(f"{key}={value}" for key, value in file.partition))
            )
        day = known[file.partition]
        if day is not None:
            days.setdefault(day, []).append(file)
    return days


def _in_order(files: Iterable[TableFile], table: TablePath) -> list[TableFile]:
    found = list(files)
    if table.time_column is None:
        return sorted(found, key=lambda file: file.uri)
    if len(found) > 1 and any(file.first_time is None for file in found):
        raise DataError(
            table,
            f"each file must have statistics of the time_column {table.time_column}, by which files are ordered; "
            f"write the table with statistics, or leave time_column out where partitions are days",
        )
    return sorted(found, key=lambda file: (file.first_time, file.uri))


def _paths(snapshot: Snapshot, files: Iterable[TableFile]) -> tuple[SourcePath, ...]:
    """Return files as the table shows them."""
    return tuple(_path(snapshot, file) for file in files)


def _path(snapshot: Snapshot, file: TableFile) -> SourcePath:
    view = TableView(keys=snapshot.keys, values=file.values, find_deleted=file.find_deleted)
    # A path is made once: a table may have very many files.
    path = source_path(file.uri) if "://" in file.uri else file.uri
    if isinstance(path, BucketPath):
        return replace(path, view=view)
    viewed = ViewedPath(path)
    viewed.view = view
    return viewed
