"""Which rows belong to which day, where a source is cut into folders such as day=YYYY-MM-DD or dt=YYYY-MM-DD.

A night trains on the rows of one day and is judged on those of the next, which no model has seen then
(progressive validation): the model of tomorrow is not chosen by rows of the past.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from heterps_core.data.reading.bucket_path import SourcePath, matching, source_path
from heterps_core.errors import ConfigurationError, DataError

PARTITION_PREFIX = "day="
"""Of the days that are written here; others may have another key."""

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_DAY_FOLDER = re.compile(r"(?:day|dt|date|ds)=(.*)")

_ONE_DAY = timedelta(days=1)

logger = logging.getLogger(__name__)


def is_data(path: SourcePath) -> bool:
    """Tell whether a name is one of data; marks and unfinished files of other programs begin with "." or "_"."""
    return path.name[0] not in "._"


def data_files_of(folder: SourcePath) -> list[SourcePath]:
    """Return the data files of a folder and of its partitions, which are folders named key=value, in time order.

    Raises:
        DataError: It holds another folder with files, which may or may not be meant.
    """
    files: list[SourcePath] = []
    for entry in folder.iterdir():
        if not is_data(entry):
            continue
        if entry.is_file():
            files.append(entry)
        elif "=" in entry.name:
            files += data_files_of(entry)
        elif any(found.is_file() for found in entry.rglob("*")):
            raise DataError(
                folder,
                f"must hold files, or folders named key=value such as hour=01, but holds the folder {entry.name!r}; "
                f"rename it to _{entry.name} to leave it out, or name the files by a pattern",
            )
    return in_time_order(files)


def in_time_order(files: list[SourcePath]) -> list[SourcePath]:
    """Return files ordered by name, with numbers by value: day_2 before day_10, hour=9 before hour=10."""
    return sorted(files, key=_name_with_numbers)


def _name_with_numbers(file: SourcePath) -> list[tuple[int, str]]:
    """Return a sort key that compares runs of digits by value."""
    parts = re.split(r"(\d+)", str(file))
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """A day to train on and the one after it, with the files of both."""

    day: date
    train_files: tuple[SourcePath, ...]
    eval_files: tuple[SourcePath, ...]
    """Of the next day."""

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


def partitions_of(source: str | SourcePath) -> dict[date, tuple[SourcePath, ...]]:
    """Return the folders or files of each day of a source, days in order; nothing where it is not cut into days.

    What lies in the folders is not looked at: a bucket may hold years.

    Args:
        source: A folder with day=YYYY-MM-DD folders, a pattern of such folders, or one of the files in them, also
            in folders such as hour=01 there. One that names a single day is not cut into days.
    """
    path = source_path(source)
    if any(_names_a_day(part) for part in path.parts):
        # One day, or files of one, are data like any other.
        return {}
    found: list[SourcePath] = list(path.iterdir()) if path.is_dir() else matching(path)
    days: dict[date, list[SourcePath]] = {}
    left_out = []
    for entry in found:
        if not is_data(entry):
            continue
        day = _day_of(entry)
        if day is None:
            left_out.append(entry)
        else:
            days.setdefault(day, []).append(entry)
    unreadable = sorted(entry.name for entry in left_out if _DAY_FOLDER.fullmatch(entry.name))
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
    return {day: tuple(days[day]) for day in sorted(days)}


def files_of_day(entries: Sequence[SourcePath]) -> tuple[SourcePath, ...]:
    """Return the data files among and below the folders and files of a day, in time order.

    Raises:
        DataError: A folder holds another one that may not be meant; see `data_files_of`.
    """
    files = {file for entry in entries for file in (data_files_of(entry) if entry.is_dir() else [entry])}
    return tuple(in_time_order(list(files)))


def find_night(source: str | SourcePath, day: date | None) -> Night | None:
    """Return what a night trains on and is judged on; None where the source is not cut into days.

    `day` None stands for the latest whose next day is there too.

    Raises:
        DataError: The day or the one after it is missing, or a folder of them holds no file.
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
    some_folder = next(part for part in partitions[min(partitions)][0].parts if _names_a_day(part))
    key = some_folder.partition("=")[0]
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
                f"must have a folder {key}={each}, {purpose}, but {there}; nothing was launched: "
                f"wait for that day, or choose another",
            )
        files[each] = files_of_day(partitions[each])
        if not files[each]:
            raise DataError(
                source,
                f"the folder {partitions[each][0].name}, {purpose}, must hold at least one data file, got none; "
                f"nothing was launched: bring the files, or choose another day",
            )
    return Night(day=day, train_files=files[day], eval_files=files[day + _ONE_DAY])


def _names_a_day(part: str) -> bool:
    found = _DAY_FOLDER.fullmatch(part)
    return found is not None and _DAY.fullmatch(found[1]) is not None


def _day_of(entry: SourcePath) -> date | None:
    """Return the day of the folder that a file or folder is, or lies in."""
    for folder in (entry, *entry.parents):
        found = _DAY_FOLDER.fullmatch(folder.name)
        if found is not None:
            try:
                return parse_day(found[1])
            except ConfigurationError as error:
                logger.warning("%s is left out: %s", folder, error)
                return None
    return None
