"""What a column of a table that was never seen looks like, and its role in a click model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.distinct_values import ColumnValues, ValueCounter
from heterps_core.data.proposal.column_checks import leak_auc, leak_remark, order_remark, words_of
from heterps_core.data.proposal.table_sample import SampledColumn
from heterps_core.data.reading.arrow_errors import ARROW_ERRORS
from heterps_core.data.reading.parquet_reader import is_text
from heterps_core.data.reading.row_batch import is_list, shorten
from heterps_core.data.schema import MAX_LIST_LENGTH

LABEL, NUMERIC, COUNT, CATEGORICAL = "label", "numeric", "count", "categorical"
MULTI_HOT, TIME, LEFT_OUT = "multi-hot", "time", "left out"

_NAMING_WORDS = {"id", "ids", "uuid", "guid", "code", "hash", "zip", "hour", "weekday", "day"}
_GLUED_ID = re.compile(
    r"(user|item|ad|adgroup|campaign|customer|session|device|site|app|page|shop|product|brand|cate|member)(ids?)?"
)
FEW_VALUES = 20
"""A column of so few whole numbers names something more often than it counts."""

ROWS_PER_VALUE = 100
"""Rows for each different number of a column, from which on its numbers are categories, too. Adult's numbers have 220
and more: AUC 0.9317 for 0.9170 on its training part. Criteo's counts, most with fewer, gained nothing
(docs/QUALITY.md)."""

SKEWED = 10.0
"""A maximum so many times the median is that of a count or an amount, which enters as a logarithm."""

NEARLY_UNIQUE = 0.9
"""Different values over all of them, above which a text names the row and says nothing of the next one."""

UNIQUE_REMARK = "nearly every row has a value of its own"

_ROW_NUMBERS = re.compile(r"__index_level_\d+__|Unnamed: \d+")
"""How pandas names a table's index in Parquet and CSV."""

_NUMBERS_AS_TEXTS = r"^[$€£¥]?[+-]?(?:[0-9]{1,3}(?:[,.' ][0-9]{3})+|[0-9]+)(?:[.,][0-9]+)? ?[%$€£¥]?$"
_DIGITS, _LISTS_AS_TEXTS, _SEPARATED = (
    r"^[0-9]*$",
    r"^\[.*\]$",
    r"^[^|^]+(?:\|[^|^]+)+$|^[^|^]+(?:\^[^|^]+)+$",
)

COVERED_SHARE = 0.99
"""Share of the lists that are no longer than the proposed `max_length`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenColumn:
    """What a column looks like in the sample."""

    type: str
    values: ColumnValues
    role: str
    remark: str
    """What to check; empty where nothing is doubtful."""

    list_length: int = 1
    """Most values of a list to use."""

    is_leak: bool = False
    """Whether the column alone tells the label."""

    has_few_values: bool = False
    """Whether there are many rows for each different value."""

    @property
    def is_number_and_category(self) -> bool:
        """Whether it is a column of few numbers, each of which is a category, too."""
        return self.role in (NUMERIC, COUNT) and self.has_few_values

    @property
    def has_table(self) -> bool:
        """Whether a model has a table of vectors for its values."""
        return self.role in (CATEGORICAL, MULTI_HOT) or self.is_number_and_category


def label_column(column: SampledColumn) -> SeenColumn:
    """Return what the label looks like."""
    return SeenColumn(
        type=column.type,
        values=_counted(column.texts).column(column.name, num_rows=len(column.stored)),
        role=LABEL,
        remark="is label_positive what a click is?",
    )


def seen_column(
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
    counter = _counted(texts)
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
    seen = SeenColumn(
        type=column.type,
        values=values,
        role=LEFT_OUT if leak else role,
        remark=f"{leak}; if it is known before the click, name it in {lists}" if leak else remark,
        list_length=_list_length(texts),
        is_leak=bool(leak),
        has_few_values=counter.num_occurrences >= ROWS_PER_VALUE * values.num_values,
    )
    if seen.is_number_and_category:
        return replace(seen, remark="few numbers, which occur often, so each is a category, too")
    return seen


def _counted(texts: pa.Array) -> ValueCounter:
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
    doubt = _doubt_of_texts(array)
    if is_nearly_unique:
        return LEFT_OUT, doubt or UNIQUE_REMARK
    if is_list(array.type):
        return MULTI_HOT, "values in the order of time belong to sequence_columns"
    return CATEGORICAL, doubt


def _doubt_of_texts(array: pa.Array) -> str:
    """Return that texts are written numbers or lists; nothing of others, or of digits alone, as ids are."""
    if not is_text(array.type):
        return ""

    def matches(pattern: str) -> pa.BooleanArray:
        return pc.match_substring_regex(array, pattern)

    example = shorten(array.drop_null()[0].as_py())
    if pc.all(matches(_NUMBERS_AS_TEXTS)).as_py() and not pc.all(matches(_DIGITS)).as_py():
        return (
            f"numbers as texts, such as {example}: with digits and a point alone they may be numeric_columns"
        )
    are_separated = matches(_SEPARATED)
    if pc.all(matches(_LISTS_AS_TEXTS)).as_py() or pc.any(are_separated).as_py():
        example = shorten((array.filter(are_separated).drop_null() or array.drop_null())[0].as_py())
        return f"lists as texts, such as {example}: as lists, or with list_separator, they may be multi_hot_columns"
    return ""


def _role_of_numbers(
    column: pa.Array, values: ColumnValues, *, is_whole: bool, is_nearly_unique: bool
) -> tuple[str, str]:
    numbers = column.drop_null().to_numpy(zero_copy_only=False)
    if _ROW_NUMBERS.fullmatch(values.name):
        return LEFT_OUT, "numbers the rows, as the index of pandas does, and says nothing of the next one"
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
