"""The first rows of a table that was never seen, column by column, so that an odd one spoils no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from heterps_core.data.reading.arrow_errors import ARROW_ERRORS, named_reading, one_line
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.column_texts import column_texts
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.parquet_reader import is_text, parquet_rows, plain_column
from heterps_core.data.reading.parquet_rows import ParquetRows
from heterps_core.data.reading.row_batch import is_list
from heterps_core.data.reading.text_reader import (
    TextLayout,
    decode_line,
    default_separator,
    open_rows,
    split_line,
    text_lines,
)
from heterps_core.errors import DataError

SAMPLED_ROWS, SAMPLED_BYTES = 200_000, 32 * 1024**2
"""Rows of a Parquet file, and bytes of a text file, that are read; more would hardly change the type of a column."""

MISSING_TEXTS = ("NA", "N/A", "NaN", "nan", "NULL", "null", "None", "\\N", "?")
"""Texts that mean no value; those found become `missing_markers`."""

SEPARATORS = ",\t;|\x01\x1f^~"
"""Separators of fields, the more usual first; Hive writes \\x01."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledColumn:
    """A column of the first rows, n of them."""

    name: str
    type: str
    """For people."""

    stored: pa.Array
    """[n] as the readers see it: of a text file, texts."""

    values: pa.Array
    """[n] as what the texts look like, null where one stands for no value."""

    problem: str = ""
    """Why it cannot be used; empty where it can, otherwise the arrays have no rows."""

    @property
    def texts(self) -> pa.Array:
        """[n] texts as categories are, or lists of them; null where missing. Raises one of `ARROW_ERRORS`."""
        array = self.stored if is_text(self.stored.type) else self.values
        if is_list(array.type):
            return array.cast(pa.list_(pa.string()))
        texts = column_texts(array)
        texts.validate(full=True)
        return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSample:
    """The first rows of a file."""

    columns: Sequence[SampledColumn]
    """Each name once."""

    num_rows: int
    missing_texts: tuple[str, ...] = ()
    """Texts that stand for no value."""

    separator: str | None = None
    """Separator of a text whose fields are padded with blanks, or separated by another character than the default."""


def sample_table(
    file: SourcePath,
    column_names: Sequence[str] = (),
    *,
    separator: str | None = None,
    known_names: Sequence[str] = (),
) -> TableSample:
    """Read the first rows of a file; those of a text without a header are given their names.

    Args:
        separator: Of the fields of a text; None for the one of `SEPARATORS` that the first line has most of.
        known_names: Where one of them stands in the first line of a text, numbers there are names, too.

    Raises:
        DataError: It cannot be read, or has no header or no row.
    """
    if is_parquet(file):
        if column_names:
            raise DataError(file, "names its columns itself, as it is Parquet; leave --columns out")
        sample = _of_parquet(file)
    else:
        with named_reading(file, problem="cannot be read as text with a header"):
            sample = _of_text(file, column_names, separator or SEPARATORS, known_names)
    if not sample.num_rows:
        raise DataError(file, "must hold at least one row, got none")
    return sample


def _of_parquet(file: SourcePath) -> TableSample:
    with parquet_rows(file) as rows:
        fields = rows.columns
        columns = [
            _parquet_column(rows, name, str(fields.field(fields.names.index(name)).type))
            for name in dict.fromkeys(fields.names)
            if name not in rows.view.values
        ]
    num_rows = min((len(column.stored) for column in columns if not column.problem), default=0)
    columns = [
        replace(column, stored=column.stored[:num_rows], values=column.values[:num_rows])
        for column in columns
    ]
    texts = _missing_texts([column.values for column in columns])
    return TableSample(
        columns=[_parquet_without(texts, each) for each in columns], num_rows=num_rows, missing_texts=texts
    )


def _parquet_column(rows: ParquetRows, name: str, kind: str) -> SampledColumn:
    if problem := _name_problem(name, rows.columns.names):
        return _left_out(name, kind, problem)
    try:
        batches = rows.batches(SAMPLED_ROWS, [name])
        stored = next((batch.column(name) for batch in batches if batch.num_rows), pa.nulls(0))
        values = plain_column(stored)
        if pa.types.is_dictionary(values.type):
            values = plain_column(values.dictionary_decode())
    except ARROW_ERRORS as error:
        return _left_out(name, kind, f"cannot be read: {one_line(error)}")
    return SampledColumn(name=name, type=kind, stored=stored, values=values)


def _parquet_without(texts: Sequence[str], column: SampledColumn) -> SampledColumn:
    values = _without(texts, column.values)
    return replace(column, values=values, stored=values if is_text(values.type) else column.stored)


def _of_text(
    file: SourcePath, column_names: Sequence[str], separators: str, known_names: Sequence[str]
) -> TableSample:
    layout, names, separator = _layout(file, column_names, separators)
    if not column_names and {*known_names}.isdisjoint(name.lower() for name in names):
        _check_are_names(file, names)
    missing = [
        f"{blank}{text}" for blank in ("", " ")[: 1 + layout.is_padded] for text in ("", *MISSING_TEXTS)
    ]
    inferred = _first_block(file, layout, null_values=missing, strings_can_be_null=True)
    # What is no UTF-8 is taken for bytes.
    are_texts = [not pa.types.is_binary(kind) for kind in inferred.schema.types]
    raw = _first_block(
        file,
        layout,
        null_values=[""],
        column_types={
            name: pa.string() if is_text_column else pa.binary()
            for name, is_text_column in zip(layout.columns, are_texts, strict=True)
        },
    )
    columns = [
        SampledColumn(name=name, type=str(values.type), stored=stored, values=values)
        if is_text_column and not (problem := _name_problem(name, names))
        else _left_out(name, str(values.type), problem if is_text_column else "is no UTF-8 text")
        for name, stored, values, is_text_column in zip(
            names, _arrays(raw, layout), _arrays(inferred, layout), are_texts, strict=True
        )
    ]
    texts = _missing_texts([column.stored for column in columns])
    return TableSample(
        columns=[
            replace(each, stored=_without(texts, each.stored))
            for each in {each.name: each for each in columns}.values()
        ],
        num_rows=raw.num_rows,
        missing_texts=texts,
        separator=separator,
    )


def _layout(
    file: SourcePath, column_names: Sequence[str], separators: str
) -> tuple[TextLayout, tuple[str, ...], str | None]:
    """Return how a text is laid out, its columns numbered, then their names, and the separator for its schema."""
    lines = ((number, line) for number, line in text_lines(file) if line)
    number, first = next(lines, (0, b""))
    if not number:
        raise DataError(file, "must hold at least one row, got none")
    line = decode_line(file, number, first)
    layouts = [
        TextLayout(delimiter=each, columns=(), num_lines_before_rows=0, is_padded=False)
        for each in separators
    ]
    layout = max(
        layouts,
        key=lambda each: (len(split_line(file, line, each)) == len(column_names), line.count(each.delimiter)),
    )
    fields = next(lines, (0, b""))[1].split(layout.delimiter.encode())[1:]
    if fields and all(field.startswith(b" ") for field in fields):
        layout = replace(layout, is_padded=True)
    separator = f"{layout.delimiter} " if layout.is_padded else layout.delimiter
    names = tuple(column_names) or tuple(split_line(file, line, layout))
    layout = replace(
        layout,
        # Arrow finds columns by their names, which may stand there twice.
        columns=tuple(map(str, range(len(names)))),
        num_lines_before_rows=0 if column_names else number,
    )
    return layout, names, None if separator == default_separator(line) else separator


def _first_block(file: SourcePath, layout: TextLayout, **convert: Any) -> pa.Table:
    options = layout.reading_options()
    options["read_options"].block_size = SAMPLED_BYTES
    with open_rows(file, layout) as stream:
        reader = pa_csv.open_csv(stream, **options, convert_options=pa_csv.ConvertOptions(**convert))
        batches = [batch for batch in [next(iter(reader), None)] if batch is not None]
        return pa.Table.from_batches(batches, reader.schema)


def _arrays(table: pa.Table, layout: TextLayout) -> list[pa.Array]:
    """Return the columns of a text, without blanks around padded texts."""
    columns = [column.combine_chunks() for column in table.columns]
    return [
        pc.ascii_trim(column, characters=" ") if layout.is_padded and is_text(column.type) else column
        for column in columns
    ]


def _check_are_names(file: SourcePath, names: Sequence[str]) -> None:
    if any(name.strip().lstrip("+-").replace(".", "", 1).isdecimal() for name in names):
        raise DataError(
            file,
            f"must have a header that names its columns, got {', '.join(names[:5])}, ...; name all {len(names)} by "
            f"--columns, or train without a schema if this is the Criteo format",
        )


def _name_problem(name: str, names: Sequence[str]) -> str:
    if names.count(name) > 1:
        return f"stands there {names.count(name)} times: write the columns with other names"
    return "" if name else "has no name"


def _left_out(name: str, kind: str, problem: str) -> SampledColumn:
    return SampledColumn(name=name, type=kind, stored=pa.nulls(0), values=pa.nulls(0), problem=problem)


def _missing_texts(columns: Sequence[pa.Array]) -> tuple[str, ...]:
    found = {
        text
        for column in columns
        if is_text(column.type)
        for text in pc.unique(
            column.filter(pc.is_in(column, pa.array(MISSING_TEXTS, column.type)))
        ).to_pylist()
    }
    return tuple(text for text in MISSING_TEXTS if text in found)


def _without(texts: Sequence[str], column: pa.Array) -> pa.Array:
    if not is_text(column.type) or not texts:
        return column
    is_missing = pc.is_in(column, pa.array(texts, column.type))
    return pc.if_else(is_missing, pa.scalar(None, column.type), column)
