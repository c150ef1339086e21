"""The rows of a Parquet file as its table shows them: its names of columns, values of folders, no deleted rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PosixPath

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.json_codec import JsonDocument

Positions = npt.NDArray[np.int64]
"""Places of rows in a file, counted from 0, sorted."""

NO_POSITIONS: Positions = np.zeros(0, np.int64)

_FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileView(JsonDocument):
    """How columns of a table are found in one of its files."""

    names: Mapping[str, str] | None = None
    """Name in the file by column of the table that it holds; None where all of its columns count, as they are."""

    values: Mapping[str, str | None] = field(default_factory=dict)
    """Values that all rows have in columns that the file lacks; None where they are missing."""

    num_deleted: int = 0
    """Rows of the file that do not count."""

    def name_in_file(self, column: str) -> str:
        """Return what the file calls a column."""
        return column if self.names is None else self.names[column]

    def of(self, columns: Collection[str]) -> FileView:
        """Return the view of some columns, which the table has."""
        names = {name: inner for name, inner in (self.names or {}).items() if name in columns}
        values = {name: value for name, value in self.values.items() if name in columns}
        is_renamed = any(name != inner for name, inner in names.items())
        return FileView(names=names if is_renamed else None, values=values, num_deleted=self.num_deleted)


AS_STORED = FileView()


@dataclass(frozen=True, kw_only=True)
class TableView:
    """How a table, or the names of its folders, show the rows of a file."""

    keys: Mapping[str, Sequence[int | str]] | None = None
    """Field id of each column of a table, if it has one, and its names in files that have no ids; None for those of
    the file."""

    values: Mapping[str, str | None] = field(default_factory=dict)
    """Values of columns by partition, which the file may lack."""

    find_deleted: Callable[[], Positions] | None = None

    @cached_property
    def deleted(self) -> Positions:
        """Rows of the file that do not count."""
        return NO_POSITIONS if self.find_deleted is None else np.unique(self.find_deleted())

    def in_file(self, fields: pa.Schema) -> FileView:
        """Return the columns of the table in a file with such fields."""
        if self.keys is None:
            values = {name: value for name, value in self.values.items() if name not in fields.names}
            return FileView(values=values)
        ids: dict[int | str, str] = {
            int(each.metadata[_FIELD_ID]): each.name for each in fields if _FIELD_ID in (each.metadata or {})
        }
        as_named: dict[int | str, str] = {name: name for name in fields.names}
        names: dict[str, str] = {}
        for column, keys in self.keys.items():
            held = ids if ids and isinstance(keys[0], int) else as_named
            names.update((column, held[key]) for key in keys[::-1] if key in held)
        values = {name: self.values.get(name) for name in self.keys if name not in names}
        return FileView(names=names, values=values, num_deleted=len(self.deleted))

    def digest(self, columns: Collection[str] | None) -> str:
        """Return a hash of what decides some columns of the rows; empty where the file alone does."""
        if self.keys is None:
            return ""
        keys = [(name, *keys) for name, keys in self.keys.items() if columns is None or name in columns]
        parts = repr((sorted(keys), sorted(self.values.items()))).encode(), self.deleted.tobytes()
        return hashlib.sha256(b"".join(parts)).hexdigest()


class ViewedPath(PosixPath):
    """A file of this machine that belongs to a table."""

    view: TableView


class ParquetRows:
    """An open Parquet file as its table shows it, for one thread.

    Attributes:
        view: Where its columns are.
        deleted: Rows of the file that do not count.
        footer: Of the file, which knows nothing of the table.
        group_rows: Rows of each row group that count.
    """

    def __init__(
        self,
        source: pa.NativeFile,
        view: TableView | FileView,
        *,
        deleted: Positions = NO_POSITIONS,
        footer: pq.FileMetaData | None = None,
        encoded: Iterable[str] = (),
    ) -> None:
        """Open a file; columns of texts that are `encoded` come with their dictionary."""
        self.footer = pq.ParquetFile(source).metadata if footer is None else footer
        if isinstance(view, TableView):
            deleted = view.deleted
            view = view.in_file(self._fields)
        self.view, self.deleted = view, deleted
        texts = list(map(self.view.name_in_file, encoded))
        self._file = pq.ParquetFile(
            source, metadata=self.footer, read_dictionary=texts, pre_buffer=footer is not None
        )
        sizes = [self.footer.row_group(index).num_rows for index in range(self.footer.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self.group_rows = np.diff(self._starts - np.searchsorted(self.deleted, self._starts)).tolist()

    @cached_property
    def _fields(self) -> pa.Schema:
        return self.footer.schema.to_arrow_schema()

    @cached_property
    def columns(self) -> pa.Schema:
        """Columns of the table that the file holds, or that the table has a value for, with their types."""
        values, names = self.view.values, self.view.names
        if names is None:
            held = [(each.name, each.type) for each in self._fields if each.name not in values]
        else:
            held = [(name, self._fields.field(inner).type) for name, inner in names.items()]
        return pa.schema(
            [*held, *((name, pa.null() if value is None else pa.string()) for name, value in values.items())]
        )

    @property
    def is_as_stored(self) -> bool:
        """Whether a reader that knows nothing of the table finds the same rows and columns."""
        names = self.view.names or {}
        is_other = len(self.deleted) or not {*self.view.values}.isdisjoint(self._fields.names)
        return not is_other and all(name == inner for name, inner in names.items())

    def read(self, group: int, names: Sequence[str]) -> pa.Table:
        """Return columns of a row group, in the order of their names."""
        table = self._file.read_row_group(group, columns=self._in_file(names), use_threads=False)
        return self._shown(table, names, int(self._starts[group]))

    def batches(self, num_rows: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns in batches of at most some rows."""
        first = 0
        for batch in self._file.iter_batches(num_rows, columns=self._in_file(names)):
            shown = self._shown(pa.Table.from_batches([batch]), names, first)
            yield from shown.combine_chunks().to_batches()
            first += batch.num_rows

    def _in_file(self, names: Sequence[str]) -> list[str]:
        return [self.view.name_in_file(name) for name in names if name not in self.view.values]

    def _shown(self, table: pa.Table, names: Sequence[str], first: int) -> pa.Table:
        columns = [
            pa.repeat(pa.scalar(self.view.values[name], pa.string()), len(table))
            if name in self.view.values
            else table.column(self.view.name_in_file(name))
            for name in names
        ]
        shown = pa.table(columns, names=list(names))
        low, high = np.searchsorted(self.deleted, [first, first + len(table)])
        if low < high:
            is_kept = np.ones(len(table), bool)
            is_kept[self.deleted[low:high] - first] = False
            shown = shown.filter(pa.array(is_kept))
        return shown
