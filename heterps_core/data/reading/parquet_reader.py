"""Reads Parquet files row group by row group; errors name the row, since Parquet has no lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heterps_core.data.reading.row_batch import RowBatch, check_rows, column_texts, row_problem
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

_ROWS_PER_BATCH = 16_384


def read_parquet(path: Path, schema: DataSchema) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: The file is damaged, lacks a column, or a row breaks the schema.
    """
    num_good_rows = 0
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow, schema)
            for record_batch in file.iter_batches(_ROWS_PER_BATCH, columns=list(schema.used_columns)):
                ordered = _with_nulls(record_batch.select(list(schema.used_columns)), schema)
                batch = check_rows(ordered, schema, is_padded=False)
                if batch is None:
                    raise _find_bad_row(path, ordered, schema, num_good_rows)
                num_good_rows += len(batch.labels)
                yield batch
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def check_parquet_columns(path: Path, schema: DataSchema) -> None:
    """Check by its footer that a Parquet file has the columns of a schema.

    Raises:
        DataError: It is damaged or lacks a column.
    """
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow, schema)
    except (pa.ArrowException, OSError) as error:
        raise DataError(path, f"cannot be read as Parquet: {error}; write or get the file again") from error


def count_parquet_rows(path: Path) -> int:
    """Return how many rows the footer of a Parquet file counts.

    Raises:
        DataError: The file is damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _check_columns(path: Path, columns: pa.Schema, schema: DataSchema) -> None:
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


def _with_nulls(record_batch: pa.RecordBatch, schema: DataSchema) -> pa.RecordBatch:
    """Return columns with null where a NaN, or a number that is one of the schema's missing markers, stands."""
    markers = pa.array(
        [float(marker) for marker in schema.missing_markers if _is_number(marker)], pa.float64()
    )
    columns = []
    for name, column in zip(record_batch.schema.names, record_batch.columns, strict=True):
        if pa.types.is_floating(column.type):
            column = _null_where(pc.is_nan(column.cast(pa.float64())), column)
        if name in schema.numeric_columns and _is_numeric(column.type) and len(markers):
            column = _null_where(pc.is_in(column.cast(pa.float64(), safe=False), markers), column)
        columns.append(column)
    return pa.record_batch(columns, names=record_batch.schema.names)


def _null_where(condition: pa.BooleanArray, column: pa.Array) -> pa.Array:
    return pc.if_else(pc.fill_null(condition, False), pa.scalar(None, column.type), column)


def _is_numeric(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_floating(column_type) or pa.types.is_integer(column_type))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(path, f"cannot be read as Parquet: {error}; write or get the file again")


def _find_bad_row(
    path: Path, record_batch: pa.RecordBatch, schema: DataSchema, num_good_rows: int
) -> DataError:
    """Return the error of the first bad row of a batch; rows count from 1."""
    names = (schema.label_column, *schema.numeric_columns)
    columns = [column_texts(record_batch.column(name)).to_pylist() for name in names]
    for number, values in enumerate(zip(*columns, strict=True), start=num_good_rows + 1):
        problem = row_problem(dict(zip(names, values, strict=True)), schema)
        if problem:
            return DataError(path, f"row {number}: {problem}")
    return DataError(path, f"cannot be read as {schema.name} data after {num_good_rows} rows")
