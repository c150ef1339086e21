"""Rows as a model takes them: numbers transformed, texts hashed.

D = dense columns, K = ids of a row, which are those of the categorical slots, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heterps_core.data.features import FIRST_TEXT_RULE, SEQUENCE, FeatureSpec
from heterps_core.data.hashing import ids_of_lists, keys_of_texts, rows_of_texts
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.column_texts import canonical_texts
from heterps_core.data.reading.row_batch import RowBatch, first_label
from heterps_core.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class RowArrays:
    """n rows."""

    dense: npt.NDArray[np.float32]
    """[n, D], standardised; 0 where the value is missing."""

    ids: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    """[n, K], embedding rows inside the table of each slot, 0 where missing, or keys where ids are dynamic; `NO_ID`
    behind the end of a list."""

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


def ids_of_texts(
    slots: Sequence[pa.Array], features: FeatureSpec
) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
    """Return the ids [n, K] of each slot's texts, or lists of texts, [n], by the rule of the features for texts."""
    if features.text_rule != FIRST_TEXT_RULE:
        slots = [canonical_texts(texts) for texts in slots]
    is_dynamic = features.dynamic_ids is not None
    ids_KN: npt.NDArray[Any] = np.empty(
        (features.num_ids, len(slots[0])), dtype=np.int64 if is_dynamic else np.int32
    )
    for slot, (texts, num_rows, columns) in enumerate(
        zip(slots, features.slot_rows, features.id_columns, strict=True)
    ):
        own = slice(columns.start, columns.stop)
        ids_of: Callable[[pa.Array], npt.NDArray[Any]] = (
            partial(keys_of_texts, slot=slot, hash_bits=features.hash_bits)
            if is_dynamic
            else partial(rows_of_texts, slot=slot, num_rows=num_rows)
        )
        if pa.types.is_list(texts.type):
            is_sequence = features.slot_poolings[slot] == SEQUENCE
            ids_KN[own] = ids_of_lists(texts, ids_of, length=len(columns), keeps_last=is_sequence).T
        else:
            ids_KN[own] = ids_of(texts)
    return np.ascontiguousarray(ids_KN.T)
