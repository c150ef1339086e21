"""The rules that every row of click data must meet, checked column by column; a slow form says what breaks them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.reading.canonical_text import canonical_text
from heterps_core.data.reading.column_texts import canonical_texts, column_texts
from heterps_core.data.schema import DataSchema

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SHOWN_CHARACTERS = 40

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """n rows of a source, checked, in file order."""

    labels: npt.NDArray[np.uint8]
    """[n], 1 for a click; [n, labels] where the schema names several."""

    weights: npt.NDArray[np.float32] | None
    """[n], finite and at least 0; None where the schema names no weight column."""

    numbers: npt.NDArray[np.float64]
    """[n, D] numeric columns in schema order; NaN where missing, finite elsewhere."""

    texts: tuple[pa.StringArray | pa.DictionaryArray | pa.ListArray, ...]
    """One array [n] per slot in schema order, of texts, of indices into different texts, or of lists of texts; null
    or empty where missing. Those of a history are joined later."""

    pointers: tuple[pa.Array, pa.Array] | None = None
    """Key and time [n] of each row, as they are; None where the schema has no history."""

    def where(self, is_kept: npt.NDArray[np.bool_]) -> RowBatch:
        """Return the rows [n] that are kept."""
        mask = pa.array(is_kept)
        return self._part(is_kept, lambda texts: texts.filter(mask))

    def between(self, first: int, stop: int) -> RowBatch:
        """Return the rows first..stop - 1."""
        return self._part(slice(first, stop), lambda texts: texts[first:stop])

    def _part(self, rows: Any, part_of: Callable[[pa.Array], pa.Array]) -> RowBatch:
        return RowBatch(
            labels=self.labels[rows],
            weights=None if self.weights is None else self.weights[rows],
            numbers=self.numbers[rows],
            texts=tuple(map(part_of, self.texts)),
            pointers=None if self.pointers is None else tuple(map(part_of, self.pointers)),
        )


def check_rows(record_batch: pa.RecordBatch, schema: DataSchema, *, is_padded: bool) -> RowBatch | None:
    """Return the rows of an Arrow batch, or None if any of them breaks a rule.

    The columns are `schema.used_columns`, in that order; of padded ones the blanks around a text are dropped.
    """
    columns = dict(zip(schema.used_columns, record_batch.columns, strict=True))
    pointers = None if schema.history is None else (columns[schema.history.key], columns[schema.history.time])
    targets = check_targets([columns[name] for name in schema.target_columns], schema, is_padded=is_padded)
    # Column by column in memory, as columns are checked and transformed.
    numbers = np.empty((record_batch.num_rows, len(schema.numeric_columns)), dtype=np.float64, order="F")
    num_present = 0
    for index, name in enumerate(schema.numeric_columns):
        column = columns[name] = _as_numbers(columns[name], schema, is_padded=is_padded)
        if column is None:
            return None
        num_present += len(column) - column.null_count
        numbers[:, index] = column.to_numpy(zero_copy_only=False)
    texts = tuple(
        clean_lists(columns[name], schema, is_padded=is_padded)
        if name in schema.list_columns
        else categories_of(columns[name])
        if name in schema.numeric_columns
        else clean(columns[name], schema, is_padded=is_padded)
        for name in schema.row_slots
    )
    if unequal_lists(dict(zip(schema.row_slots, texts, strict=True)), schema) is not None:
        return None
    # A null became NaN, so fewer finite numbers than values means that "nan" or "inf" was written.
    if targets is None or int(np.isfinite(numbers).sum()) != num_present:
        return None
    labels, weights = targets
    return RowBatch(labels=labels, weights=weights, numbers=numbers, texts=texts, pointers=pointers)


def check_targets(
    columns: Sequence[pa.Array], schema: DataSchema, *, is_padded: bool
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None] | None:
    """Return labels and weights of `schema.target_columns`, or None where a row breaks a rule."""
    of_columns = []
    for column in columns[: len(schema.labels)]:
        some = _labels(column, schema, is_padded=is_padded)
        if some is None:
            return None
        of_columns.append(some)
    labels = np.stack(of_columns, axis=1) if schema.label_columns else of_columns[0]
    if schema.weight_column is None:
        return labels, None
    numbers = _as_numbers(columns[-1], schema, is_padded=is_padded)
    if numbers is None or numbers.null_count:
        return None
    values = numbers.to_numpy(zero_copy_only=False)
    return (labels, values.astype(np.float32)) if _are_weights(values) else None


def _are_weights(values: npt.NDArray[np.float64]) -> bool:
    return bool(((values >= 0.0) & (values <= np.finfo(np.float32).max)).all())


def _labels(column: pa.Array, schema: DataSchema, *, is_padded: bool) -> npt.NDArray[np.uint8] | None:
    """Return 1 and 0 for the schema's label texts in any form, or None where any other text stands."""
    texts = clean(column, schema, is_padded=is_padded)
    texts = texts if pa.types.is_dictionary(texts.type) else texts.dictionary_encode()
    if texts.null_count:
        return None
    known, indices = texts.dictionary.to_pylist(), texts.indices.to_numpy()
    is_click, is_none = (
        np.array([_is_one_of(text, values) for text in known], dtype=bool)[indices]
        for values in (schema.label_positive, schema.label_negative)
    )
    return is_click.view(np.uint8) if bool((is_click | is_none).all()) else None


def _is_one_of(text: str | None, values: Sequence[str]) -> bool:
    """Tell whether a label's text is one of some, in any form but that of a missing value: 1.00 and True for 1."""
    if text is None or text in values:
        return text is not None
    form = canonical_text(text)
    return form != "" and form in map(canonical_text, values)


def row_problem(row: Mapping[str, str | None], schema: DataSchema) -> str | None:
    """Return which rule a row breaks, with the value and the fix; None if it is good."""
    for column in schema.labels:
        label = row[column]
        if not _is_one_of(label, (*schema.label_positive, *schema.label_negative)):
            return (
                f"the label (column {column}) must be {' or '.join(schema.label_positive)} for a click "
                f"and {' or '.join(schema.label_negative)} for none, got {shorten(label or '')}"
            )
    for column in schema.weight_columns:
        value = (row[column] or "").strip(" \t")
        if not _is_finite_number(value) or not _are_weights(np.array([float(value)])):
            return f"column {column} must be the row's weight, a finite number of at least 0, got {shorten(value)}"
    for column in schema.numeric_columns:
        value = (row[column] or "").strip(" \t")
        if value and value not in schema.missing_markers and not _is_finite_number(value):
            return (
                f"column {column} must be a finite number or empty, got {shorten(value)}; "
                f"if that means a missing value, add it to missing_markers of the schema"
            )
    return None


def unequal_lists(columns: Mapping[str, pa.Array], schema: DataSchema) -> tuple[int, str] | None:
    """Return the first row with other numbers of values in columns of one history, from 0, and what is wrong there.

    An empty list counts as one of a missing value.
    """
    for names in schema.histories:
        if names[0] not in columns:
            continue
        lengths = [
            pc.fill_null(pc.list_value_length(columns[name]), 0).to_numpy(zero_copy_only=False).clip(min=1)
            for name in names
        ]
        is_unequal = np.any([each != lengths[0] for each in lengths], axis=0)
        if is_unequal.any():
            row = int(is_unequal.argmax())
            found = ", ".join(f"{each[row]} in {name}" for name, each in zip(names, lengths, strict=True))
            return row, (
                f"columns of one history must have as many values in a row, got {found}; write empty texts for "
                f"values that are missing"
            )
    return None


def first_label(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Return of labels or logits, [n] or [n, labels], those that models are compared by, [n]."""
    return values if values.ndim == 1 else values[:, 0]


def shorten(text: str) -> str:
    """Return a text in quotes, cut where it is too long for a message."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")


def shown_name(name: str) -> str:
    """Return the name of a column as it fits into a line."""
    return name if name.isprintable() and len(name) <= 60 else shorten(name)


def clean_lists(column: pa.Array, schema: DataSchema, *, is_padded: bool) -> pa.ListArray:
    """Return a column of lists, or of texts that the schema's separator cuts into lists, as lists of texts."""
    if not is_list(column.type):
        column = pc.split_pattern(column_texts(column), schema.list_separator)
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    values = clean(column.flatten(), schema, is_padded=is_padded)
    offsets = pa.array(np.cumsum([0, *counts.tolist()]), pa.int32())
    return pa.ListArray.from_arrays(offsets, values)


def is_list(column_type: pa.DataType) -> bool:
    """Tell whether each row of an Arrow column holds a list."""
    types = pa.types
    return bool(
        types.is_list(column_type)
        or types.is_large_list(column_type)
        or types.is_fixed_size_list(column_type)
    )


def _as_numbers(column: pa.Array, schema: DataSchema, *, is_padded: bool) -> pa.DoubleArray | None:
    """Return a column as float64 with nulls where missing, or None if a text is no number."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = clean(column, schema, is_padded=is_padded)
        column = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    try:
        return column.cast(pa.float64(), safe=False)
    except pa.ArrowInvalid:
        return None


def categories_of(numbers: pa.DoubleArray) -> pa.DictionaryArray:
    """Return numbers as indices into their texts, null where missing.

    Fractions are rounded to float32 first, as a file or a caller may have them.
    """
    different = numbers.dictionary_encode()
    exact = different.dictionary
    is_whole, rounded = pc.equal(pc.floor(exact), exact), exact.cast(pa.float32(), safe=False)
    texts = pc.if_else(is_whole, column_texts(exact), column_texts(rounded))
    return pa.DictionaryArray.from_arrays(different.indices, texts)


def clean(
    column: pa.Array, schema: DataSchema, *, is_padded: bool, in_any_form: bool = False
) -> pa.StringArray | pa.DictionaryArray:
    """Return a column as texts without padding, null where a missing marker stands.

    In a dictionary, or as asked, markers are found in any form: 999.0 for 999.
    """
    if pa.types.is_dictionary(column.type):
        texts = clean(column.dictionary, schema, is_padded=is_padded, in_any_form=True)
        return pa.DictionaryArray.from_arrays(column.indices, texts)
    texts = column_texts(column)
    if is_padded:
        texts = pc.ascii_trim(texts, characters=" ")
    if schema.missing_markers:
        markers, forms = schema.missing_markers, texts
        if in_any_form:
            markers, forms = tuple(map(canonical_text, markers)), canonical_texts(texts)
        is_marker = pc.is_in(forms, pa.array(markers, pa.string()))
        texts = pc.if_else(is_marker, pa.scalar(None, pa.string()), texts)
    return texts


def is_number(text: str) -> bool:
    """Tell whether a text is a number, also infinity or NaN, without blanks around it."""
    try:
        pa.scalar(text).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _is_finite_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and bool(np.isfinite(float(text)))
