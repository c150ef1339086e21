"""The name of a table of Delta or Iceberg, and the content of one of its snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from heterps_core.data.reading.parquet_rows import Positions

KINDS = ("delta", "iceberg")


class TableFile(NamedTuple):
    """A data file that counts in a snapshot."""

    uri: str
    partition: tuple[tuple[str, str], ...]
    """Columns and values, such as (("day", "2026-11-01"),)."""

    first_time: Any = None
    """Smallest value of the time column, which those of other files can be compared with; None where not known."""

    values: Mapping[str, str | None] = {}
    """Columns of the table that have one value in the whole file, by its partition; the file may lack them."""

    find_deleted: Callable[[], Positions] | None = None
    """Returns the rows of the file that were deleted; None for none."""


class Snapshot(NamedTuple):
    """What a table holds at one time."""

    id: str
    files: tuple[TableFile, ...]
    columns: tuple[tuple[str, str], ...]
    """Names and types."""

    keys: Mapping[str, Sequence[int | str]]
    """Field ids, or names in files, by column."""


class Commit(NamedTuple):
    """The files of a change of a table; what writes the same rows to other files changes nothing."""

    added: tuple[TableFile, ...]
    """Their rows are new: the commit has only added rows."""

    changed: tuple[TableFile, ...]
    """Files of a commit that has changed or deleted rows: those that went, and those in their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePath:
    """A table as delta://PATH, delta://s3://BUCKET/PATH or iceberg://CATALOG/NAMESPACE.TABLE."""

    uri: str
    snapshot_id: str | None = None
    """Delta's version or Iceberg's snapshot id; None for the newest."""

    time_column: str | None = None
    """Files outside of days are ordered by its smallest values."""

    @classmethod
    def parse(cls, source: object) -> TablePath | None:
        """Return the table that a text names; None where it names none. A local path of Delta becomes absolute."""
        if isinstance(source, cls):
            return source
        kind, mark, place = str(source).partition("://")
        if not mark or kind.lower() not in KINDS:
            return None
        if kind.lower() == "delta" and "://" not in place:
            place = str(Path(place).expanduser().absolute())
        return cls(uri=f"{kind.lower()}://{place.rstrip('/')}")

    def __str__(self) -> str:
        """Return the URI, which is the same for all snapshots."""
        return self.uri

    @property
    def kind(self) -> str:
        """One of delta and iceberg."""
        return self.uri.partition("://")[0]

    @property
    def place(self) -> str:
        """The URI without its scheme."""
        return self.uri.partition("://")[2]

    @property
    def name(self) -> str:
        """Last part of the place."""
        return self.place.rpartition("/")[2]
