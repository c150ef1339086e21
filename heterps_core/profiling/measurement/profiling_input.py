"""Input of the layers while they are timed: click batches from a data set, or drawn ones.

Shapes: B = rows of a batch, S = slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import BUCKET_ROWS, MIN_SLOT_ROWS, MISSING_ROW, NO_ID, FeatureSpec
from heterps_core.data.hashing import keys_of_hashes, mix
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_runner import StageRunner
from heterps_core.training.replica_batches import ReplicaBatches
from heterps_core.units import MS_PER_S

NUM_BATCHES = 8
"""Batches that are looked up in turn: the rows of a single one would stay in the caches."""

_DECODED_ROWS = 65_536
"""In at least one row group; 60 ms with 26 texts and 13 numbers (docs/log/2026-11.md)."""


def with_fewer_rows(features: FeatureSpec, most_rows: int) -> FeatureSpec:
    """Return the same columns with at most so many rows in the table of each, or a bucket's with dynamic ids."""
    multiple = 1 if features.dynamic_ids is None else BUCKET_ROWS
    most = max(most_rows // multiple * multiple, multiple, MIN_SLOT_ROWS)
    return replace(features, slot_rows=tuple(min(rows, most) for rows in features.slot_rows))


def click_batches(
    request: ProfileRequest, features: FeatureSpec, *, shares: bool = False
) -> list[ClickBatch]:
    """Return `NUM_BATCHES` batches: the first rows of the data set, from its start again where it ends, or drawn.

    Args:
        features: Those of the request, with tables of perhaps fewer rows, over which row indices wrap around.
        shares: The model reads a sequence of several rows once.
    """
    num_rows = NUM_BATCHES * request.batch_size
    if request.dataset is None:
        generator = np.random.default_rng(request.seed)
        ids = _zipf_ids(features, num_rows, generator)
        dense = generator.standard_normal((num_rows, features.num_dense), dtype=np.float32)
        labels = generator.integers(0, 2, (num_rows, features.num_labels)).astype(np.float32)
        batch = ClickBatch.from_numpy(dense, ids, labels)
    else:
        dataset = _opened(request.dataset)
        # Wraps around where the data set has fewer rows.
        rows = np.resize(np.arange(dataset.num_train_rows, dtype=np.int64), num_rows)
        # Half batches are measured, too.
        begins = np.arange(num_rows) % request.batch_size % (request.batch_size // 2) == 0
        batch = _in_tables(dataset.batch(rows, begins=begins if shares else None), dataset, features)
    firsts = range(0, num_rows, request.batch_size)
    return [batch.rows(first, first + request.batch_size) for first in firsts]


@lru_cache(maxsize=1)
def _opened(folder: str) -> PreparedDataset:
    """Open a data set once for all batch sizes: each time its first row groups are decoded again."""
    return PreparedDataset.open(folder)


@lru_cache(maxsize=1)
def decoded_row_ms(folder: str) -> float:
    """Return the time of this core for a row of a data set whose row group is not in memory yet."""
    dataset, num_rows = _opened(folder), 0
    started_s = time.thread_time()
    for part in dataset.parts(0, dataset.num_train_rows):
        num_rows += len(part.labels)
        if num_rows >= _DECODED_ROWS:
            break
    return MS_PER_S * (time.thread_time() - started_s) / num_rows


class HeldBatches(ReplicaBatches):
    """Batches of rows in memory, in the order of training: to decode others is measured alone.

    Args:
        request: Has a data set.
        features: Those of the request, with tables of perhaps fewer rows, over which row indices wrap around.
        config: Has the rows of a batch; a data set of fewer rows gives them more than once.
        model: The whole model.
        runner: Runs it.
    """

    def __init__(
        self,
        request: ProfileRequest,
        features: FeatureSpec,
        config: TrainingConfig,
        model: StageModel,
        runner: StageRunner,
    ) -> None:
        assert request.dataset is not None
        dataset = _opened(request.dataset)
        size = min(config.batch_size, dataset.num_train_rows)
        held_share = 1 - dataset.decoded_share(dataset.num_train_rows, batch_size=size)
        dataset = dataset.until(max(int(held_share * dataset.num_train_rows), size))
        super().__init__(dataset, config, model, runner)
        self._features = features
        self._num_batches = dataset.num_batches(config.batch_size)

    def cursors(self) -> Iterator[TrainingCursor]:
        """Yield the batches of epoch after epoch, without an end."""
        cursor = TrainingCursor()
        while True:
            yield cursor
            cursor = cursor.after_batch(self._num_batches)

    def _read(self, rows: npt.NDArray[np.int64], begins: npt.NDArray[np.bool_]) -> ClickBatch:
        return _in_tables(super()._read(rows, begins), self._dataset, self._features)


def _in_tables(batch: ClickBatch, dataset: PreparedDataset, features: FeatureSpec) -> ClickBatch:
    """Return a batch of a data set with row indices for tables of perhaps fewer rows."""
    if features.slot_rows == dataset.features.slot_rows or features.dynamic_ids is not None:
        return batch
    return replace(batch, ids=_wrapped(batch.ids, features))


def _wrapped(ids: torch.Tensor, features: FeatureSpec) -> torch.Tensor:
    """Return row indices [B, K] in tables of fewer rows; missing values and the ends of lists keep theirs."""
    last_rows = np.repeat(np.array(features.slot_rows, dtype=np.int64) - 1, features.slot_lengths)
    return torch.where(ids > MISSING_ROW, 1 + (ids - 1) % torch.from_numpy(last_rows), ids)


def plain_batch(features: FeatureSpec, *, num_rows: int) -> ClickBatch:
    """Return a batch of zeros that looks up the rows of one slot in turn."""
    return ClickBatch.from_numpy(
        np.zeros((num_rows, features.num_dense), dtype=np.float32),
        np.arange(num_rows).reshape(-1, 1) % features.total_rows,
        np.zeros(num_rows, dtype=np.float32),
    )


def _zipf_ids(features: FeatureSpec, num_rows: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw ids [B, K] by Zipf's law with exponent 1: the r-th most frequent value has weight 1 / r.

    Ranks are scattered over the table as hashing scatters values, so that frequent rows do not lie side by side
    in memory. Row 0, for a missing value, does not occur. All lengths of a list up to its longest come alike often.
    """
    ids = np.full((num_rows, features.num_ids), NO_ID, dtype=np.int64)
    for table, columns in zip(features.slot_tables, features.id_columns, strict=True):
        num_values = features.slot_rows[table] - 1
        # The logarithm of a rank of weight 1 / r is uniform.
        shape = (num_rows, len(columns))
        ranks = np.floor((num_values + 1.0) ** generator.random(shape)).astype(np.int64)
        row_of_rank = 1 + np.random.default_rng(table).permutation(num_values)
        drawn = row_of_rank[np.minimum(ranks, num_values) - 1]
        if features.dynamic_ids is not None:
            hashes = mix(drawn.astype(np.uint64))
            drawn = keys_of_hashes(hashes, slot=table, hash_bits=features.hash_bits)
        if len(columns) > 1:
            drawn[np.arange(len(columns)) > generator.integers(0, len(columns), (num_rows, 1))] = NO_ID
        ids[:, columns.start : columns.stop] = drawn
    return ids
