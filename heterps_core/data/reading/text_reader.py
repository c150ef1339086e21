"""Reads CSV and TSV files, plain or compressed, by Arrow's threaded parser, which says little about a bad row.

So when that fails, the file is read once more, line by line, to tell the line and what was expected there.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as pa_csv

from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.file_kinds import open_text, unreadable
from heterps_core.data.reading.parquet_reader import check_names
from heterps_core.data.reading.quote_escapes import WAY_OUT, QuoteEscapes
from heterps_core.data.reading.row_batch import (
    RowBatch,
    check_rows,
    clean_lists,
    row_problem,
    shorten,
    unequal_lists,
)
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

_BLOCK_BYTES = 4 * 1024 * 1024
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLayout:
    """How one text file is laid out."""

    delimiter: str
    columns: tuple[str, ...]
    num_lines_before_rows: int
    is_padded: bool
    is_quoted: bool = False
    """Whether the names of a header between tabs stand in quotes, as then all fields do."""

    has_rows: bool = True
    """Writers leave files with a header alone, or without a line."""

    @property
    def quote(self) -> str | None:
        """Fields may stand in quotes (RFC 4180), except between tabs, where a quote is a character."""
        return None if self.delimiter == "\t" and not self.is_quoted else '"'

    def reading_options(self) -> dict[str, Any]:
        """Return Arrow's options for reading and parsing."""
        return {
            "read_options": pa_csv.ReadOptions(
                column_names=self.columns, skip_rows=self.num_lines_before_rows, block_size=_BLOCK_BYTES
            ),
            "parse_options": pa_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote or False,
                newlines_in_values=self.quote is not None,
            ),
        }


def read_text(path: SourcePath, schema: DataSchema) -> Iterator[RowBatch]:
    """Yield the rows of a text file.

    Raises:
        DataError: The file cannot be read, or a line breaks the schema.
    """
    layout = find_layout(path, schema)
    num_good_rows = 0
    try:
        for record_batch in text_batches(path, layout, _converting(schema)):
            batch = check_rows(record_batch, schema, is_padded=schema.is_padded)
            if batch is None:
                raise _find_bad_line(path, layout, schema, num_good_rows)
            num_good_rows += len(batch.labels)
            yield batch
    except pa.ArrowInvalid as error:
        raise _find_bad_line(path, layout, schema, num_good_rows, cause=error) from error


def text_batches(
    path: SourcePath, layout: TextLayout, converting: pa_csv.ConvertOptions
) -> Iterator[pa.RecordBatch]:
    """Yield columns of a text file as they are to be converted; none of a file without rows.

    Raises:
        DataError: It cannot be read.
        pa.ArrowInvalid: A line cannot be read by its layout.
    """
    if not layout.has_rows:
        return
    try:
        with open_rows(path, layout) as stream:
            yield from pa_csv.open_csv(stream, **layout.reading_options(), convert_options=converting)
    except OSError as error:
        raise unreadable(path, error) from error


def open_rows(path: SourcePath, layout: TextLayout) -> pa.NativeFile:
    """Open a text file, plain or compressed, to read its text with quotes escaped as RFC 4180 does."""
    stream = open_text(path)
    if layout.quote is None:
        return stream
    return pa.TransformInputStream(stream, QuoteEscapes(path, layout.delimiter))


def check_text_columns(path: SourcePath, schema: DataSchema) -> None:
    """Check by its first line that a text file has the columns of a schema.

    Raises:
        DataError: It cannot be read, lacks a column, or its first line breaks the schema.
    """
    layout = find_layout(path, schema)
    if not layout.has_rows or layout.num_lines_before_rows > 0:
        return
    number, fields = next(_records(path, layout))
    problem = _line_problem(fields, layout, schema)
    if problem:
        raise DataError(path, problem, line=number)


def has_two_lines(path: SourcePath) -> bool:
    """Tell whether a text file has two lines that are not blank."""
    lines = (line for _, line in text_lines(path) if line)
    return next(lines, None) is not None and next(lines, None) is not None


def _converting(schema: DataSchema) -> pa_csv.ConvertOptions:
    # Padded numbers are read as text first: Arrow compares missing markers before it drops blanks.
    number_type = pa.string() if schema.is_padded else pa.float64()
    types = dict.fromkeys(schema.used_columns, pa.string())
    types.update(dict.fromkeys(schema.number_columns, number_type))
    return pa_csv.ConvertOptions(
        column_types=types,
        include_columns=schema.used_columns,
        null_values=["", *schema.missing_markers],
        strings_can_be_null=False,
    )


def find_layout(path: SourcePath, schema: DataSchema, *, needed: Sequence[str] | None = None) -> TextLayout:
    """Look at the first line to tell separator and header.

    Args:
        needed: Columns that it must have; by default all that training uses. Where the labels are not among them, a
            file without a header may lack their columns.

    Raises:
        DataError: The file cannot be read, or lacks a column.
    """
    needed = schema.used_columns if needed is None else needed
    lines = ((number, line) for number, line in text_lines(path) if line)
    number, first = next(lines, (0, b""))
    line = decode_line(path, number, first)
    separator = schema.separator or default_separator(line)
    layout = TextLayout(
        delimiter=separator[0],
        columns=schema.column_names,
        num_lines_before_rows=0,
        is_padded=schema.is_padded,
        is_quoted=line.startswith('"') and line.endswith('"') and '"\t"' in line,
    )
    if not first:
        return replace(layout, has_rows=False)
    try:
        fields = split_line(path, line, layout)
    except csv.Error as error:
        raise DataError(path, f"cannot be split into fields: {error}", line=number) from error
    has_header = schema.has_header
    if has_header is None:
        has_header = not set(fields).isdisjoint(schema.used_columns)
    if has_header:
        check_names(path, fields, needed)
        has_rows = next(lines, None) is not None
        return replace(layout, columns=tuple(fields), num_lines_before_rows=number, has_rows=has_rows)
    if not schema.column_names:
        raise DataError(
            path,
            f"expected a header with the columns {', '.join(needed)}; got {shorten(line)}; "
            f"add column_names to the schema if the file has no header, or its separator if that is no comma or tab",
            line=number,
        )
    unlabelled = tuple(name for name in schema.column_names if name not in schema.labels)
    if set(needed).isdisjoint(schema.labels) and len(fields) == len(unlabelled):
        return replace(layout, columns=unlabelled)
    return layout


def default_separator(line: str) -> str:
    """Return what separates the fields of a file whose schema does not say."""
    return "\t" if line.count("\t") >= max(1, line.count(",")) else ","


def text_lines(path: SourcePath, layout: TextLayout | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers from 1 and lines without their end, with a layout as `open_rows` reads them."""
    try:
        opened = open_rows(path, layout) if layout else open_text(path)
        # As many bytes as Arrow's parser asks for, as quotes are looked for in blocks.
        num_bytes = _BLOCK_BYTES if layout else io.DEFAULT_BUFFER_SIZE
        with io.BufferedReader(cast(Any, opened), num_bytes) as stream:
            # Arrow ends a line at \r, too.
            lines = chain.from_iterable(map(bytes.splitlines, stream))
            for number, line in enumerate(lines, start=1):
                yield number, line.removeprefix(_UTF8_MARK) if number == 1 else line
    except OSError as error:
        raise unreadable(path, error) from error


def decode_line(path: SourcePath, number: int, line: bytes) -> str:
    """Return a line as text; raises a `DataError` where it is no UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        raise DataError(path, f"must be UTF-8 text, got {found}", line=number) from error


def split_line(path: SourcePath, line: str, layout: TextLayout) -> list[str]:
    """Return the fields of a line."""
    if layout.quote is None:
        fields = line.split(layout.delimiter)
    else:
        line = QuoteEscapes(path, layout.delimiter).rewritten(line.encode()).decode()
        fields = next(csv.reader([line], delimiter=layout.delimiter, quotechar=layout.quote), [])
    return [field.strip(" ") for field in fields] if layout.is_padded else fields


def _find_bad_line(
    path: SourcePath,
    layout: TextLayout,
    schema: DataSchema,
    num_good_rows: int,
    cause: Exception | None = None,
) -> DataError:
    """Return the error of the first bad line after the given number of good rows."""
    num_rows = 0
    for number, fields in _records(path, layout):
        if number <= layout.num_lines_before_rows:
            continue
        num_rows += 1
        if num_rows <= num_good_rows:
            continue
        problem = _line_problem(fields, layout, schema)
        if problem:
            return DataError(path, problem, line=number)
    return DataError(path, f"cannot be parsed as {schema.name} data after {num_good_rows} rows: {cause}")


def _records(path: SourcePath, layout: TextLayout) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row, and the number of the line where it begins: quotes may hold line breaks."""
    lines = ((number, decode_line(path, number, line)) for number, line in text_lines(path, layout))
    if layout.quote is None:
        yield from ((number, split_line(path, line, layout)) for number, line in lines if line)
        return
    rows = csv.reader((f"{line}\n" for _, line in lines), delimiter=layout.delimiter, quotechar=layout.quote)
    first = 1
    try:
        for fields in rows:
            if fields:
                yield first, [field.strip(" ") for field in fields] if layout.is_padded else fields
            first = rows.line_num + 1
    except csv.Error as error:
        raise DataError(
            path, f"cannot be split into fields ({error}); does each quote end?", line=first
        ) from error


def _line_problem(fields: list[str], layout: TextLayout, schema: DataSchema) -> str | None:
    if len(fields) != len(layout.columns):
        has_escapes = layout.quote is not None and any("\\" in field for field in fields)
        way_out = (
            WAY_OUT
            if has_escapes
            else "correct the line, or name columns and separator in a schema: heterps init proposes one"
        )
        return (
            f"expected {len(layout.columns)} fields of the {schema.name} schema separated by {layout.delimiter!r}, "
            f"got {len(fields)}; {way_out}"
        )
    row = dict(zip(layout.columns, fields, strict=True))
    problem = row_problem(row, schema)
    if problem is None:
        lists = {
            name: clean_lists(pa.array([row[name]]), schema, is_padded=layout.is_padded)
            for names in schema.histories
            for name in names
            if name in schema.row_slots
        }
        unequal = unequal_lists(lists, schema)
        problem = None if unequal is None else unequal[1]
    return problem
