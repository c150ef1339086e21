"""Reads Parquet files row group by row group; errors name the row, since Parquet has no lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.row_batch import RowBatch, check_rows, column_texts, row_problem
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
                ordered = record_batch.select(list(schema.used_columns))
                batch = check_rows(ordered, schema, is_padded=False)
                if batch is None:
                    raise _find_bad_row(path, ordered, schema, num_good_rows)
                num_good_rows += len(batch.labels)
                yield batch
    except (pa.ArrowException, OSError) as error:
        raise DataError(path, f"cannot be read as Parquet: {error}; write or get the file anew") from error


def check_parquet_columns(path: Path, schema: DataSchema) -> None:
    """Check by its footer that a Parquet file has the columns of a schema.

    Raises:
        DataError: It is damaged or lacks a column.
    """
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow, schema)
    except (pa.ArrowException, OSError) as error:
        raise DataError(path, f"cannot be read as Parquet: {error}; write or get the file anew") from error


def _check_columns(path: Path, columns: pa.Schema, schema: DataSchema) -> None:
    missing = [column for column in schema.used_columns if column not in columns.names]
    if missing:
        raise DataError(path, f"must have the columns {', '.join(missing)}; has {', '.join(columns.names)}")


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
