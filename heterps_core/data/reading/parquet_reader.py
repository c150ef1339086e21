"""Reads Parquet files row group by row group; errors name the row, since Parquet has no lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heterps_core.data.reading.arrow_errors import ARROW_ERRORS, named_reading, one_line
from heterps_core.data.reading.bucket_path import BucketPath, SourcePath
from heterps_core.data.reading.column_texts import column_texts, identity_problem
from heterps_core.data.reading.parquet_rows import NO_POSITIONS, FileView, ParquetRows, Positions
from heterps_core.data.reading.row_batch import (
    RowBatch,
    check_rows,
    check_targets,
    clean_lists,
    is_list,
    is_number,
    row_problem,
    unequal_lists,
)
from heterps_core.data.reading.source_files import view_of
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

_Rows = TypeVar("_Rows")

_PLAIN_TYPES = {pa.float16(): pa.float32(), pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
"""By types that lack functions which the reader needs."""

_WITHOUT_DICTIONARY = {"DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"}
"""Encodings of version 2, which Arrow reads as texts only."""


@contextmanager
def parquet_rows(path: SourcePath) -> Iterator[ParquetRows]:
    """Open a Parquet file as its table shows it.

    Raises:
        DataError: The file is damaged.
    """
    with named_reading(path), open_parquet(path) as source:
        yield ParquetRows(source, view_of(path))


def check_schema(path: SourcePath | str, rows: ParquetRows, schema: DataSchema) -> None:
    """Check that the columns of an open file fit a schema; features that a table has got later may be missing.

    Raises:
        DataError: The file lacks a column, or holds something else in one.
    """
    values = rows.view.values
    lacking = {name for name in schema.target_columns if name in values}
    lacking |= {
        name for name, value in values.items() if value is None and name not in schema.feature_columns
    }
    check_names(path, [name for name in rows.columns.names if name not in lacking], schema.used_columns)
    _check_types(path, rows.columns, schema)


def encoded_rows(
    source: pa.NativeFile,
    footer: pq.FileMetaData,
    schema: DataSchema,
    groups: Iterable[int],
    view: FileView,
    *,
    deleted: Positions = NO_POSITIONS,
) -> ParquetRows:
    """Return some row groups for one thread; texts come with their dictionary: each is hashed once."""
    without = {
        chunk.path_in_schema
        for group in map(footer.row_group, groups)
        for chunk in map(group.column, range(group.num_columns))
        if not _WITHOUT_DICTIONARY.isdisjoint(chunk.encodings)
    }
    names = [
        name
        for name in schema.categorical_columns
        if name not in view.values and view.name_in_file(name) not in without
    ]
    return ParquetRows(source, view, deleted=deleted, footer=footer, encoded=names)


def read_group(file: ParquetRows, index: int, schema: DataSchema, *, path: SourcePath | str) -> RowBatch:
    """Return the rows of one row group; `path` is for messages.

    Raises:
        DataError: The row group is damaged, or a row breaks the schema.
    """
    return _checked_group(
        file,
        index,
        schema.used_columns,
        schema,
        check=lambda rows: check_rows(rows, schema, is_padded=False),
        path=path,
    )


def read_group_targets(
    file: ParquetRows, index: int, schema: DataSchema, *, path: SourcePath | str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
    """Return labels [n] and weights [n] of one row group, without reading its features; else as `read_group`."""
    return _checked_group(
        file,
        index,
        schema.target_columns,
        replace(schema, numeric_columns=(), count_columns=(), request_columns=()),
        check=lambda rows: check_targets(rows.columns, schema, is_padded=False),
        path=path,
    )


def _checked_group(
    file: ParquetRows,
    index: int,
    names: Sequence[str],
    schema: DataSchema,
    *,
    check: Callable[[pa.RecordBatch], _Rows | None],
    path: SourcePath | str,
) -> _Rows:
    """Return what a check makes of columns of a row group; raises what breaks the schema where it is None."""
    part = f"row group {index} of {len(file.group_rows)} "
    with named_reading(path, part):
        table = file.read(index, names)
    try:
        record_batch = _record_batch(table, names, schema)
        for name in set(names) & {*schema.text_columns}:
            problem = identity_problem(record_batch.column(name))
            if problem is not None:
                raise DataError(path, f"column {name} {problem}")
        rows = check(record_batch)
        if rows is None:
            raise _find_bad_row(path, record_batch, schema, sum(file.group_rows[:index]))
    except ARROW_ERRORS as error:
        raise _unreadable_column(path, part, table, schema) from error
    return rows


def read_parquet(path: SourcePath, schema: DataSchema) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file, one row group after the other.

    Raises:
        DataError: The file is damaged, lacks a column, or a row breaks the schema.
    """
    with named_reading(path), open_parquet(path) as source:
        rows = ParquetRows(source, view_of(path))
        check_schema(path, rows, schema)
        groups = range(len(rows.group_rows))
        rows = encoded_rows(source, rows.footer, schema, groups, rows.view, deleted=rows.deleted)
        for index in groups:
            yield read_group(rows, index, schema, path=path)


def open_parquet(path: SourcePath | str) -> pa.NativeFile:
    """Open a file for a Parquet reader; of one in a bucket only what is read is fetched."""
    return path.open_ranges() if isinstance(path, BucketPath) else pa.OSFile(str(path))


def columns_in_common(paths: Sequence[SourcePath], *, are_stored: bool = False) -> pa.Schema:
    """Return the columns of Parquet files, each with a type that the values of all can be cast to.

    Args:
        paths: The files.
        are_stored: Whether they are for a reader that knows nothing of tables: without values of partitions.

    Raises:
        DataError: A file is damaged, or such a reader would find other rows or columns.
    """
    with ThreadPoolExecutor() as pool:
        of_files = list(pool.map(partial(_read_columns, are_stored=are_stored), paths))
    types: dict[str, list[pa.DataType]] = {}
    for field in chain.from_iterable(of_files):
        types.setdefault(field.name, []).append(field.type)
    return pa.schema([(name, _common_type(found)) for name, found in types.items()])


def _read_columns(path: SourcePath, *, are_stored: bool) -> pa.Schema:
    with parquet_rows(path) as rows:
        if are_stored and not rows.is_as_stored:
            raise DataError(
                path,
                f"has {len(rows.deleted):,} deleted rows or renamed columns of its table, which a query does not "
                f"see; compact the table, or train without prepare_sql",
            )
        return pa.schema(each for each in rows.columns if not (are_stored and each.name in rows.view.values))


def _common_type(types: Sequence[pa.DataType]) -> pa.DataType:
    # A column without a value in a file has no type there.
    known = [pa.schema([("", each)]) for each in dict.fromkeys(types) if not pa.types.is_null(each)]
    try:
        return pa.unify_schemas(known, promote_options="permissive").field(0).type if known else pa.string()
    except pa.ArrowException:
        return pa.string()


def check_names(path: SourcePath | str, found: Sequence[str], needed: Sequence[str]) -> None:
    """Check that a file has each of some columns, and once.

    Raises:
        DataError: It has not.
    """
    missing = [column for column in needed if column not in found]
    if missing:
        raise DataError(
            path,
            f"must have the columns {', '.join(missing)}; has {', '.join(found)}; write them, empty where they are "
            f"missing, or leave them out of the schema",
        )
    twice = [column for column in needed if found.count(column) > 1]
    if twice:
        raise DataError(
            path, f"must name each column once, but has {twice[0]!r} twice; write it again with other names"
        )


def plain_column(column: pa.Array) -> pa.Array:
    """Return a column without a type that only some of Arrow's functions take: extensions, views, short numbers."""
    if isinstance(column.type, pa.UuidType):
        return column_texts(column)
    if isinstance(column, pa.ExtensionArray):
        return plain_column(column.storage)
    kind = column.type
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return column.cast(pa.decimal128(kind.precision, kind.scale))
    return column.cast(_PLAIN_TYPES[kind]) if kind in _PLAIN_TYPES else column


def _check_types(path: SourcePath | str, columns: pa.Schema, schema: DataSchema) -> None:
    for name in schema.used_columns:
        found = columns.field(name).type
        column = pa.nulls(0, found)
        if is_list(found) and name in schema.list_columns:
            column = column.flatten()
        is_number = name in schema.number_columns
        if pa.types.is_nested(plain_column(column).type):
            raise DataError(
                path,
                f"column {name} holds a {found} in each row, and only multi_hot_columns and sequence_columns may "
                f"hold lists, of texts or numbers; name it there, or leave it out of the schema",
            )
        if _conversion_problem(column, is_number=is_number):
            raise DataError(
                path,
                f"column {name} must hold {'numbers' if is_number else 'texts or numbers'}, got {found}; write it as "
                f"such, or leave it out of the schema",
            )


def _conversion_problem(column: pa.Array, *, is_number: bool) -> str:
    """Return why a column cannot be read as numbers, or as texts; empty where it can."""
    try:
        plain = plain_column(column)
        if is_list(plain.type):
            plain = plain.flatten()
        if is_number and not is_text(plain.type):
            plain.cast(pa.float64(), safe=False)
        else:
            texts = plain if pa.types.is_dictionary(plain.type) else plain.dictionary_encode()
            column_texts(texts.dictionary).validate(full=True)
    except ARROW_ERRORS as error:
        return one_line(error)
    return ""


def _unreadable_column(path: SourcePath | str, part: str, table: pa.Table, schema: DataSchema) -> DataError:
    """Return the error of the first column of a row group that cannot be converted."""
    for name in table.column_names:
        is_number = name in schema.number_columns
        problem = _conversion_problem(_as_array(table, name), is_number=is_number)
        if problem:
            return DataError(
                path,
                f"{part}holds in column {name}, of type {table.schema.field(name).type}, what is no "
                f"{'number' if is_number else 'text'}: {problem}; write it as such, or leave it out of the schema",
            )
    return DataError(path, f"{part}cannot be read as {schema.name} data")


def _record_batch(table: pa.Table, names: Sequence[str], schema: DataSchema) -> pa.RecordBatch:
    """Return columns of a row group, with null where a NaN, or a missing marker that is a number, stands.

    Those that are not numeric come as dictionaries.
    """
    markers = pa.array(
        [float(marker) for marker in schema.missing_markers if is_number(marker)], pa.float64()
    )
    columns = []
    for name in names:
        column = plain_column(_as_array(table, name))
        if pa.types.is_floating(column.type):
            column = _null_where(pc.is_nan(column.cast(pa.float64())), column)
        if is_list(column.type):
            pass
        elif name not in schema.number_columns:
            column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
            column.dictionary.validate(full=True)
        elif pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif _is_numeric(column.type) and len(markers):
            column = _null_where(pc.is_in(column.cast(pa.float64(), safe=False), markers), column)
        columns.append(column)
    return pa.record_batch(columns, names=list(names))


def _as_array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.unify_dictionaries().chunks or [pa.array([], column.type)])


def _null_where(condition: pa.BooleanArray, column: pa.Array) -> pa.Array:
    if not condition.true_count:
        return column
    return pc.if_else(pc.fill_null(condition, False), pa.scalar(None, column.type), column)


def _is_numeric(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_floating(column_type) or pa.types.is_integer(column_type))


def is_text(column_type: pa.DataType) -> bool:
    """Tell whether an Arrow column holds texts."""
    return bool(pa.types.is_string(column_type) or pa.types.is_large_string(column_type))


def _find_bad_row(
    path: SourcePath | str, record_batch: pa.RecordBatch, schema: DataSchema, num_before: int
) -> DataError:
    """Return the error of the first bad row of a row group; rows count from 1."""
    names = (*schema.target_columns, *schema.numeric_columns)
    columns = [column_texts(record_batch.column(name)).to_pylist() for name in names]
    lists = {
        name: clean_lists(record_batch.column(name), schema, is_padded=False)
        for names in schema.histories
        for name in names
        if name in schema.row_slots
    }
    unequal = unequal_lists(lists, schema)
    for number, values in enumerate(zip(*columns, strict=True), start=num_before + 1):
        if unequal is not None and number == num_before + 1 + unequal[0]:
            return DataError(path, f"row {number}: {unequal[1]}")
        problem = row_problem(dict(zip(names, values, strict=True)), schema)
        if problem:
            return DataError(path, f"row {number}: {problem}")
    return DataError(path, f"cannot be read as {schema.name} data after {num_before} rows")
