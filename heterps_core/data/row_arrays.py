"""Rows as a model takes them: numbers transformed, texts hashed.

D = dense columns, K = ids of a row, which are those of the categorical slots, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.features import FIRST_TEXT_RULE, NO_ID, SEQUENCE, FeatureSpec
from heterps_core.data.hashing import hash_texts, keys_of_hashes, rows_of_hashes, text_lengths
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.column_texts import other_forms
from heterps_core.data.reading.row_batch import RowBatch, first_label
from heterps_core.errors import DataError

_MOST_JOINED_TEXTS = 1 << 16

_LONG = 64
"""Most values of a row in all sequences, above which padding costs more than an array for each row, 120 bytes."""

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowArrays:
    """n rows."""

    dense: npt.NDArray[np.float32]
    """[n, D], standardised; 0 where the value is missing."""

    ids: Ids
    """[n, K], embedding rows inside the table of each slot, 0 where missing, or keys where ids are dynamic; `NO_ID`
    after the end of a list."""

    labels: npt.NDArray[np.uint8]
    """[n], 1 for a click; [n, labels] where there are several."""

    weights: npt.NDArray[np.float32] | None = None
    """[n], what each row counts for; None where all count alike."""


def rows_as_arrays(batch: RowBatch, features: FeatureSpec, transform: NumericTransform) -> RowArrays:
    """Return rows as a model of these features and this transform takes them."""
    return RowArrays(
        dense=dense_input(batch.numbers, features.dense_names, transform),
        ids=ids_of_texts(batch.texts, features),
        labels=batch.labels,
        weights=batch.weights,
    )


def dense_input(
    numbers: npt.NDArray[np.float64], names: Sequence[str], transform: NumericTransform
) -> npt.NDArray[np.float32]:
    """Return the dense input [N, D] of raw numbers [N, D] of columns of these names.

    Raises:
        DataError: A number leaves the range of float32 there.
    """
    dense = transform.apply(numbers)
    if not np.isfinite(dense).all():
        row, column = np.argwhere(~np.isfinite(dense))[0]
        raise DataError(
            "the rows",
            f"column {names[column]} must hold numbers that stay in 32-bit range once they are "
            f"standardised, got {numbers[row, column]}; leave it empty where it is missing",
        )
    return dense


def targets_of(parts: Sequence[RowArrays]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return the first label of the rows of all parts, [n], and what each row counts for."""
    weights = [
        np.ones(len(rows.labels), np.float32) if rows.weights is None else rows.weights for rows in parts
    ]
    return np.concatenate([first_label(rows.labels) for rows in parts]), np.concatenate(weights)


def ids_of_texts(slots: Sequence[pa.Array], features: FeatureSpec) -> Ids:
    """Return the ids [n, K] of each slot's texts, or lists of texts, [n], by the rule of the features for texts.

    Each text of a dictionary is hashed once, also where lists hold indices into it, as are lists of a dictionary.
    """
    num_rows, shared = len(slots[0]), list(map(_is_dictionary_of_lists, slots))
    rows = [
        texts.indices.to_numpy() if own else slice(None) for texts, own in zip(slots, shared, strict=True)
    ]
    slots = [texts.dictionary if own else texts for texts, own in zip(slots, shared, strict=True)]
    flat = [texts.flatten() if pa.types.is_list(texts.type) else texts for texts in slots]
    different = [texts.dictionary if pa.types.is_dictionary(texts.type) else texts for texts in flat]
    ids_NK: npt.NDArray[Any] = np.empty(
        (num_rows, features.num_ids), dtype=np.int32 if features.dynamic_ids is None else np.int64
    )
    of_slots = _ids_of_columns(different, features)
    for slot, (texts, values, columns, ids) in enumerate(
        zip(slots, flat, features.id_columns, of_slots, strict=True)
    ):
        own = ids_NK[:, columns.start : columns.stop]
        if pa.types.is_dictionary(values.type):
            indices = values.indices.fill_null(len(ids) - 1) if values.null_count else values.indices
            ids = np.append(ids.take(indices.to_numpy()), ids[-1])
        if pa.types.is_list(texts.type):
            is_sequence = features.slot_poolings[slot] == SEQUENCE
            keeps_missing = features.slot_histories.count(features.slot_histories[slot]) > 1
            of_lists = _ids_of_lists(
                texts, ids, length=len(columns), keeps_last=is_sequence, keeps_missing=keeps_missing
            )
            own[:] = of_lists[rows[slot]]
        else:
            own[:, 0] = ids[:-1]
    return ids_NK


def _is_dictionary_of_lists(texts: pa.Array) -> bool:
    return bool(pa.types.is_dictionary(texts.type) and pa.types.is_list(texts.type.value_type))


def _ids_of_columns(columns: Sequence[pa.StringArray], features: FeatureSpec) -> Iterator[Ids]:
    """Yield for each slot the ids of its texts [m] and then the id of a missing value, [m + 1]."""
    of_slots, empty = list(enumerate(columns)), pa.array([""])
    # All columns at once where they are short, as each call of NumPy takes a microsecond.
    is_short = sum(map(len, columns)) <= _MOST_JOINED_TEXTS
    for part in [of_slots] if is_short else [[each] for each in of_slots]:
        texts = pa.concat_arrays([each for _, column in part for each in (column, empty)])
        stops = np.cumsum([len(column) + 1 for _, column in part])
        # Slots of one table have one salt, so a text has one row in all of them.
        salts = np.repeat([features.slot_tables[slot] for slot, _ in part], np.diff(stops, prepend=0))
        hashes, is_missing = hash_texts(texts, slot=salts), text_lengths(texts) == 0
        if features.text_rule != FIRST_TEXT_RULE:
            places, canonical = other_forms(texts)
            hashes[places] = hash_texts(canonical, slot=salts[places])
            is_missing[places] = text_lengths(canonical) == 0
        for (slot, _), start, stop in zip(part, [0, *stops.tolist()], stops.tolist(), strict=False):
            if features.dynamic_ids is None:
                yield rows_of_hashes(
                    hashes[start:stop], is_missing=is_missing[start:stop], num_rows=features.slot_rows[slot]
                )
            else:
                table = features.slot_tables[slot]
                yield keys_of_hashes(hashes[start:stop], slot=table, hash_bits=features.hash_bits)


def _ids_of_lists(
    lists: pa.ListArray,
    ids: npt.NDArray[Any],
    *,
    length: int,
    keeps_last: bool = False,
    keeps_missing: bool = False,
) -> npt.NDArray[Any]:
    """Return the ids [n, length] of the first texts of each list, or the last ones, then `NO_ID`.

    A text that is missing is left out; a list without any other has the id of a missing value, as one text would.

    Args:
        lists: [n] of texts, in which m texts stand.
        ids: Of these texts and then of a missing value, [m + 1].
        length: Ids of a row.
        keeps_last: Whether a list with more texts keeps its last ones.
        keeps_missing: Whether a text that is missing keeps its place.
    """
    missing = ids[-1]
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(len(lists)), counts)
    is_there = (ids[:-1] != missing) | keeps_missing
    ids, row = ids[:-1][is_there], row[is_there]
    counts = np.bincount(row, minlength=len(lists))
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    if keeps_last:
        place -= np.repeat(np.maximum(counts - length, 0), counts)
    is_kept = (place >= 0) & (place < length)
    of_rows = np.full((len(lists), length), NO_ID, dtype=ids.dtype)
    of_rows[row[is_kept], place[is_kept]] = ids[is_kept]
    of_rows[counts == 0, 0] = missing
    return of_rows


@dataclass(frozen=True, slots=True)
class UnpaddedIds:
    """Takes padding out of the last slots, which are sequences, and puts it back.

    Shapes: P ids of other slots, S sequences.
    """

    num_others: int
    """Ids of other slots (P)."""

    ends: tuple[int, ...]
    """Columns after each sequence, counted from the first one's first."""

    @classmethod
    def of(cls, features: FeatureSpec) -> UnpaddedIds | None:
        """Return None where padding costs little, or sequences are not the last slots."""
        num_sequences = features.slot_poolings.count(SEQUENCE)
        columns = features.id_columns[features.num_slots - num_sequences :]
        if sum(map(len, columns)) <= _LONG or SEQUENCE in features.slot_poolings[:-num_sequences]:
            return None
        first = columns[0].start
        return cls(first, tuple(each.stop - first for each in columns))

    def unpadded(self, ids_NK: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        """Return the ids of other slots and the lengths of sequences [n, P + S], and for each row its sequences' ids.

        Their array, [n], is of arrays.
        """
        is_there = ids_NK[:, self.num_others :] != NO_ID
        counts = [is_there[:, first:stop].sum(1) for first, stop in pairwise((0, *self.ends))]
        stops = is_there.sum(1).cumsum()
        values = ids_NK[:, self.num_others :][is_there]
        sequences = np.empty(len(ids_NK), dtype=object)
        for row, (first, stop) in enumerate(pairwise((0, *stops.tolist()))):
            sequences[row] = values[first:stop]
        columns = np.column_stack([ids_NK[:, : self.num_others], *counts])
        return columns.astype(ids_NK.dtype, copy=False), sequences

    def padded(self, columns: npt.NDArray[Any], sequences: npt.NDArray[np.object_]) -> npt.NDArray[np.int64]:
        """Return the ids [n, K] of what `unpadded` returned of some rows."""
        ids_NK = np.full((len(columns), self.num_others + self.ends[-1]), NO_ID, dtype=np.int64)
        ids_NK[:, : self.num_others] = columns[:, : self.num_others]
        if len(columns):
            is_there = np.concatenate(
                [
                    np.arange(stop - first) < counts[:, None]
                    for (first, stop), counts in zip(
                        pairwise((0, *self.ends)), columns[:, self.num_others :].T, strict=True
                    )
                ],
                axis=1,
            )
            ids_NK[:, self.num_others :][is_there] = np.concatenate(sequences)
        return ids_NK
