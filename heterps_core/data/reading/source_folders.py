"""Which files of a folder are data: also those in folders such as hour=01 within, and none is dropped in silence."""

from __future__ import annotations

import re
from pathlib import Path

from heterps_core.errors import DataError


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
