"""Refuses rows that are not in the order of the schema's `time_column`: the latest are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.parquet_reader import named_reading, open_parquet
from heterps_core.data.reading.readers import is_parquet
from heterps_core.data.reading.text_reader import find_layout, open_text
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

_TEXT_KINDS = (pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
"""That a text may stand for: numbers, times by ISO 8601, the same with a zone."""


def check_time_order(files: Sequence[SourcePath], schema: DataSchema) -> None:
    """Check that rows are in the order of the schema's `time_column`, each file behind the one before.

    Of each file this column alone is read. Without a `time_column` nothing is checked.

    Raises:
        DataError: A row is earlier than the one before it, or has no time; names file and row, which count from 1.
    """
    latest = pa.array([])
    for file in files if schema.time_column else ():
        num_rows = 0
        for times in times_of(file, schema):
            if len(latest) and times.type != latest.type:
                raise DataError(
                    file,
                    f"column {schema.time_column} holds {times.type}, {latest.type} before; write both alike",
                )
            both = pa.concat_arrays([latest.cast(times.type), times])
            is_earlier = pc.less(both.slice(1), both.slice(0, max(len(both) - 1, 0)))
            found = pc.index(is_earlier, True).as_py()
            if found >= 0:
                # What a query reads of a text file is text.
                order = f'"{schema.time_column}"' + "::DOUBLE" * pa.types.is_floating(times.type)
                raise DataError(
                    file,
                    f"rows must be in the order of {schema.time_column}, as the latest are held out, but row "
                    f"{num_rows + found + 2 - len(latest):,} has {both[found + 1]} behind {both[found]}; sort them, "
                    f"or give --prepare-sql a file with: SELECT * FROM rows ORDER BY {order}",
                )
            num_rows += len(times)
            latest = both.slice(max(len(both) - 1, 0))


def times_of(file: SourcePath, schema: DataSchema) -> Iterator[pa.Array]:
    """Yield the `time_column` of a file in parts, as numbers or times.

    Raises:
        DataError: The file cannot be read or lacks the column, or a row has no time, or something else.
    """
    name, num_rows = str(schema.time_column), 0
    for part in (_of_parquet if is_parquet(file, schema) else _of_text)(file, schema, name):
        times = part.dictionary_decode() if pa.types.is_dictionary(part.type) else part
        if pa.types.is_floating(times.type):
            times = pc.if_else(pc.is_nan(times), None, times)
        if times.null_count:
            row = num_rows + pc.index(pc.is_null(times), True).as_py() + 1
            raise DataError(file, f"row {row:,} must have a value in the time_column {name}, but has none")
        yield _comparable(file, times, name)
        num_rows += len(times)


def _of_parquet(file: SourcePath, schema: DataSchema, name: str) -> Iterator[pa.Array]:
    with named_reading(file), open_parquet(file) as source:
        opened = pq.ParquetFile(source)
        if name not in opened.schema_arrow.names:
            found = ", ".join(opened.schema_arrow.names)
            raise DataError(file, f"must have the time_column {name} of the schema; has {found}")
        for batch in opened.iter_batches(columns=[name]):
            yield batch.column(0)


def _of_text(file: SourcePath, schema: DataSchema, name: str) -> Iterator[pa.Array]:
    layout = find_layout(file, schema, needed=[name])
    with named_reading(file), open_text(file) as stream:
        convert = pa_csv.ConvertOptions(
            include_columns=[name],
            column_types={name: pa.string()},
            null_values=["", *schema.missing_markers],
            strings_can_be_null=True,
        )
        for batch in pa_csv.open_csv(stream, **layout.reading_options(), convert_options=convert):
            yield pc.ascii_trim_whitespace(batch.column(0))


def _comparable(file: SourcePath, times: pa.Array, name: str) -> pa.Array:
    kind = times.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind):
        return times
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        for each in _TEXT_KINDS:
            try:
                return times.cast(each)
            except pa.ArrowInvalid:
                continue
    shown = times[0] if len(times) else kind
    raise DataError(
        file, f"the time_column {name} must hold numbers, or times such as 2026-11-01 12:00:00, got {shown!s}"
    )
