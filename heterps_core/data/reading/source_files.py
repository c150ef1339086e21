"""Which files of a folder are data, in the order of time; a table whose log lists the files that count is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeGuard
from urllib.parse import unquote

from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.parquet_rows import TableView
from heterps_core.errors import DataError

_LEFT_BY_WRITERS = re.compile(
    r"[._].*|.*(?:_\$folder\$|\.crc|\.tmp|\.partial|\.filepart|\.inprogress|\._COPYING_|~)", re.DOTALL
)
"""Marks, checksums, footers without rows, and files that are still written."""

_LOG_FOLDERS = {"_delta_log": "delta", ".hoodie": "hudi", "metadata": "iceberg"}
"""Beside or above the data files; a folder `metadata` only where it holds `_ICEBERG_LOG`."""

_ICEBERG_LOG = ".metadata.json"
_HUDI_PARTITION = ".hoodie_partition_metadata"

_TIME_KEY = re.compile(
    r"(?:.*_)?(?:y+|year|m+|month|w+|week|q|quarter|d+|day|date|dt|ds|pt|h+|hr|hour|min|minute|ts|time|timestamp)"
)
_TIME_VALUE = re.compile(r"\d{4}-\d\d\b.*")
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

_DATE_FOLDERS = re.compile(
    r"""(?<![^\0])(?P<year>(?:19|20)\d\d)(?:\0(?P<month>0[1-9]|1[0-2])(?:\0(?P<day>0[1-9]|[12]\d|3[01])
    (?:\0(?P<hour>[01]\d|2[0-3]))?)?)?(?![^\0])""",
    re.VERBOSE,
)
"""Folders 2026/11/01/03 without keys, as Amazon's Firehose writes them, in a path whose parts NUL separates."""


def is_data(path: SourcePath) -> bool:
    """Tell by its name whether a file or folder is data, and not what a writer leaves beside it."""
    return _LEFT_BY_WRITERS.fullmatch(path.name) is None


def entries_of(folder: SourcePath) -> list[SourcePath]:
    """Return the data files and the folders directly in a folder.

    Raises:
        DataError: It is a table of Delta, Iceberg or Hudi, or cannot be listed.
    """
    try:
        entries: list[SourcePath] = list(folder.iterdir())
    except OSError as error:
        raise DataError(folder, f"cannot be listed: {error.strerror}") from error
    for entry in entries:
        if entry.name == _HUDI_PARTITION or _is_log(entry):
            raise _table_with_log(folder, entry)
    return [entry for entry in entries if is_data(entry)]


def is_listed(path: object) -> TypeGuard[SourcePath]:
    """Tell whether a table has listed a file: it counts, though the table's log lies above it."""
    return isinstance(getattr(path, "view", None), TableView)


def view_of(path: SourcePath) -> TableView:
    """Return how the table that has listed a file shows it, or the folders named key=value that it lies in."""
    found: TableView | None = getattr(path, "view", None)
    named = partitions_in(path.parts).items()
    return found or TableView(values={key: None if value == NO_VALUE else value for key, value in named})


def check_no_log_above(paths: Iterable[SourcePath]) -> None:
    """Refuse files and folders that are a part of a table of Delta, Iceberg or Hudi.

    Raises:
        DataError: They are.
    """
    real: list[SourcePath] = [path.resolve() if isinstance(path, Path) else path for path in paths]
    folders = dict.fromkeys(parent for path in real for parent in path.parents)
    for folder in folders:
        # A pattern may fit the days of years, each of which would be asked for in a bucket.
        if any(map(_TIME_KEY.fullmatch, partitions_in(named_parts(folder)[-1:]))):
            continue
        for name in _LOG_FOLDERS:
            if folder.name and _is_log(folder / name):
                raise _table_with_log(folder, folder / name)


def _is_log(entry: SourcePath) -> bool:
    if entry.name not in _LOG_FOLDERS:
        return False
    # A folder above may be closed to who reads the data.
    with suppress(OSError, DataError):
        return any(
            _LOG_FOLDERS[entry.name] != "iceberg" or file.name.endswith(_ICEBERG_LOG)
            for file in entry.iterdir()
        )
    return False


def _table_with_log(folder: SourcePath, entry: SourcePath) -> DataError:
    kind = _LOG_FOLDERS.get(entry.name, "hudi")
    ways_out = {
        "delta": f"name the table as delta://{folder}",
        "iceberg": "name the table as iceberg://CATALOG/NAMESPACE.TABLE",
        "hudi": f"write the rows to a folder of plain Parquet, in Spark by spark.read.format('hudi').load('{folder}')"
        f".write.parquet('OTHER FOLDER'), with partitionBy('day') for days",
    }
    return DataError(
        folder,
        f"is a table of {kind.title()}, as {entry.name} shows: some of its files hold rows that were deleted or "
        f"replaced, and only its log lists those that count; {ways_out[kind]}",
    )


def data_files_of(folder: SourcePath) -> list[SourcePath]:
    """Return the data files of a folder and of its partitions (see `is_partition`), in time order.

    Raises:
        DataError: It holds another folder with files, which may or may not be meant, or a link to none, or is a
            table with a log.
    """
    files: list[SourcePath] = []
    for entry in entries_of(folder):
        if entry.is_file():
            files.append(entry)
        elif not entry.exists():
            raise DataError(
                entry, "is a link that leads to no file; get the file, or delete the link to leave it out"
            )
        elif is_partition(entry):
            files += data_files_of(entry)
        elif any(found.is_file() for found in entry.rglob("*")):
            raise DataError(
                folder,
                f"must hold files, or folders named key=value such as hour=01, but holds the folder {entry.name!r}; "
                f"rename it to _{entry.name} to leave it out, or name the files by a pattern; days need "
                f"folders such as day=2026-11-01 or 2026/11/01",
            )
    return in_time_order(files)


def files_of_day(entries: Sequence[SourcePath]) -> tuple[SourcePath, ...]:
    """Return the data files among and below the folders and files of a day, in time order.

    Raises:
        DataError: A folder holds another one that may not be meant; see `data_files_of`.
    """
    if entries and is_listed(entries[0]):
        return tuple(entries)
    files = {file for entry in entries for file in (data_files_of(entry) if entry.is_dir() else [entry])}
    return tuple(in_time_order(list(files)))


def in_time_order(files: list[SourcePath]) -> list[SourcePath]:
    """Return files ordered by name, with numbers by value: day_2 before day_10, hour=9 before hour=10."""
    return sorted(files, key=_name_with_numbers)


def check_partitions_are_times(files: Sequence[SourcePath]) -> None:
    """Refuse files in the order of their names where partitions of something else than time lie side by side.

    Raises:
        DataError: They do, such as region=eu and region=us: which rows are the latest cannot be seen.
    """
    found: dict[str, str] = {}
    for file in files:
        for key, value in partitions_in(file.parts).items():
            other = found.setdefault(key, value)
            is_time = _TIME_KEY.fullmatch(key) or _TIME_VALUE.fullmatch(value)
            if other != value and (not is_time or NO_VALUE in (other, value)):
                raise DataError(
                    file,
                    f"rows must be in the order of time, as the latest are held out, but {key}={other} and "
                    f"{key}={value} lie side by side; name a time_column in the schema and sort the rows by it, name "
                    f"one of the folders, or cut the rows into folders day=YYYY-MM-DD",
                )


def is_partition(entry: SourcePath) -> bool:
    """Tell whether an entry is a folder named key=value, or one of the folders of a date such as 2026/11/01/03."""
    return "=" in named_parts(entry)[-1] and entry.is_dir()


def named_parts(path: SourcePath | PurePosixPath) -> list[str]:
    """Return the parts of a path, those of a date such as 2026/11/01/03 as year=2026, month=11, day=01, hour=03."""

    def named(found: re.Match[str]) -> str:
        return "\0".join(f"{key}={value}" for key, value in found.groupdict().items() if value)

    return _DATE_FOLDERS.sub(named, "\0".join(path.parts)).split("\0")


def partitions_in(parts: Iterable[str]) -> dict[str, str]:
    """Return the values of folders named key=value among the parts of a path, by the key in small letters."""
    pairs = (part.partition("=") for part in parts)
    return {key.lower(): unquote(value) for key, mark, value in pairs if mark}


def _name_with_numbers(file: SourcePath) -> list[tuple[int, str]]:
    """Return a sort key that compares runs of digits by value."""
    parts = re.split(r"(\d+)", str(file))
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
