"""Reads the columns that a model predicts from, of rows whose label is not known yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from heterps_core.data.reading.arrow_errors import named_reading
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import check_names, open_parquet
from heterps_core.data.reading.text_reader import find_layout, text_batches
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

ROWS_PER_BATCH = 65_536


def read_columns(file: SourcePath, schema: DataSchema, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield columns of a file, Parquet or text, in batches of some ten thousand rows.

    Values of text files come as texts, whatever they stand for.

    Raises:
        DataError: The file cannot be read, or lacks a column.
    """
    if is_parquet(file):
        yield from _parquet_columns(file, names)
    else:
        yield from _text_columns(file, schema, names)


def _parquet_columns(path: SourcePath, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with named_reading(path), open_parquet(path) as source:
        file = pq.ParquetFile(source)
        check_names(path, file.schema_arrow.names, names)
        yield from file.iter_batches(ROWS_PER_BATCH, columns=list(names))


def _text_columns(path: SourcePath, schema: DataSchema, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    layout = find_layout(path, schema, needed=names)
    converting = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        include_columns=list(names),
        null_values=[""],
        strings_can_be_null=True,
    )
    try:
        yield from text_batches(path, layout, converting)
    except pa.ArrowInvalid as error:
        raise DataError(path, f"cannot be read as rows of text: {error}") from error
