"""Reads Parquet files row group by row group; errors name the row, since Parquet has no lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heterps_core.data.reading.bucket_path import BucketPath, SourcePath
from heterps_core.data.reading.row_batch import (
    RowBatch,
    check_rows,
    check_targets,
    column_texts,
    is_list,
    row_problem,
)
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError


def read_footer(
    path: SourcePath | str, schema: DataSchema, *, source: pa.NativeFile | None = None
) -> pq.FileMetaData:
    """Return the footer of a Parquet file, whose columns fit a schema.

    The path is a name in messages where there is a `source`.

    Raises:
        DataError: The file is damaged, lacks a column, or holds something else in one.
    """
    with named_reading(path):
        file = pq.ParquetFile(source or open_parquet(path))
    _check_columns(path, file.schema_arrow, schema)
    return file.metadata


def parquet_file(source: pa.NativeFile, footer: pq.FileMetaData, schema: DataSchema) -> pq.ParquetFile:
    """Return a reader for one thread; texts come with their dictionary, so that each is hashed once."""
    return pq.ParquetFile(
        source, metadata=footer, read_dictionary=list(schema.categorical_columns), pre_buffer=True
    )


def group_sizes(footer: pq.FileMetaData) -> list[int]:
    """Return the rows of each row group of a Parquet file."""
    return [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]


def read_group(file: pq.ParquetFile, index: int, schema: DataSchema, *, path: SourcePath | str) -> RowBatch:
    """Return the rows of one row group; `path` is for messages.

    Raises:
        DataError: The row group is damaged, or a row breaks the schema.
    """
    with named_reading(path, f"row group {index} of {file.num_row_groups} "):
        record_batch = _record_batch(file, index, schema.used_columns, schema)
        batch = check_rows(record_batch, schema, is_padded=False)
    if batch is None:
        raise _find_bad_row(path, record_batch, schema, _rows_before(file, index))
    return batch


def read_group_targets(
    file: pq.ParquetFile, index: int, schema: DataSchema, *, path: SourcePath | str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
    """Return labels [n] and weights [n] of one row group, without reading its features; else as `read_group`."""
    with named_reading(path, f"row group {index} of {file.num_row_groups} "):
        record_batch = _record_batch(file, index, schema.target_columns, schema)
        targets = check_targets(record_batch.columns, schema, is_padded=False)
    if targets is None:
        only_targets = replace(schema, numeric_columns=(), count_columns=())
        raise _find_bad_row(path, record_batch, only_targets, _rows_before(file, index))
    return targets


def read_parquet(path: SourcePath, schema: DataSchema) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file, one row group after the other.

    Raises:
        DataError: The file is damaged, lacks a column, or a row breaks the schema.
    """
    with named_reading(path), open_parquet(path) as source:
        file = parquet_file(source, read_footer(path, schema, source=source), schema)
        for index in range(file.num_row_groups):
            yield read_group(file, index, schema, path=path)


def open_parquet(path: SourcePath | str) -> pa.NativeFile:
    """Open a file for a Parquet reader; of one in a bucket only what is read is fetched."""
    return path.open_ranges() if isinstance(path, BucketPath) else pa.OSFile(str(path))


@contextmanager
def named_reading(path: SourcePath | str, part: str = "") -> Iterator[None]:
    """Raise what Arrow or the system say within the block as a `DataError` of this file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            path, f"{part}cannot be read as Parquet: {error}; write or get the file again"
        ) from error


def _check_columns(path: SourcePath | str, columns: pa.Schema, schema: DataSchema) -> None:
    missing = [column for column in schema.used_columns if column not in columns.names]
    if missing:
        raise DataError(
            path,
            f"must have the columns {', '.join(missing)}; has {', '.join(columns.names)}; write them, empty where "
            f"they are missing, or leave them out of the schema",
        )
    for name in schema.used_columns:
        wanted = pa.float64() if name in schema.number_columns else pa.string()
        found = columns.field(name).type
        if name in schema.list_columns and is_list(found):
            found = found.value_type
        if pa.types.is_nested(found):
            raise DataError(
                path,
                f"column {name} holds a {columns.field(name).type} in each row, and only multi_hot_columns and "
                f"sequence_columns may hold lists, of texts or numbers; name it there, or leave it out of the schema",
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
        if is_list(column.type):
            pass
        elif name not in schema.number_columns:
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
    path: SourcePath | str, record_batch: pa.RecordBatch, schema: DataSchema, num_before: int
) -> DataError:
    """Return the error of the first bad row of a row group; rows count from 1."""
    names = (*schema.target_columns, *schema.numeric_columns)
    columns = [column_texts(record_batch.column(name)).to_pylist() for name in names]
    for number, values in enumerate(zip(*columns, strict=True), start=num_before + 1):
        problem = row_problem(dict(zip(names, values, strict=True)), schema)
        if problem:
            return DataError(path, f"row {number}: {problem}")
    return DataError(path, f"cannot be read as {schema.name} data after {num_before} rows")
