"""Rows as a model takes them: numbers transformed, texts hashed.

D = dense columns, K = ids of a row, which are those of the categorical slots, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heterps_core.data.features import SEQUENCE, FeatureSpec
from heterps_core.data.hashing import rows_of_lists, rows_of_texts
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.row_batch import RowBatch, first_label


@dataclass(frozen=True, kw_only=True, slots=True)
class RowArrays:
    """n rows."""

    dense: npt.NDArray[np.float32]
    """[n, D], standardised; 0 where the value is missing."""

    ids: npt.NDArray[np.int32]
    """[n, K], embedding rows inside the table of each slot; 0 where missing, `NO_ID` behind the end of a list."""

    labels: npt.NDArray[np.uint8]
    """[n], 1 for a click; [n, labels] where there are several."""

    weights: npt.NDArray[np.float32] | None = None
    """[n], what each row counts for; None where all count alike."""


def rows_as_arrays(batch: RowBatch, features: FeatureSpec, transform: NumericTransform) -> RowArrays:
    """Return rows as a model of these features and this transform takes them."""
    return RowArrays(
        dense=transform.apply(batch.numbers),
        ids=ids_of_texts(batch.texts, features),
        labels=batch.labels,
        weights=batch.weights,
    )


def targets_of(parts: Sequence[RowArrays]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return the first label of the rows of all parts, [n], and what each row counts for."""
    weights = [
        np.ones(len(rows.labels), np.float32) if rows.weights is None else rows.weights for rows in parts
    ]
    return np.concatenate([first_label(rows.labels) for rows in parts]), np.concatenate(weights)


def ids_of_texts(slots: Sequence[pa.Array], features: FeatureSpec) -> npt.NDArray[np.int32]:
    """Return the ids [n, K] of each slot's texts, or lists of texts, [n]."""
    ids_KN = np.empty((features.num_ids, len(slots[0])), dtype=np.int32)
    for slot, (texts, num_rows, columns) in enumerate(
        zip(slots, features.slot_rows, features.id_columns, strict=True)
    ):
        own = slice(columns.start, columns.stop)
        if pa.types.is_list(texts.type):
            is_sequence = features.slot_poolings[slot] == SEQUENCE
            lists = rows_of_lists(
                texts, slot=slot, num_rows=num_rows, length=len(columns), keeps_last=is_sequence
            )
            ids_KN[own] = lists.T
        else:
            ids_KN[own] = rows_of_texts(texts, slot=slot, num_rows=num_rows)
    return np.ascontiguousarray(ids_KN.T)
