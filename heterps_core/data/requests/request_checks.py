"""Finds the requests of a source, and refuses rows that are not of one request as the schema says.

Shapes: Q requests of the source, n rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.epoch_order import Int64Array
from heterps_core.data.hashing import hash_texts, text_lengths
from heterps_core.data.reading.bucket_path import SourcePath
from heterps_core.data.reading.column_texts import column_texts
from heterps_core.data.reading.parquet_reader import plain_column
from heterps_core.data.reading.readers import read_columns
from heterps_core.data.reading.row_batch import RowBatch, shorten
from heterps_core.data.requests.request_rows import Bools
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError


def find_requests(files: Sequence[SourcePath], schema: DataSchema) -> Int64Array:
    """Return the first row of each request of a source, then the number of rows [Q + 1].

    Of each file the `request_column` alone is read.

    Raises:
        DataError: A row has no request, or one that ended before, in this file or in an earlier one.
    """
    starts, hashes, ends, num_rows = [], [], [0], 0
    for file in files:
        last = None
        for texts in _requests_of(file, schema):
            found = hash_texts(texts, slot=0)
            is_first = np.append(last is None or found[0] != last, found[1:] != found[:-1])
            places = np.flatnonzero(is_first)
            starts.append(num_rows + places)
            hashes.append(found[places])
            last, num_rows = found[-1], num_rows + len(found)
        ends.append(num_rows)
    starts_Q, hashes_Q = np.concatenate(starts), np.concatenate(hashes)
    order = np.argsort(hashes_Q, kind="stable")
    for place in np.flatnonzero(hashes_Q[order][1:] == hashes_Q[order][:-1]):
        _check_are_others(files, schema, ends, starts_Q[order[place : place + 2]].tolist())
    return np.append(starts_Q, num_rows)


def _requests_of(file: SourcePath, schema: DataSchema) -> Iterator[pa.StringArray]:
    name, num_rows = str(schema.request_column), 0
    for batch in read_columns(file, schema, [name], missing_markers=schema.missing_markers):
        texts = column_texts(plain_column(batch.column(0)))
        is_missing = text_lengths(texts) == 0
        if is_missing.any():
            raise DataError(
                file,
                f"row {num_rows + int(is_missing.argmax()) + 1:,} must have a value in the request_column {name}, "
                f"but has none; write which request it is of, another one for each row that stands alone",
            )
        num_rows += len(texts)
        if len(texts):
            yield texts


def _check_are_others(
    files: Sequence[SourcePath], schema: DataSchema, ends: Sequence[int], rows: Sequence[int]
) -> None:
    """Refuse two rows at which the same request begins; they have the same hash."""
    places = [
        (number := int(np.searchsorted(ends, row, side="right")) - 1, row - ends[number]) for row in rows
    ]
    texts = []
    for number, row in places:
        for part in _requests_of(files[number], schema):
            if row < len(part):
                texts.append(part[row].as_py())
                break
            row -= len(part)
    if texts[0] == texts[1]:
        (first_file, first), (file, again) = places
        raise DataError(
            files[file],
            f"rows of a request must follow one another in one file, but request {shorten(texts[0])} begins in row "
            f"{first + 1:,} of {files[first_file]} and again in row {again + 1:,} here; sort the rows by "
            f"{', '.join(schema.order_columns)}, and write each request to one file",
        )


def differing_row(batch: RowBatch, schema: DataSchema, is_same: Bools) -> tuple[int, str] | None:
    """Return the first row with other request columns than the row before it, and the column; None for none.

    Args:
        is_same: Which rows are of the request of the row before them [n].
    """
    for name, numbers in zip(schema.numeric_columns, batch.numbers.T, strict=True):
        differs = (numbers[1:] != numbers[:-1]) & ~(np.isnan(numbers[1:]) & np.isnan(numbers[:-1]))
        if name in schema.request_columns and (differs & is_same[1:]).any():
            return int((differs & is_same[1:]).argmax()) + 1, name
    for name, texts in zip(schema.slot_columns, batch.texts, strict=True):
        if name in schema.request_columns:
            differs = _differs(texts) & is_same[1:]
            if differs.any():
                return int(differs.argmax()) + 1, name
    return None


def _differs(texts: pa.Array) -> Bools:
    """Return for each row but the first whether it has another value or list than the row before [n - 1]."""
    if not pa.types.is_list(texts.type):
        codes = _codes(texts)
        is_other: Bools = codes[1:] != codes[:-1]
        return is_other
    codes = _codes(texts.flatten())
    counts = pc.fill_null(pc.list_value_length(texts), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    differs: Bools = counts[1:] != counts[:-1]
    # Of a list as long as the one before it each value is compared with the one as far before it.
    row_of_value = np.repeat(np.arange(len(counts)), counts)
    places = np.flatnonzero(np.append(False, ~differs)[row_of_value])
    others = places[codes[places] != codes[places - counts[row_of_value[places]]]]
    differs[row_of_value[others] - 1] = True
    return differs


def _codes(texts: pa.Array) -> npt.NDArray[np.int64]:
    """Return a number for each text, equal for equal ones; a missing one is the empty text."""
    if pa.types.is_dictionary(texts.type):
        different = pa.concat_arrays([texts.dictionary, pa.array([""], texts.dictionary.type)])
        # Indices of 8 bits may have no number left for a missing value.
        indices = texts.indices.cast(pa.int64()).fill_null(len(texts.dictionary))
        of_texts: npt.NDArray[np.int64] = _codes(different)[indices]
        return of_texts
    encoded = pc.fill_null(texts, "").dictionary_encode()
    codes: npt.NDArray[np.int64] = encoded.indices.to_numpy().astype(np.int64)
    return codes
