"""Which rows belong to which day, where a source is cut into folders such as day=YYYY-MM-DD or YYYY/MM/DD.

A night trains on the rows of one day and is judged on those of the next, which no model has seen then
(progressive validation): the model of tomorrow is not chosen by rows of the past.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from glob import has_magic
from itertools import chain
from pathlib import PurePosixPath

from heterps_core.data.reading.bucket_path import SourcePath, matching, source_path
from heterps_core.data.reading.source_files import (
    check_no_log_above,
    entries_of,
    files_of_day,
    in_time_order,
    is_data,
    is_partition,
    named_parts,
    partitions_in,
)
from heterps_core.data.reading.tables.listing import changes_by_day, days_of_table
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.errors import ConfigurationError, DataError

PARTITION_PREFIX = "day="
"""Prefix of the folders of synthetic days; other sources may have another key."""

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_DAY_FOLDER = re.compile(r"(?:day|dt|date|ds)=.*")
"""Folders that are left out, with a word, where they name no day."""

_DATE = re.compile(r"(\d{4})(-?)(\d\d)\2(\d\d)(?:[-T _]?\d\d(?::?\d\d){0,2}(?:\.0+)?Z?)?")
"""With the hour that a folder may be of."""

_DAY_KEY = re.compile(r"(?:.*_)?(?:day|date|dt|ds|pt)")
"""Keys of folders in which eight digits are a day."""

_DATE_KEYS = ("year", "y", "yyyy"), ("month", "m", "mm"), ("day", "d", "dd")

_ONE_DAY = timedelta(days=1)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """A day to train on and the one after it, with the files of both."""

    day: date
    train_files: tuple[SourcePath, ...]
    eval_files: tuple[SourcePath, ...]
    """Files of the next day."""

    def day_of(self, path: str) -> date | None:
        """Return the day that a file belongs to; None for one of neither."""
        if path in map(str, self.train_files):
            return self.day
        return self.day + _ONE_DAY if path in map(str, self.eval_files) else None


def parse_day(text: str) -> date:
    """Read a day.

    Raises:
        ConfigurationError: It is no date of the form YYYY-MM-DD.

    Example:
        >>> parse_day("2026-11-21")
        datetime.date(2026, 11, 21)
    """
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise ConfigurationError(f"a day must be a date such as 2026-11-21, got {text!r}")


def partitions_of(source: str | SourcePath | TablePath) -> Mapping[date, tuple[SourcePath, ...]]:
    """Return the folders or files of each day of a source, days in order; nothing where it is not cut into days.

    What lies in the folders is not looked at: a bucket may hold years.

    Args:
        source: A folder with folders of days in it, such as day=2026-11-21, dt=2026-11-21-03 (hours), ds=20261121,
            year=2026/month=11/day=21 or 2026/11/21, also within others (region=eu); a pattern of such folders, or of
            the files in them. One that names a single day is not cut into days. Of a table the partitions name days.

    Raises:
        DataError: A folder names a day in a form that is not known, or two days, or a day has two spellings; or the
            source is a table with a log.
    """
    if isinstance(source, str | TablePath) and (table := TablePath.parse(source)):
        return days_of_table(table, lambda partition: _day_of(partition, 0))
    assert not isinstance(source, TablePath)
    path = source_path(source)
    is_folder, num_above = path.is_dir(), _num_above(path)
    found = entries_of(path) if is_folder else [entry for entry in matching(path) if is_data(entry)]
    check_no_log_above([path] if is_folder else found)
    if not _are_days(found, num_above):
        return {}
    days: dict[date, list[SourcePath]] = {}
    left_out = []
    for day, entry in chain.from_iterable(_by_day(each, num_above) for each in found):
        if day is None:
            left_out.append(entry)
        else:
            days.setdefault(day, []).append(entry)
    unreadable = sorted(
        part for entry in left_out for part in entry.parts[num_above:] if _DAY_FOLDER.fullmatch(part)
    )
    if unreadable and not days:
        raise DataError(
            path,
            f"must name the days of its folders as day=2026-11-21, got {unreadable[0]}; rename what is a day",
        )
    if days and left_out:
        logger.warning(
            "beside the days of %s there is what belongs to none, and is left out: %s",
            source,
            ", ".join(sorted(entry.name for entry in left_out)),
        )
    for day, entries in days.items():
        if len({_spelling(entry, num_above) for entry in entries}) > 1:
            both = " and ".join(sorted({entry.name for entry in entries}))
            raise DataError(
                path, f"must name a day in one way, but {day} is {both}; leave one out by a pattern"
            )
    return {day: tuple(days[day]) for day in sorted(days)}


def table_changes(
    table: TablePath, snapshot_id: str
) -> tuple[dict[date, tuple[SourcePath, ...]], Collection[date]]:
    """Return what has happened to the days of a table since a snapshot; see `changes_by_day`."""
    return changes_by_day(table, snapshot_id, lambda partition: _day_of(partition, 0))


def find_night(source: str | SourcePath | TablePath, day: date | None) -> Night | None:
    """Return what a night trains on and is judged on; None where the source is not cut into days.

    `day` None stands for the latest whose next day is there too.

    Raises:
        DataError: The day or the one after it is missing, or a folder of them holds no file, or files of another day.
        ConfigurationError: A day is asked for, and the source is not cut into days.
    """
    partitions = partitions_of(source)
    if not partitions:
        if day is not None:
            raise ConfigurationError(
                f"day {day} can be chosen only where the data is cut into folders such as {PARTITION_PREFIX}{day}, "
                f"but {source} has none; leave the day out, or give the folder that holds them"
            )
        return None
    there = f"there are {len(partitions)} days from {min(partitions)} to {max(partitions)}"
    if day is None:
        complete = [each for each in partitions if each + _ONE_DAY in partitions]
        if not complete:
            raise DataError(
                source,
                f"a night needs the rows of a day and of the next, but {there}, no two of them in a row; wait for "
                f"the next day",
            )
        day = complete[-1]
    files: dict[date, tuple[SourcePath, ...]] = {}
    for each, purpose in ((day, "which the night trains on"), (day + _ONE_DAY, f"which {day} is judged on")):
        if each not in partitions:
            raise DataError(
                source,
                f"must have the day {each}, {purpose}, but {there}; nothing was launched: wait for that day, or "
                f"choose another",
            )
        files[each] = files_of_day(partitions[each])
        if not isinstance(source, TablePath) and TablePath.parse(source) is None:
            num_above = _num_above(source_path(source))
            for file in files[each]:
                _day_of(file, num_above)
        if not files[each]:
            raise DataError(
                source,
                f"the folder {partitions[each][0].name}, {purpose}, must hold at least one data file, got none; "
                f"nothing was launched: bring the files, or choose another day",
            )
    return Night(day=day, train_files=files[day], eval_files=files[day + _ONE_DAY])


def _num_above(source: SourcePath) -> int:
    """Return how many parts of the path of a folder or pattern are the same for all that lies in it."""
    is_pattern = not source.is_dir()
    return next(
        (at for at, part in enumerate(source.parts) if is_pattern and has_magic(part)), len(source.parts)
    )


def _are_days(entries: Sequence[SourcePath], num_above: int) -> bool:
    """Tell whether files and folders are of days, or the first folders in them are: of a bucket few are listed."""
    if any(_DAY_FOLDER.fullmatch(part) for entry in entries for part in entry.parts[num_above:]):
        return True
    if any(_day_of(entry, num_above) for entry in entries):
        return True
    inner = (entries_of(entry) for entry in in_time_order(list(entries)) if is_partition(entry))
    below = next(filter(None, inner), None)
    return below is not None and _are_days(below, num_above)


def _by_day(entry: SourcePath, num_above: int) -> Iterator[tuple[date | None, SourcePath]]:
    """Yield files and folders with the day that each is of: the entry, or where it has none those in it."""
    day = _day_of(entry, num_above)
    is_unreadable = _DAY_FOLDER.fullmatch(entry.name) is not None
    if day is not None or is_unreadable or not is_partition(entry):
        yield day, entry
        return
    for each in entries_of(entry):
        yield from _by_day(each, num_above)


def _day_of(entry: SourcePath | PurePosixPath, num_above: int) -> date | None:
    """Return the day of the folder that a file or folder is, or lies in; `num_above` parts of the path are no day.

    Raises:
        DataError: Its folders name several days.
    """
    named = named_parts(entry)
    below = partitions_in(named[num_above:])
    texts = {
        f"{key}={value}": f"{found[1]}-{found[3]}-{found[4]}"
        for key, value in below.items()
        if (found := _DATE.fullmatch(value)) and (found[2] or _DAY_KEY.fullmatch(key))
    }
    # A year and a month may stand in the path of the source.
    parts = partitions_in(named)
    numbers = [next((parts[name] for name in names if name in parts), "") for names in _DATE_KEYS]
    if not texts and all(map(str.isdecimal, numbers)) and any(name in below for name in _DATE_KEYS[-1]):
        year, month, day = map(int, numbers)
        texts = {str(entry): f"{year:04d}-{month:02d}-{day:02d}"}
    if len(set(texts.values())) > 1:
        raise DataError(
            entry,
            f"must be of one day, but names {' and '.join(texts)}; give a pattern of one of these folders",
        )
    for name, text in texts.items():
        try:
            return date.fromisoformat(text)
        except ValueError as error:
            logger.warning("%s is left out: %s", name, error)
    return None


def _spelling(entry: SourcePath, num_above: int) -> tuple[str, ...]:
    """Return the keys of the folders that name the day of a file or folder, and whether it has hyphens."""
    keys = partitions_in(entry.parts[num_above:])
    found = ((key, _DATE.fullmatch(value)) for key, value in keys.items())
    # Without keys, its folders are those of a date such as 2026/11/01.
    return tuple(f"{key}{date_found[2]}" for key, date_found in found if date_found) or tuple(
        name for name in _DATE_KEYS[-1] if name in keys
    )
