"""Which files a source names, in the order of time, and which reader each of them takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.csv as pa_csv

from heterps_core.data.reading.arrow_errors import named_reading
from heterps_core.data.reading.bucket_path import SourcePath, matching, source_path
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import check_names, check_schema, parquet_rows, read_parquet
from heterps_core.data.reading.row_batch import RowBatch
from heterps_core.data.reading.source_files import (
    check_no_log_above,
    data_files_of,
    in_time_order,
    is_data,
    is_listed,
)
from heterps_core.data.reading.tables.listing import files_of_table
from heterps_core.data.reading.tables.table_path import TablePath
from heterps_core.data.reading.text_reader import (
    check_text_columns,
    find_layout,
    has_two_lines,
    read_text,
    text_batches,
)
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

Source = str | SourcePath | TablePath | Sequence[str | SourcePath]
"""A file, a folder, a pattern such as "day_*.gz", here or in a bucket (s3://bucket/prefix), a table
(delta://folder/table), or a list of files."""


ROWS_PER_BATCH = 65_536
"""Rows of a batch of columns of a Parquet file."""


def list_source_files(source: Source) -> tuple[SourcePath, ...]:
    """Return the files of a source in time order.

    A list keeps its order. The files of a folder or pattern are ordered by name with numbers by value
    (day_2 before day_10); see `data_files_of` for which files of a folder are data.

    Raises:
        DataError: A file is missing or a pipe, a folder or pattern holds no file, or a folder one that may not be
            meant.
    """
    if isinstance(source, str | TablePath) and (table := TablePath.parse(source)):
        return files_of_table(table)
    if not isinstance(source, str | SourcePath):
        assert not isinstance(source, TablePath)
        files = tuple(file for part in source for file in list_source_files(part))
        if not files:
            raise DataError("the list of sources", "must name at least one file, got none")
        return files
    if is_listed(source):
        return (source,)
    path = source_path(source)
    if path.is_dir():
        matches = [path]
        expected = "a folder must hold at least one data file, got none"
    elif path.exists():
        if not path.is_file():
            raise DataError(path, "must be a file, as it is read several times, but is a pipe or a device")
        check_no_log_above([path])
        return (path,)
    else:
        matches = [match for match in matching(path) if is_data(match)]
        expected = "there is no such file or folder; check the path"
    check_no_log_above(matches)
    found = [file for match in matches for file in (data_files_of(match) if match.is_dir() else [match])]
    if not found:
        raise DataError(path, expected)
    return tuple(in_time_order(found))


def read_rows(files: Sequence[SourcePath], schema: DataSchema) -> Iterator[RowBatch]:
    """Yield all rows of the files, one file after the other, in batches of some thousand rows.

    Files without rows, such as those that only name their columns, are passed over.

    Raises:
        DataError: A file cannot be read or breaks the schema, or no file has rows; names file and line.
    """
    num_rows = 0
    for file in files:
        for batch in read_parquet(file, schema) if is_parquet(file) else read_text(file, schema):
            num_rows += len(batch.labels)
            yield batch
    if num_rows == 0:
        raise DataError(files[0], f"must hold at least one row of {schema.name} data, got none")


def holds_rows(file: SourcePath) -> bool:
    """Tell whether a file has more than the names of its columns, as parts without rows have.

    Raises:
        DataError: It cannot be read.
    """
    if not is_parquet(file):
        return has_two_lines(file)
    with parquet_rows(file) as rows:
        return any(rows.group_rows)


def check_columns(file: SourcePath, schema: DataSchema) -> None:
    """Check that a file has the columns of a schema, by its first line or its footer alone.

    Raises:
        DataError: It cannot be read, or lacks a column; with what was expected.
    """
    if is_parquet(file):
        with parquet_rows(file) as rows:
            check_schema(file, rows, schema)
    else:
        check_text_columns(file, schema)


def read_columns(
    file: SourcePath, schema: DataSchema, names: Sequence[str], *, missing_markers: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a file, whose rows need no label, in batches of some ten thousand rows.

    Values of text files come as texts, whatever they stand for; empty ones and the given markers are null.

    Raises:
        DataError: The file cannot be read, or lacks a column.
    """
    if is_parquet(file):
        with parquet_rows(file) as rows:
            check_names(file, rows.columns.names, names)
            yield from rows.batches(ROWS_PER_BATCH, names)
        return
    converting = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        include_columns=list(names),
        null_values=["", *missing_markers],
        strings_can_be_null=True,
    )
    layout = find_layout(file, schema, needed=names)
    with named_reading(file, problem="cannot be read as rows of text"):
        yield from text_batches(file, layout, converting)
