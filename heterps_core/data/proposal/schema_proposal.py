"""Proposes a schema for a table that was never seen: what each column looks like in a sample of rows, and its role.

A person is to check it: whether a whole number counts something or names something cannot be seen in the data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from heterps_core.data.column_texts import column_texts
from heterps_core.data.distinct_values import ColumnValues, ValueCounter
from heterps_core.data.proposal.column_checks import leak_remark, order_remark
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.file_kinds import is_parquet, open_text
from heterps_core.data.reading.row_batch import is_list
from heterps_core.data.schema import MAX_LIST_LENGTH, DataSchema, MultiHotColumn
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.text_table import Table

SAMPLED_ROWS, SAMPLED_BYTES = 200_000, 32 * 1024**2
"""Of a Parquet file, and of one of text; more would hardly change what a column is."""

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "target", "converted", "y")
POSITIVE_TEXTS = ("1", "1.0", "true", "yes", "y", "t", "click", "clicked")

MISSING_TEXTS = ("NA", "N/A", "NaN", "nan", "NULL", "null", "None", "\\N", "?")
"""That mean no value where they stand: they become `missing_markers`."""

SEPARATORS = ",\t;|\x01"
"""That fields may stand between; a schema need not name the first two."""

LABEL, NUMERIC, COUNT, CATEGORICAL = "label", "numeric", "count", "categorical"
MULTI_HOT, TIME, LEFT_OUT = "multi-hot", "time", "left out"

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
_NAMES_SOMETHING = re.compile(r"(^|_)(id|ids|code|hash|zip|hour|weekday|day)$|Id$|ID$")
FEW_VALUES = 20
"""A column of so few whole numbers names something more often than it counts."""

SKEWED = 10.0
"""A maximum so many times the median is that of a count or an amount, which enters as a logarithm."""

NEARLY_UNIQUE = 0.9
"""Different values over all of them, above which a text names the row and says nothing of the next one."""

UNIQUE_REMARK = "nearly every row has a value of its own"

COVERED_SHARE = 0.99
"""Of the lists: so many are no longer than the `max_length` that is proposed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenColumn:
    """What a column looks like in the sample."""

    type: str
    values: ColumnValues
    role: str
    remark: str
    """What to check; empty where nothing is doubtful."""

    list_length: int = 1
    """Of lists: values of a row to use at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposedSchema:
    """A schema for a person to check, and what it was made from."""

    schema: DataSchema
    columns: Sequence[SeenColumn]
    num_rows: int
    """Of the sample."""

    click_share: float
    """Of these rows."""

    def table(self) -> Table:
        """Return what was seen, with the table rows that so many rows of data would get."""
        return Table(
            columns={
                "column": "",
                "type": "",
                "role": "",
                "missing": ".1%",
                "values": ",d",
                "table rows": ",d",
                "check": "",
            },
            rows=[
                (
                    seen.values.name,
                    seen.type,
                    seen.role,
                    seen.values.missing_share,
                    seen.values.num_values,
                    seen.values.table_rows(self.num_rows) if seen.role in (CATEGORICAL, MULTI_HOT) else None,
                    seen.remark,
                )
                for seen in self.columns
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRows:
    """The first rows of a file."""

    rows: pa.Table
    missing_texts: tuple[str, ...]
    """That stand for no value."""

    separator: str | None = None
    """Of a text whose fields are padded with blanks, or separated by neither comma nor tab."""


def propose_schema(
    file: SourcePath,
    *,
    source: str,
    label: str | None = None,
    column_names: Sequence[str] = (),
    separator: str | None = None,
) -> ProposedSchema:
    """Look at the first rows of a file and propose a schema.

    Args:
        file: Parquet, or text with a header, plain or gzip; here or in a bucket.
        source: File or folder as its user names it, whose last part names the schema.
        label: Name of the label column; None for one that is called as labels are.
        column_names: Of a text without a header, all of them in order.
        separator: Of fields; None for the one of `SEPARATORS` that the first line has most of.

    Raises:
        DataError: The file cannot be read, has no header, or no column that can be the label or a category.
        ConfigurationError: There is no column of the name `label`.
    """
    found = first_rows(file, column_names, separator)
    sample, missing_texts = found.rows, found.missing_texts
    name = _label_of(file, sample, label)
    columns = [
        _seen(field, _without(missing_texts, sample.column(field)), is_label=field == name)
        for field in sample.column_names
    ]

    def named(*roles: str) -> tuple[str, ...]:
        return tuple(seen.values.name for seen in columns if seen.role in roles)

    if name not in named(LABEL):
        raise DataError(
            file,
            f"the label must hold texts or numbers, but column {name} holds {sample.column(name).type}; name another "
            f"column by --label",
        )
    if not named(CATEGORICAL, MULTI_HOT):
        raise DataError(file, "must have a column of categories for a click model, but none looks like one")
    positive, negative = _label_texts(file, name, sample.column(name))
    is_click = pc.equal(column_texts(sample.column(name).combine_chunks()), positive[0]).to_numpy(
        zero_copy_only=False
    )
    columns = [
        replace(
            seen,
            remark=leak_remark(sample.column(seen.values.name).combine_chunks(), is_click) or seen.remark,
        )
        if seen.role in (NUMERIC, COUNT, CATEGORICAL)
        else seen
        for seen in columns
    ]
    schema = DataSchema(
        name=re.sub(r"[^A-Za-z0-9]+", "_", PurePath(source).name.split(".")[0]).strip("_").lower()
        or "clicks",
        label_column=name,
        label_positive=positive,
        label_negative=negative,
        time_column=next(iter(named(TIME)), None),
        numeric_columns=named(NUMERIC, COUNT),
        count_columns=named(COUNT),
        categorical_columns=named(CATEGORICAL),
        multi_hot_columns=tuple(
            MultiHotColumn(name=seen.values.name, max_length=seen.list_length)
            for seen in columns
            if seen.role == MULTI_HOT
        ),
        missing_markers=missing_texts,
        separator=found.separator,
        column_names=tuple(column_names),
    )
    return ProposedSchema(
        schema=schema, columns=columns, num_rows=sample.num_rows, click_share=float(is_click.mean())
    )


def first_rows(file: SourcePath, column_names: Sequence[str] = (), delimiter: str | None = None) -> FirstRows:
    """Read the first rows of a file as they lie; those of a text without a header are given their names.

    Raises:
        DataError: It cannot be read, or has no header.
    """
    separator = None
    try:
        if is_parquet(file):
            if column_names:
                raise DataError(file, "names its columns itself, as it is Parquet; leave --columns out")
            with file.open("rb") as opened:
                batches = pq.ParquetFile(opened).iter_batches(batch_size=SAMPLED_ROWS)
                sample = raw = pa.Table.from_batches([next(iter(batches))])
        else:
            delimiter, is_padded = _layout(file, delimiter)
            separator = (
                f"{delimiter} " if is_padded else delimiter if delimiter not in SEPARATORS[:2] else None
            )
            missing = [
                f"{blank}{text}" for blank in ("", " ")[: 1 + is_padded] for text in ("", *MISSING_TEXTS)
            ]
            sample = _first_block(
                file, delimiter, column_names, null_values=missing, strings_can_be_null=True
            )
            as_texts = dict.fromkeys(sample.column_names, pa.string())
            raw = _first_block(file, delimiter, column_names, null_values=[""], column_types=as_texts)
            sample, raw = (_without_blanks(each) if is_padded else each for each in (sample, raw))
    except StopIteration as error:
        raise DataError(file, "must hold at least one row, got none") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(file, f"cannot be read as Parquet, or as text with a header: {error}") from error
    if any(_NUMBER.fullmatch(name.strip()) for name in sample.column_names):
        raise DataError(
            file,
            f"must have a header that names its columns, got {', '.join(sample.column_names[:5])}, ...; name all "
            f"{sample.num_columns} by --columns, or train without a schema if this is the Criteo format",
        )
    found = {text for column in raw.columns for text in _missing_texts(column)}
    return FirstRows(
        rows=sample,
        missing_texts=tuple(text for text in MISSING_TEXTS if text in found),
        separator=separator,
    )


def _first_block(file: SourcePath, delimiter: str, column_names: Sequence[str], **convert: Any) -> pa.Table:
    reader = pa_csv.open_csv(
        open_text(file),
        pa_csv.ReadOptions(block_size=SAMPLED_BYTES, column_names=column_names or None),
        pa_csv.ParseOptions(
            delimiter=delimiter, quote_char=delimiter != "\t" and '"', newlines_in_values=delimiter != "\t"
        ),
        pa_csv.ConvertOptions(**convert),
    )
    return pa.Table.from_batches([reader.read_next_batch()])


def _without(texts: tuple[str, ...], column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_string(column.type):
        return column
    return pc.if_else(pc.is_in(column, pa.array(texts, pa.string())), pa.scalar(None, pa.string()), column)


def _missing_texts(column: pa.ChunkedArray) -> list[str]:
    if not pa.types.is_string(column.type):
        return []
    texts: list[str] = pc.unique(column.filter(pc.is_in(column, pa.array(MISSING_TEXTS)))).to_pylist()
    return texts


def _layout(file: SourcePath, delimiter: str | None) -> tuple[str, bool]:
    """Return what separates fields, and whether a blank stands before each but the first of the first row."""
    with open_text(file) as stream:
        header, _, rows = stream.read(65_536).partition(b"\n")
    delimiter = delimiter or max(SEPARATORS, key=lambda each: header.count(each.encode()))
    fields = rows.partition(b"\n")[0].split(delimiter.encode())[1:]
    return delimiter, bool(fields) and all(field.startswith(b" ") for field in fields)


def _without_blanks(table: pa.Table) -> pa.Table:
    """Return a table without blanks around texts and names of columns."""
    columns = [
        pc.ascii_trim(column, characters=" ") if pa.types.is_string(column.type) else column
        for column in table.columns
    ]
    return pa.table(columns, names=[name.strip(" ") for name in table.column_names])


def _label_of(file: SourcePath, sample: pa.Table, label: str | None) -> str:
    names = sample.column_names
    if label is not None:
        if label not in names:
            raise ConfigurationError(
                f"the label must be a column of {file}, which has {', '.join(names)}; got {label}"
            )
        return label
    found = [name for name in names if name.lower() in LABEL_NAMES]
    if not found:
        raise DataError(
            file,
            f"has no column that is called as labels are ({', '.join(LABEL_NAMES)}); name it by --label, of "
            f"{', '.join(names)}",
        )
    return str(found[0])


def _label_texts(
    file: SourcePath, name: str, column: pa.ChunkedArray
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of a click and of none: of two values the one that is called so, else the rarer one."""
    counts = pc.value_counts(column_texts(column.combine_chunks())).to_pylist()
    texts = {each["values"]: each["counts"] for each in counts}
    if None in texts or len(texts) != 2:
        raise DataError(
            file,
            f"the label must have a value in every row, of two, but column {name} has {len(texts)}: "
            f"{', '.join(map(repr, list(texts)[:5]))}; name another column by --label",
        )
    called = [text for text in texts if text.lower() in POSITIVE_TEXTS]
    positive = called[0] if len(called) == 1 else min(texts, key=lambda text: texts[text])
    return (positive,), tuple(text for text in texts if text != positive)


def _seen(name: str, column: pa.ChunkedArray, *, is_label: bool) -> SeenColumn:
    array = column.combine_chunks()
    kind = array.type
    try:
        texts = array.cast(pa.list_(pa.string())) if is_list(kind) else column_texts(array)
    except pa.ArrowNotImplementedError:
        empty = ColumnValues(name=name, missing_share=array.null_count / len(array), num_values=0)
        return SeenColumn(
            type=str(kind), values=empty, role=LEFT_OUT, remark="cannot be read as numbers or texts"
        )
    counter = ValueCounter()
    counter.add(texts)
    values = counter.column(name, num_rows=counter.num_rows)
    if is_label and not is_list(kind):
        return SeenColumn(
            type=str(kind), values=values, role=LABEL, remark="is label_positive what a click is?"
        )
    role, remark = _role(array, values, num_occurrences=counter.num_occurrences)
    return SeenColumn(
        type=str(kind), values=values, role=role, remark=remark, list_length=_list_length(texts)
    )


def _list_length(texts: pa.Array) -> int:
    if not is_list(texts.type):
        return 1
    lengths = pc.fill_null(pc.list_value_length(texts), 0).to_numpy()
    return min(max(int(np.quantile(lengths, COVERED_SHARE, method="higher")), 1), MAX_LIST_LENGTH)


def _role(array: pa.Array, values: ColumnValues, *, num_occurrences: int) -> tuple[str, str]:
    """Return what a column is taken for, and what a person should check."""
    if values.num_values < 2:
        return LEFT_OUT, "has one value at most"
    is_whole = pa.types.is_integer(array.type)
    is_nearly_unique = values.num_values > NEARLY_UNIQUE * num_occurrences
    if pa.types.is_temporal(array.type):
        return TIME, order_remark(array)
    if is_whole or pa.types.is_floating(array.type):
        if is_whole and (_NAMES_SOMETHING.search(values.name) or values.num_values <= FEW_VALUES):
            if is_nearly_unique:
                return LEFT_OUT, UNIQUE_REMARK
            return CATEGORICAL, "a number that counts something belongs to numeric_columns"
        numbers = array.cast(pa.float64())
        median = pc.quantile(numbers, 0.5)[0].as_py()
        is_skewed = pc.min(numbers).as_py() >= 0 and pc.max(numbers).as_py() > SKEWED * max(median, 1.0)
        doubt = "a number that names something belongs to categorical_columns" if is_whole else ""
        return (COUNT if is_skewed else NUMERIC), doubt
    if is_nearly_unique:
        return LEFT_OUT, UNIQUE_REMARK
    if is_list(array.type):
        return MULTI_HOT, "values in the order of time belong to sequence_columns"
    return CATEGORICAL, ""
