"""Reads Parquet files row group by row group; errors name the row, since Parquet has no lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heterps_core.data.reading.row_batch import RowBatch, check_labels, check_rows, column_texts, row_problem
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError


def open_parquet(
    path: Path | str, schema: DataSchema, *, source: pa.NativeFile | None = None
) -> pq.ParquetFile:
    """Open a Parquet file whose columns fit a schema; texts come with their dictionary, so that each is hashed once.

    Args:
        path: On this machine, or a name for `source` in messages.

    Raises:
        DataError: The file is damaged, lacks a column, or holds something else in one.
    """
    with _named(path):
        source = source or pa.OSFile(str(path))
        footer = pq.ParquetFile(source)
    _check_columns(path, footer.schema_arrow, schema)
    with _named(path):
        return pq.ParquetFile(
            source,
            metadata=footer.metadata,
            read_dictionary=list(schema.categorical_columns),
            pre_buffer=True,
        )


def group_sizes(path: Path, schema: DataSchema) -> list[int]:
    """Return the rows of each row group of a Parquet file, by its footer.

    Raises:
        DataError: As `open_parquet`.
    """
    with open_parquet(path, schema) as file:
        return [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]


def read_group(file: pq.ParquetFile, index: int, schema: DataSchema, *, path: Path | str) -> RowBatch:
    """Return the rows of one row group; `path` is for messages.

    Raises:
        DataError: The row group is damaged, or a row breaks the schema.
    """
    with _named(path, f"row group {index} of {file.num_row_groups} "):
        record_batch = _record_batch(file, index, schema.used_columns, schema)
        batch = check_rows(record_batch, schema, is_padded=False)
    if batch is None:
        raise _find_bad_row(path, record_batch, schema, _rows_before(file, index))
    return batch


def read_group_labels(
    file: pq.ParquetFile, index: int, schema: DataSchema, *, path: Path | str
) -> npt.NDArray[np.uint8]:
    """Return the labels [n] of one row group, without reading its features; else as `read_group`."""
    with _named(path, f"row group {index} of {file.num_row_groups} "):
        record_batch = _record_batch(file, index, (schema.label_column,), schema)
        labels = check_labels(record_batch.column(0), schema, is_padded=False)
    if labels is None:
        only_label = replace(schema, numeric_columns=(), count_columns=())
        raise _find_bad_row(path, record_batch, only_label, _rows_before(file, index))
    return labels


def read_parquet(path: Path, schema: DataSchema) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file, one row group after the other.

    Raises:
        DataError: The file is damaged, lacks a column, or a row breaks the schema.
    """
    with open_parquet(path, schema) as file:
        for index in range(file.num_row_groups):
            yield read_group(file, index, schema, path=path)


def check_parquet_columns(path: Path, schema: DataSchema) -> None:
    """Check by its footer that a Parquet file has the columns of a schema.

    Raises:
        DataError: It is damaged or lacks a column.
    """
    open_parquet(path, schema).close()


@contextmanager
def _named(path: Path | str, part: str = "") -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            path, f"{part}cannot be read as Parquet: {error}; write or get the file again"
        ) from error


def _check_columns(path: Path | str, columns: pa.Schema, schema: DataSchema) -> None:
    missing = [column for column in schema.used_columns if column not in columns.names]
    if missing:
        raise DataError(path, f"must have the columns {', '.join(missing)}; has {', '.join(columns.names)}")
    for name in schema.used_columns:
        wanted = pa.float64() if name in schema.numeric_columns else pa.string()
        found = columns.field(name).type
        if pa.types.is_nested(found):
            raise DataError(
                path,
                f"column {name} holds a {found} in each row, and columns of lists, structs or maps are not supported "
                f"yet; write one column for each value that matters, or leave {name} out of the schema",
            )
        if not _can_be_cast(found, wanted):
            raise DataError(
                path,
                f"column {name} must hold {'numbers' if wanted == pa.float64() else 'texts or numbers'}, "
                f"got {found}; write it as such, or leave it out of the schema",
            )


def _can_be_cast(found: pa.DataType, wanted: pa.DataType) -> bool:
    try:
        pa.nulls(0, found).cast(wanted)
    except pa.ArrowNotImplementedError:
        return False
    return True


def _record_batch(
    file: pq.ParquetFile, index: int, names: tuple[str, ...], schema: DataSchema
) -> pa.RecordBatch:
    """Read columns of a row group, with null where a NaN, or a number that is a missing marker of the schema, stands.

    Those that are not numeric come as dictionaries.
    """
    table = file.read_row_group(index, columns=list(names), use_threads=False)
    markers = pa.array(
        [float(marker) for marker in schema.missing_markers if _is_number(marker)], pa.float64()
    )
    columns = []
    for name in names:
        column = pa.concat_arrays(
            table.column(name).unify_dictionaries().chunks or [pa.array([], table.schema.field(name).type)]
        )
        if pa.types.is_floating(column.type):
            column = _null_where(pc.is_nan(column.cast(pa.float64())), column)
        if name not in schema.numeric_columns:
            column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        elif pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif _is_numeric(column.type) and len(markers):
            column = _null_where(pc.is_in(column.cast(pa.float64(), safe=False), markers), column)
        columns.append(column)
    return pa.record_batch(columns, names=list(names))


def _null_where(condition: pa.BooleanArray, column: pa.Array) -> pa.Array:
    if not condition.true_count:
        return column
    return pc.if_else(pc.fill_null(condition, False), pa.scalar(None, column.type), column)


def _is_numeric(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_floating(column_type) or pa.types.is_integer(column_type))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _rows_before(file: pq.ParquetFile, index: int) -> int:
    return sum(file.metadata.row_group(before).num_rows for before in range(index))


def _find_bad_row(
    path: Path | str, record_batch: pa.RecordBatch, schema: DataSchema, num_before: int
) -> DataError:
    """Return the error of the first bad row of a row group; rows count from 1."""
    names = (schema.label_column, *schema.numeric_columns)
    columns = [column_texts(record_batch.column(name)).to_pylist() for name in names]
    for number, values in enumerate(zip(*columns, strict=True), start=num_before + 1):
        problem = row_problem(dict(zip(names, values, strict=True)), schema)
        if problem:
            return DataError(path, f"row {number}: {problem}")
    return DataError(path, f"cannot be read as {schema.name} data after {num_before} rows")
