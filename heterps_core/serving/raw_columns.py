"""Raw columns as a caller has them, made into a model's input as training made it from files.

A caller's types are looser than a file's; what can be read is read as the file reader would have read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import NoneType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.features import FeatureSpec
from heterps_core.data.history.event_join import EventJoin
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.column_texts import column_texts, identity_problem
from heterps_core.data.reading.parquet_reader import plain_column
from heterps_core.data.reading.row_batch import (
    categories_of,
    clean,
    clean_lists,
    is_number,
    shorten,
    unequal_lists,
)
from heterps_core.data.row_arrays import dense_input, ids_of_texts
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

SOURCE = "the rows to predict"
"""What errors call the input, in the place of a file."""

Columns = Mapping[str, Sequence[Any]]
"""Raw values by column: lists, NumPy arrays, pandas Series or Arrow arrays of one length."""

_FEW_ROWS = 64
"""Up to so many rows, all columns of texts are cleaned by one call: a call of Arrow takes longer than their texts."""


def model_input(
    columns: Columns,
    schema: DataSchema,
    transform: NumericTransform,
    features: FeatureSpec,
    events: Callable[[], EventJoin] | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
    """Return a model's dense input [N, D] and ids [N, K] of columns of N values each; see `RowArrays`.

    The sequences of a history are columns, too, or `events` returns what the rows are joined with by their keys:
    before their times, or with the last of all events where the rows have no column of times, or none in it.

    Raises:
        DataError: A column is missing, has another length, or holds in the place of numbers what is no finite number.
    """
    sequences = tuple(each.name for each in schema.history_columns)
    is_joined = schema.history is not None and not any(name in columns for name in sequences)
    needed = (
        *schema.numeric_columns,
        *schema.text_columns,
        *(schema.pointer_columns[:1] if is_joined else sequences),
    )
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(SOURCE, f"must have the columns {', '.join(missing)}")
    lengths = sorted({len(columns[name]) for name in needed})
    if len(lengths) > 1:
        raise DataError(SOURCE, f"must have columns of one length, got {', '.join(map(str, lengths))}")
    raw_ND = np.empty((lengths[0], len(schema.numeric_columns)))
    for position, name in enumerate(schema.numeric_columns):
        raw_ND[:, position] = _numbers(name, columns[name], schema)
    _check_numbers(raw_ND, schema)
    joined = _joined_texts(columns, schema) if lengths[0] <= _FEW_ROWS else {}
    texts = [
        _lists(name, columns[name], schema)
        if name in schema.list_columns
        else categories_of(pa.array(raw_ND[:, schema.numeric_columns.index(name)], from_pandas=True))
        if name in schema.numeric_columns
        else joined[name]
        if name in joined
        else _texts(name, columns[name], schema)
        for name in (schema.row_slots if is_joined else schema.slot_columns)
    ]
    unequal = unequal_lists(dict(zip(schema.slot_columns, texts, strict=False)), schema)
    if unequal is not None:
        raise DataError(SOURCE, f"row {unequal[0] + 1}: {unequal[1]}")
    if is_joined:
        assert events is not None
        key, time = schema.pointer_columns
        times = _times(time, columns[time]) if time in columns else None
        texts += events().lists(_texts(key, columns[key], schema), times, path=SOURCE)
    return dense_input(raw_ND, schema.numeric_columns, transform), ids_of_texts(texts, features)


def _numbers(name: str, values: Sequence[Any], schema: DataSchema) -> npt.NDArray[np.float64]:
    """Return a numeric column [N], NaN where a value or a text is missing."""
    if _holds_only(values, int, float):
        with suppress(OverflowError):
            return np.array(values, dtype=np.float64)
    array = _arrow(values, lambda value: _as_text(name, value, is_category=False))
    if pa.types.is_string(array.type):
        array = _without_markers(pc.utf8_trim_whitespace(array), schema)
    try:
        array = array.cast(pa.float64(), safe=False)
    except pa.ArrowException as error:
        raise DataError(SOURCE, f"column {name} must hold numbers, got {_first_text(array)}") from error
    numbers: npt.NDArray[np.float64] = array.fill_null(np.nan).to_numpy(zero_copy_only=False)
    return numbers


def _check_numbers(raw_ND: npt.NDArray[np.float64], schema: DataSchema) -> None:
    """Put NaN in the place of missing markers, and refuse infinite numbers."""
    markers = [float(marker) for marker in schema.missing_markers if is_number(marker)]
    raw_ND[np.isin(raw_ND, markers)] = np.nan
    is_infinite = np.isinf(raw_ND)
    if is_infinite.any():
        row, position = np.argwhere(is_infinite)[0]
        raise DataError(
            SOURCE,
            f"column {schema.numeric_columns[position]} must hold finite numbers, got {raw_ND[row, position]}; None "
            f"or NaN stands for a missing value",
        )


def _holds_only(values: Sequence[Any], *kinds: type) -> bool:
    """Tell whether a column is a list of values of these very types, and of None."""
    return isinstance(values, list) and set(map(type, values)) <= {NoneType, *kinds}


def _joined_texts(columns: Columns, schema: DataSchema) -> dict[str, pa.StringArray]:
    """Return the categorical columns that are lists of texts, each [N], as `_texts` cleans them."""
    names = [
        name
        for name in schema.text_columns
        if name not in schema.list_columns and _holds_only(columns[name], str)
    ]
    try:
        texts = pa.array(list(chain.from_iterable(columns[name] for name in names)), pa.string())
    except ValueError:  # a text that is no Unicode, which `_texts` refuses by its column
        return {}
    cleaned = clean(texts, schema, is_padded=schema.is_padded, in_any_form=True)
    num_rows = len(cleaned) // max(len(names), 1)
    return {name: cleaned.slice(index * num_rows, num_rows) for index, name in enumerate(names)}


def _texts(name: str, values: Sequence[Any], schema: DataSchema) -> pa.DictionaryArray:
    """Return a categorical column [N] as indices into texts, null where missing."""
    array = _arrow(values, lambda value: _as_text(name, value))
    _check_identity(name, array)
    try:
        return clean(array.dictionary_encode(), schema, is_padded=schema.is_padded)
    except pa.ArrowException as error:
        raise _no_plain_values(name, array.type) from error


def _lists(name: str, values: Sequence[Any], schema: DataSchema) -> pa.ListArray:
    """Return a column [N] of lists, or of texts with the schema's separator, as lists of texts."""

    def as_texts(value: Any) -> list[str | None] | None:
        if isinstance(value, list | tuple):
            return [_as_text(name, each) for each in value]
        text = _as_text(name, value)
        return None if text is None else list(text.split(schema.list_separator))

    def check_is_no_list(text: str) -> None:
        if text.startswith("[") and text.endswith("]"):
            raise DataError(
                SOURCE,
                f"column {name} must hold lists, or texts with {schema.list_separator!r} between the values, got the "
                f"text {shorten(text)}; read such texts as lists, with ast.literal_eval or json.loads",
            )

    if not isinstance(values, pa.Array | pa.ChunkedArray):
        # pandas reads lists as arrays, of which empty ones may have another type.
        values = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    array = _arrow(values, as_texts)
    if pa.types.is_string(array.type):
        for text in array.drop_null().unique().to_pylist():
            check_is_no_list(text)
    _check_identity(name, array)
    try:
        return clean_lists(array, schema, is_padded=schema.is_padded)
    except pa.ArrowException as error:
        raise _no_plain_values(name, array.type) from error


def _check_identity(name: str, column: pa.Array) -> None:
    problem = identity_problem(column)
    if problem is not None:
        raise DataError(SOURCE, f"column {name} {problem}")


def _arrow(values: Sequence[Any], as_texts: Callable[[Any], object]) -> pa.Array:
    """Return a column as one Arrow array with NaN as null; one of mixed types as texts, or lists of texts."""
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    if getattr(getattr(values, "dt", None), "tz", None) is not None:
        values = cast(Any, values).dt.tz_convert(None)
    if str(getattr(values, "dtype", "")).startswith("period"):
        # Arrow has a number for a period of pandas.
        values = cast(Any, values).astype(str)
    if isinstance(values, pa.ChunkedArray):
        values = values.unify_dictionaries().combine_chunks()
    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        array = pa.array([as_texts(value) for value in values])
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = plain_column(array)
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array.cast(pa.float64())), pa.scalar(None, array.type), array)
    return array.cast(pa.string()) if pa.types.is_large_string(array.type) else array


def _times(name: str, values: Sequence[Any]) -> pa.Array:
    """Return a column of times as one Arrow array, with their time zone."""
    try:
        array = (
            values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, from_pandas=True)
        )
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            SOURCE, f"column {name} must hold times of one type, got several; write all alike"
        ) from error
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _as_text(name: str, value: Any, *, is_category: bool = True) -> str | None:
    """Return one value of a mixed column as Arrow writes it in a column of its own type."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    try:
        array = pa.array(np.array([value]) if isinstance(value, np.generic) else [value], from_pandas=True)
        if is_category:
            _check_identity(name, array)
        text: str | None = column_texts(array)[0].as_py()
    except (pa.ArrowException, TypeError, ValueError) as error:
        if isinstance(value, np.generic) and value != value:  # NaT of no unit
            return None
        raise _no_plain_values(name, type(value).__name__) from error
    return text


def _no_plain_values(name: str, kind: object) -> DataError:
    return DataError(SOURCE, f"column {name} must hold texts or numbers, got values of type {kind}")


def _without_markers(texts: pa.StringArray, schema: DataSchema) -> pa.StringArray:
    markers = pa.array(["", *schema.missing_markers], pa.string())
    return pc.if_else(pc.is_in(texts, markers), pa.scalar(None, pa.string()), texts)


def _first_text(array: pa.Array) -> str:
    """Return the first value of a column that is no number, for a message."""
    if not pa.types.is_string(array.type):
        return f"values of type {array.type}"
    return shorten(next(text for text in array.to_pylist() if text is not None and not is_number(text)))
