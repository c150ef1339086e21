"""Proposes a schema for a table that was never seen: what each column looks like in a sample of rows, and its role.

A person is to check it: whether a whole number counts something or names something cannot be seen in the data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.distinct_values import ColumnValues, ValueCounter
from heterps_core.data.proposal.column_checks import (
    best_time_column,
    find_times,
    leak_auc,
    leak_remark,
    order_remark,
    words_of,
)
from heterps_core.data.proposal.table_sample import SAMPLED_ROWS, SampledColumn, TableSample, sample_table
from heterps_core.data.reading.arrow_errors import ARROW_ERRORS
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.readers import check_columns, read_rows
from heterps_core.data.reading.row_batch import is_list, shorten
from heterps_core.data.schema import MAX_LIST_LENGTH, DataSchema, MultiHotColumn
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.text_table import Table

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "target", "converted", "y")
POSITIVE_TEXTS = ("1", "1.0", "true", "yes", "y", "t", "click", "clicked")

LABEL, NUMERIC, COUNT, CATEGORICAL = "label", "numeric", "count", "categorical"
MULTI_HOT, TIME, LEFT_OUT = "multi-hot", "time", "left out"

_SHOWN_CHARACTERS = 60

_NAMING_WORDS = {"id", "ids", "uuid", "guid", "code", "hash", "zip", "hour", "weekday", "day"}
_GLUED_ID = re.compile(
    r"(user|item|ad|adgroup|campaign|customer|session|device|site|app|page|shop|product|brand|cate|member)(ids?)?"
)
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

    is_leak: bool = False
    """Whether the column alone tells the label."""


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
                    _shown(seen.values.name),
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
        separator: Of the fields of a text; None for the one that its first line has most of.

    Raises:
        DataError: The file cannot be read, has no header, or no column that can be the label or a category.
        ConfigurationError: There is no column of the name `label`.
    """
    sample = sample_table(
        file, column_names, separator=separator, known_names=(*LABEL_NAMES, (label or "").lower())
    )
    labels = _label_of(file, sample, label)
    positive, negative = _label_texts(file, labels)
    is_click = pc.is_in(labels.texts, pa.array(positive)).to_numpy(zero_copy_only=False)
    times = _times(sample, labels)
    time_column = best_time_column(times)
    columns = [
        _seen_label(each) if each is labels else _seen(each, is_click, times, time_column=time_column)
        for each in sample.columns
    ]

    def schema_of(columns: Sequence[SeenColumn]) -> DataSchema:
        def named(*roles: str) -> tuple[str, ...]:
            return tuple(seen.values.name for seen in columns if seen.role in roles)

        return DataSchema(
            name=re.sub(r"[^A-Za-z0-9]+", "_", PurePath(source).name.split(".")[0]).strip("_").lower()
            or "clicks",
            label_column=labels.name,
            label_positive=positive,
            label_negative=negative,
            time_column=time_column,
            numeric_columns=named(NUMERIC, COUNT),
            count_columns=named(COUNT),
            categorical_columns=named(CATEGORICAL),
            multi_hot_columns=tuple(
                MultiHotColumn(name=seen.values.name, max_length=seen.list_length)
                for seen in columns
                if seen.role == MULTI_HOT
            ),
            missing_markers=sample.missing_texts,
            separator=sample.separator,
            list_separator=";" if sample.separator == "|" else "|",
            column_names=tuple(column_names),
        )

    readable = _readable(file, columns, schema_of)
    return ProposedSchema(
        schema=schema_of(readable),
        columns=readable,
        num_rows=sample.num_rows,
        click_share=float(is_click.mean()),
    )


def _readable(
    file: SourcePath, columns: Sequence[SeenColumn], schema_of: Callable[[Sequence[SeenColumn]], DataSchema]
) -> Sequence[SeenColumn]:
    """Return the columns, those left out that the reader refuses in the first rows.

    Raises:
        DataError: No column of categories is left, or the reader refuses the rows for another reason.
    """
    slots = [seen for seen in columns if seen.role in (CATEGORICAL, MULTI_HOT)]
    if not slots:
        doubts = [f"{_shown(seen.values.name)} {seen.remark}" for seen in columns if seen.is_leak]
        raise DataError(
            file,
            "; ".join(
                ["must have a column of categories for a click model, but none looks like one", *doubts]
            ),
        )
    refusal = _refusal(file, schema_of(columns))
    if refusal is None:
        return columns
    refusals = {seen.values.name: _refusal(file, schema_of([seen])) for seen in slots}
    good = next((seen for seen in slots if refusals[seen.values.name] is None), None)
    if good is None:
        raise refusal
    refusals |= {
        seen.values.name: _refusal(file, schema_of([good, seen]))
        for seen in columns
        if seen.role in (NUMERIC, COUNT)
    }
    kept = [
        seen
        if (found := refusals.get(seen.values.name)) is None
        else replace(seen, role=LEFT_OUT, remark=f"is refused: {found.problem}")
        for seen in columns
    ]
    refusal = _refusal(file, schema_of(kept))
    if refusal is not None:
        raise refusal
    return kept


def _refusal(file: SourcePath, schema: DataSchema) -> DataError | None:
    """Return why the reader refuses the first rows of a file; None where it reads them."""
    num_rows = 0
    try:
        check_columns(file, schema)
        for batch in read_rows([file], schema):
            num_rows += len(batch.labels)
            if num_rows >= SAMPLED_ROWS:
                break
    except DataError as error:
        return error
    return None


def _times(sample: TableSample, labels: SampledColumn) -> dict[str, pa.Array]:
    """Return the columns of times by their names."""
    found = {
        column.name: find_times(column.name, column.stored)
        for column in sample.columns
        if column is not labels and not column.problem
    }
    return {name: times for name, times in found.items() if times is not None}


def _label_of(file: SourcePath, sample: TableSample, label: str | None) -> SampledColumn:
    """Return the label column of the name that is given, or of one that is called as labels are."""
    by_name = {column.name: column for column in sample.columns}
    if label is not None and label not in by_name:
        raise ConfigurationError(
            f"the label must be a column of {file}, which has {_listed(by_name)}; got {label}"
        )
    found = [name for name in by_name if name.lower() in LABEL_NAMES] if label is None else [label]
    if not found:
        raise DataError(
            file,
            f"has no column that is called as labels are ({', '.join(LABEL_NAMES)}); name it by --label, of "
            f"{_listed(by_name)}",
        )
    column = by_name[found[0]]
    if column.problem:
        raise DataError(file, f"the label column {column.name} cannot be used: it {column.problem}")
    try:
        is_label = not is_list(column.texts.type)
    except ARROW_ERRORS:
        is_label = False
    if not is_label:
        raise DataError(
            file,
            f"the label must hold texts or numbers, but column {column.name} holds {column.type}; name another "
            f"column by --label",
        )
    return column


def _label_texts(file: SourcePath, label: SampledColumn) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of a click and of none: of two values the one that is called so, else the rarer one.

    A value may have several texts, such as 1 and 1.0, or yes and Yes.
    """
    counts = {each["values"]: each["counts"] for each in pc.value_counts(label.texts).to_pylist()}
    groups: dict[str | float, list[str]] = {}
    for text in counts:
        if text is not None:
            groups.setdefault(_label_value(text), []).append(text)
    if None in counts or len(groups) != 2:
        raise DataError(
            file,
            f"the label must have a value in every row, of two, but column {label.name} has {len(counts)}: "
            f"{', '.join(map(repr, list(counts)[:5]))}; name another column by --label",
        )
    both = list(groups.values())
    called = [texts for texts in both if any(text.lower() in POSITIVE_TEXTS for text in texts)]
    rarer = min(both, key=lambda texts: sum(counts[text] for text in texts))
    positive = called[0] if len(called) == 1 else rarer
    negative = both[1] if positive is both[0] else both[0]
    return tuple(positive), tuple(negative)


def _label_value(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text.strip().lower()


def _seen_label(column: SampledColumn) -> SeenColumn:
    return SeenColumn(
        type=column.type,
        values=_counted(column.name, column.texts).column(column.name, num_rows=len(column.stored)),
        role=LABEL,
        remark="is label_positive what a click is?",
    )


def _seen(
    column: SampledColumn,
    is_click: npt.NDArray[np.bool_],
    times: Mapping[str, pa.Array],
    *,
    time_column: str | None,
) -> SeenColumn:
    """Return what a column looks like, and its role."""
    problem, num_rows = column.problem, len(is_click)
    try:
        texts = None if problem else column.texts
    except ARROW_ERRORS:
        problem, texts = "cannot be read as numbers or texts", None
    if texts is None:
        num_missing = column.stored.null_count if len(column.stored) else 0
        empty = ColumnValues(name=column.name, missing_share=num_missing / num_rows, num_values=0)
        return SeenColumn(type=column.type, values=empty, role=LEFT_OUT, remark=problem)
    counter = _counted(column.name, texts)
    values = counter.column(column.name, num_rows=num_rows)
    if column.name in times and values.num_values > 1:
        role = TIME
        remark = order_remark(times[column.name], orders_rows=column.name == time_column)
    else:
        role, remark = _role(column.values, values, num_occurrences=counter.num_occurrences)
    leak = ""
    if role in (NUMERIC, COUNT):
        leak = leak_remark(leak_auc(_numbers(column.values), is_click))
    elif role == CATEGORICAL:
        leak = leak_remark(leak_auc(texts, is_click))
    lists = "categorical_columns" if role == CATEGORICAL else "numeric_columns"
    return SeenColumn(
        type=column.type,
        values=values,
        role=LEFT_OUT if leak else role,
        remark=f"{leak}; if it is known before the click, name it in {lists}" if leak else remark,
        list_length=_list_length(texts),
        is_leak=bool(leak),
    )


def _counted(name: str, texts: pa.Array) -> ValueCounter:
    counter = ValueCounter()
    counter.add(texts)
    return counter


def _list_length(texts: pa.Array) -> int:
    if not is_list(texts.type):
        return 1
    lengths = pc.fill_null(pc.list_value_length(texts), 0).to_numpy()
    return min(max(int(np.quantile(lengths, COVERED_SHARE, method="higher")), 1), MAX_LIST_LENGTH)


def _role(array: pa.Array, values: ColumnValues, *, num_occurrences: int) -> tuple[str, str]:
    """Return what a column is taken for that holds no times, and what a person should check."""
    if values.num_values < 2:
        return LEFT_OUT, "has one value at most"
    if pa.types.is_temporal(array.type):
        return LEFT_OUT, "a time of day or a duration: write it as a number, such as its hour"
    is_nearly_unique = values.num_values > NEARLY_UNIQUE * num_occurrences
    numbers = _numbers(array)
    if numbers is not None:
        return _role_of_numbers(
            numbers, values, is_whole=pa.types.is_integer(array.type), is_nearly_unique=is_nearly_unique
        )
    if is_nearly_unique:
        return LEFT_OUT, UNIQUE_REMARK
    if is_list(array.type):
        return MULTI_HOT, "values in the order of time belong to sequence_columns"
    return CATEGORICAL, ""


def _role_of_numbers(
    column: pa.Array, values: ColumnValues, *, is_whole: bool, is_nearly_unique: bool
) -> tuple[str, str]:
    numbers = column.drop_null().to_numpy(zero_copy_only=False)
    # Whole numbers of a column with gaps are often written as floating ones.
    if _names_something(values.name) and (is_whole or bool((numbers == np.floor(numbers)).all())):
        is_category = True
    else:
        is_category = is_whole and values.num_values <= FEW_VALUES
    if is_category:
        if is_nearly_unique:
            return LEFT_OUT, UNIQUE_REMARK
        return CATEGORICAL, "a number that counts something belongs to numeric_columns"
    if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
        return LEFT_OUT, "holds infinity, or numbers beyond 3.4e38: leave the field empty where none is known"
    median = float(np.median(numbers))
    is_skewed = numbers.min() >= 0 and numbers.max() > SKEWED * max(median, 1.0)
    doubt = "a number that names something belongs to categorical_columns" if is_whole else ""
    return (COUNT if is_skewed else NUMERIC), doubt


def _names_something(name: str) -> bool:
    words = words_of(name)
    if not words:
        return False
    glued = _GLUED_ID.fullmatch(words[-1])
    return (
        words[-1] in _NAMING_WORDS
        or words[0] == "id"
        # The name of a thing alone, such as user, is that of its id.
        or (glued is not None and (glued[2] is not None or len(words) == 1))
    )


def _numbers(array: pa.Array) -> pa.DoubleArray | None:
    """Return a column of numbers [n] as float64, null where missing or NaN; None of another."""
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        return None
    numbers = array.cast(pa.float64(), safe=False)
    return pc.if_else(pc.is_nan(numbers), None, numbers)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(_shown, names))


def _shown(name: str) -> str:
    """Return a column's name as it fits into a line."""
    return name if name.isprintable() and len(name) <= _SHOWN_CHARACTERS else shorten(name)
