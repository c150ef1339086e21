"""Which rows belong to which day, where a source is cut into folders named day=YYYY-MM-DD.

A night trains on the rows of one day and is judged on those of the next, which no model has seen then
(progressive validation): whoever chooses the model of tomorrow by it does not choose by the past.
"""

from __future__ import annotations

import glob
import logging
import re
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from heterps_core.errors import ConfigurationError, DataError

PARTITION_PREFIX = "day="

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")

_ONE_DAY = timedelta(days=1)

logger = logging.getLogger(__name__)


def is_data(path: Path) -> bool:
    """Tell whether a name is one of data; marks and unfinished files of other programs begin with "." or "_"."""
    return path.name[0] not in "._"


def data_files_of(folder: Path) -> list[Path]:
    """Return the data files of a folder and of its partitions, which are folders named key=value, in time order.

    Raises:
        DataError: It holds another folder with files, which may or may not be meant.
    """
    files = []
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


def in_time_order(files: list[Path]) -> list[Path]:
    """Return files ordered by name, with numbers by value: day_2 before day_10, hour=9 before hour=10."""
    return sorted(files, key=_name_with_numbers)


def _name_with_numbers(file: Path) -> list[tuple[int, str]]:
    """Return a sort key that compares runs of digits by value."""
    parts = re.split(r"(\d+)", str(file))
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """A day to train on and the one after it, with the files of both."""

    day: date
    train_files: tuple[Path, ...]
    eval_files: tuple[Path, ...]
    """Of the next day."""

    def day_of(self, path: str) -> date | None:
        """Return the day that a file belongs to; None for one of neither."""
        if Path(path) in self.train_files:
            return self.day
        return self.day + _ONE_DAY if Path(path) in self.eval_files else None


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


def partitions_of(source: str | Path) -> dict[date, tuple[Path, ...]]:
    """Return the files of each day of a source, days in order; nothing where the source is not cut into days.

    Args:
        source: A folder with day=YYYY-MM-DD folders, a pattern of such folders, or one of the files in them, also
            in folders such as hour=01 there. One that names a single day is not cut into days.

    Raises:
        DataError: A folder of a day holds a folder that may not be meant; see `data_files_of`.
    """
    path = Path(source)
    if any(_names_a_day(part) for part in path.parts):
        # One day, or files of one, are data like any other.
        return {}
    # Path.glob takes no absolute patterns.
    found = list(path.iterdir()) if path.is_dir() else [Path(name) for name in glob.glob(str(source))]  # noqa: PTH207
    days: dict[date, set[Path]] = {}
    left_out = []
    for entry in found:
        if not is_data(entry):
            continue
        day = _day_of(entry)
        if day is None:
            left_out.append(entry)
        else:
            days.setdefault(day, set()).update(data_files_of(entry) if entry.is_dir() else [entry])
    if days and left_out:
        logger.warning(
            "beside the days of %s there is what belongs to none, and is left out: %s",
            source,
            ", ".join(sorted(entry.name for entry in left_out)),
        )
    return {day: tuple(in_time_order(list(days[day]))) for day in sorted(days)}


def find_night(source: str | Path, day: date | None) -> Night | None:
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
    for each, purpose in ((day, "which the night trains on"), (day + _ONE_DAY, f"which {day} is judged on")):
        if each not in partitions:
            raise DataError(
                source,
                f"must have a folder {PARTITION_PREFIX}{each}, {purpose}, but {there}; nothing was launched: wait "
                f"for that day, or choose another",
            )
        if not partitions[each]:
            raise DataError(
                source,
                f"the folder {PARTITION_PREFIX}{each}, {purpose}, must hold at least one data file, got none; "
                f"nothing was launched: bring the files, or choose another day",
            )
    return Night(day=day, train_files=partitions[day], eval_files=partitions[day + _ONE_DAY])


def _names_a_day(part: str) -> bool:
    return (
        part.startswith(PARTITION_PREFIX) and _DAY.fullmatch(part.removeprefix(PARTITION_PREFIX)) is not None
    )


def _day_of(entry: Path) -> date | None:
    """Return the day of the folder that a file or folder is, or lies in."""
    folders = [each for each in (entry, *entry.parents) if each.name.startswith(PARTITION_PREFIX)]
    if not folders:
        return None
    try:
        return parse_day(folders[0].name.removeprefix(PARTITION_PREFIX))
    except ConfigurationError as error:
        logger.warning("%s is left out: %s", folders[0], error)
        return None
