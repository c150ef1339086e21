"""What the layers read while they are timed: click batches from a data set, or drawn ones.

Shapes: B = rows of a batch, S = slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.profiling.measuring_process import ProfileRequest

NUM_BATCHES = 8
"""Batches that are looked up in turn: the rows of a single one would stay in the caches."""


def click_batches(request: ProfileRequest) -> list[ClickBatch]:
    """Return `NUM_BATCHES` batches: the first rows of the data set, from its start again where it ends, or drawn."""
    features = request.features
    num_rows = NUM_BATCHES * request.batch_size
    if request.dataset is None:
        generator = np.random.default_rng(request.seed)
        ids = zipf_ids(features, num_rows, generator)
        dense = generator.standard_normal((num_rows, features.num_dense), dtype=np.float32)
        labels = generator.integers(0, 2, num_rows).astype(np.float32)
        batch = ClickBatch.from_numpy(dense, ids, labels)
    else:
        dataset = PreparedDataset.open(request.dataset)
        # Wraps around where the data set has fewer rows.
        rows = np.resize(np.arange(dataset.num_train_rows, dtype=np.int64), num_rows)
        batch = dataset.batch(rows)
    firsts = range(0, num_rows, request.batch_size)
    return [rows_of(batch, first, first + request.batch_size) for first in firsts]


def rows_of(batch: ClickBatch, first: int, stop: int) -> ClickBatch:
    """Return rows first..stop - 1 of a batch."""
    return ClickBatch(
        dense=batch.dense[first:stop], ids=batch.ids[first:stop], labels=batch.labels[first:stop]
    )


def zipf_ids(features: FeatureSpec, num_rows: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw row indices [B, S] by Zipf's law with exponent 1: the r-th most frequent value has weight 1 / r.

    Ranks are scattered over the table as hashing scatters values, so that frequent rows do not lie side by side
    in memory. Row 0, for a missing value, does not occur.
    """
    ids = np.empty((num_rows, features.num_slots), dtype=np.int64)
    for slot, table_rows in enumerate(features.slot_rows):
        num_values = table_rows - 1
        # The logarithm of a rank of weight 1 / r is uniform.
        ranks = np.floor((num_values + 1.0) ** generator.random(num_rows)).astype(np.int64)
        row_of_rank = 1 + np.random.default_rng(slot).permutation(num_values)
        ids[:, slot] = row_of_rank[np.minimum(ranks, num_values) - 1]
    return ids
