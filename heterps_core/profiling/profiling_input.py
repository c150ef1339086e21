"""What the layers read while they are timed: click batches from a data set, or drawn ones.

Shapes: B = rows of a batch, S = slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import NO_ID, FeatureSpec
from heterps_core.data.hashing import keys_of_hashes, mix
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
        labels = generator.integers(0, 2, (num_rows, features.num_labels)).astype(np.float32)
        batch = ClickBatch.from_numpy(dense, ids, labels)
    else:
        dataset = PreparedDataset.open(request.dataset)
        # Wraps around where the data set has fewer rows.
        rows = np.resize(np.arange(dataset.num_train_rows, dtype=np.int64), num_rows)
        batch = dataset.batch(rows)
    firsts = range(0, num_rows, request.batch_size)
    return [batch.rows(first, first + request.batch_size) for first in firsts]


def zipf_ids(features: FeatureSpec, num_rows: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw ids [B, K] by Zipf's law with exponent 1: the r-th most frequent value has weight 1 / r.

    Ranks are scattered over the table as hashing scatters values, so that frequent rows do not lie side by side
    in memory. Row 0, for a missing value, does not occur. All lengths of a list up to its longest come alike often.
    """
    ids = np.full((num_rows, features.num_ids), NO_ID, dtype=np.int64)
    for slot, (table_rows, columns) in enumerate(zip(features.slot_rows, features.id_columns, strict=True)):
        num_values = table_rows - 1
        # The logarithm of a rank of weight 1 / r is uniform.
        shape = (num_rows, len(columns))
        ranks = np.floor((num_values + 1.0) ** generator.random(shape)).astype(np.int64)
        row_of_rank = 1 + np.random.default_rng(slot).permutation(num_values)
        drawn = row_of_rank[np.minimum(ranks, num_values) - 1]
        if features.dynamic_ids is not None:
            hashes = mix(drawn.astype(np.uint64))
            drawn = keys_of_hashes(hashes, slot=slot, hash_bits=features.hash_bits)
        if len(columns) > 1:
            drawn[np.arange(len(columns)) > generator.integers(0, len(columns), (num_rows, 1))] = NO_ID
        ids[:, columns.start : columns.stop] = drawn
    return ids
