"""Rows as a model takes them: numbers transformed, texts hashed.

D = dense columns, S = categorical slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterps_core.data.features import FeatureSpec
from heterps_core.data.hashing import rows_of_texts
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.row_batch import RowBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class RowArrays:
    """n rows."""

    dense: npt.NDArray[np.float32]
    """[n, D], standardised; 0 where the value is missing."""

    ids: npt.NDArray[np.int32]
    """[n, S], embedding row inside the table of each slot; 0 where missing."""

    labels: npt.NDArray[np.uint8]
    """[n], 1 for a click."""


def rows_as_arrays(batch: RowBatch, features: FeatureSpec, transform: NumericTransform) -> RowArrays:
    """Return rows as a model of these features and this transform takes them."""
    ids_SN = np.empty((features.num_slots, len(batch.labels)), dtype=np.int32)
    for slot, (texts, num_rows) in enumerate(zip(batch.texts, features.slot_rows, strict=True)):
        ids_SN[slot] = rows_of_texts(texts, slot=slot, num_rows=num_rows)
    return RowArrays(
        dense=transform.apply(batch.numbers), ids=np.ascontiguousarray(ids_SN.T), labels=batch.labels
    )
