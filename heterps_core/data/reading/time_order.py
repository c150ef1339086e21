"""Refuses rows that are not in the order of the schema's `time_column`: the latest are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.reading.arrow_errors import ARROW_ERRORS
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import is_text, plain_column
from heterps_core.data.reading.readers import read_columns
from heterps_core.data.reading.row_batch import shorten
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

_TEXT_KINDS = (
    pa.int64(),
    pa.float64(),
    *(pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("ns", "us")),
)
"""Types that a text may stand for: numbers, times by ISO 8601, or these with a zone; nanoseconds end in 2262."""

_FIRST_VALUES = 100
"""Enough to tell most columns that hold no times."""


def check_time_order(files: Sequence[SourcePath], schema: DataSchema) -> None:
    """Check that rows are in the order of the schema's `time_column`, each file after the one before.

    Of each file this column alone is read. Without a `time_column` nothing is checked.

    Raises:
        DataError: A row is earlier than the one before it, or has no time; names file and row, which count from 1.
    """
    latest: pa.Array | None = None
    for file in files if schema.time_column else ():
        num_rows = 0
        for times in times_of(file, schema):
            first, rows = _alike(file, times if latest is None else latest, times, schema)
            both = pa.concat_arrays([first, rows][latest is None :])
            found = pc.index(is_earlier(both), True).as_py()
            if found >= 0:
                # What a query reads of a text file is text.
                quoted = str(schema.time_column).replace('"', '""')
                order = f'"{quoted}"' + "::DOUBLE" * (_is_number(rows.type) and not is_parquet(file))
                raise DataError(
                    file,
                    f"rows must be in the order of {schema.time_column}, as the latest are held out, but row "
                    f"{num_rows + found + 2 - (len(both) - len(rows)):,} has {_shown(both[found + 1])} after "
                    f"{_shown(both[found])}; sort them, or give --prepare-sql a file with: SELECT * FROM rows "
                    f"ORDER BY {order}",
                )
            num_rows += len(times)
            latest = both.slice(len(both) - 1)


def times_of(file: SourcePath, schema: DataSchema) -> Iterator[pa.Array]:
    """Yield the `time_column` of a file in parts of at least one row, as numbers or times.

    Raises:
        DataError: The file cannot be read or lacks the column, or a row has no time, or something else.
    """
    name, num_rows = str(schema.time_column), 0
    for batch in read_columns(file, schema, [name], missing_markers=schema.missing_markers):
        part = batch.column(0)
        if not len(part):
            continue
        if pa.types.is_string(part.type):
            part = pc.ascii_trim_whitespace(part)
        times = comparable_times(part)
        if times is None:
            raise DataError(
                file,
                f"the time_column {name} must hold numbers, or times such as 2026-11-01 12:00:00, got "
                f"{shorten(_shown(part[0]))}",
            )
        if times.null_count:
            row = num_rows + pc.index(pc.is_null(times), True).as_py() + 1
            raise DataError(file, f"row {row:,} must have a value in the time_column {name}, but has none")
        yield times
        num_rows += len(times)


def comparable_times(column: pa.Array) -> pa.Array | None:
    """Return a column as numbers or times that can be compared, null where missing; None where it holds others."""
    try:
        times = plain_column(column)
        if pa.types.is_dictionary(times.type):
            times = plain_column(times.dictionary_decode())
        if pa.types.is_floating(times.type) or pa.types.is_decimal(times.type):
            times = times.cast(pa.float64())
            return pc.if_else(pc.is_nan(times), None, times)
    except ARROW_ERRORS:
        return None
    if pa.types.is_temporal(times.type) or pa.types.is_uint64(times.type):
        return times
    kinds = _TEXT_KINDS if is_text(times.type) else (pa.int64(),) * pa.types.is_integer(times.type)
    for kind in kinds:
        try:
            # Arrow reads a text to its end although its first values are of another kind.
            times.slice(0, _FIRST_VALUES).cast(kind)
            return times.cast(kind)
        except ARROW_ERRORS:
            continue
    return None


def is_earlier(times: pa.Array) -> pa.BooleanArray:
    """Return for each of the times [n] but the first whether it is earlier than the one before it, [n - 1]."""
    return pc.less(times.slice(1), times.slice(0, max(len(times) - 1, 0)))


def _alike(
    file: SourcePath, latest: pa.Array, times: pa.Array, schema: DataSchema
) -> tuple[pa.Array, pa.Array]:
    """Return the latest time before some times, and these, in one type: numbers, or times of one unit and zone."""
    if latest.type == times.type:
        return latest, times
    try:
        if _is_number(latest.type) and _is_number(times.type):
            return latest.cast(pa.float64(), safe=False), times.cast(pa.float64(), safe=False)
        if pa.types.is_temporal(latest.type) and pa.types.is_temporal(times.type):
            return latest.cast(times.type, safe=False), times
    except ARROW_ERRORS:
        pass
    raise DataError(
        file, f"column {schema.time_column} holds {times.type}, {latest.type} before; write both alike"
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _shown(value: pa.Scalar) -> str:
    try:
        return str(value)
    except ARROW_ERRORS:
        # Such as a date beyond the year 9999.
        return f"a {value.type} that has no text"
