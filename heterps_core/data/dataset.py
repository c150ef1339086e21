"""A prepared table of clicks: Parquet files that any number of workers stream, in the same order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heterps_core.data.epoch_order import MAX_LANES, EpochOrder, Int64Array
from heterps_core.data.features import BUFFER_BYTES, NO_ID, FeatureSpec
from heterps_core.data.history.event_store import EventStore
from heterps_core.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    DatasetManifest,
    Folder,
    SourceFile,
    folder_of,
    read_manifest,
)
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.row_batch import RowBatch, first_label
from heterps_core.data.requests.request_rows import is_same_request, start_before
from heterps_core.data.row_arrays import RowArrays, UnpaddedIds, rows_as_arrays
from heterps_core.data.row_groups import RowBuffer, RowGroups
from heterps_core.errors import DataError

if TYPE_CHECKING:
    from heterps_core.data.batch import ClickBatch


_PADDED_IDS = 1 << 24
"""Ids of rows with padded lists that are in memory at once."""

_REQUESTS_OF_LANE = 8
"""In each batch: up to two of them are cut, which are worked out twice."""

STEPS_AHEAD = 32
"""Row groups in a bucket are asked for so many steps before their first row: more than they take to come."""


class PreparedDataset:
    """Training and held-out rows, read by row index.

    Rows stand in time order: the training rows 0..num_train_rows - 1 come first, the held-out rows
    after them. An epoch visits the training rows in an order that depends on (seed, epoch) only, so
    that every worker, also one that joins after a restart, computes the same order by itself (`epoch_order.py`).

    Attributes:
        directory: Where the files lie; another process calls `PreparedDataset.open` with it.
        manifest: What the dataset holds.
        largest_group_rows: Rows of its largest row group, rows left out of training included.
    """

    def __init__(
        self, directory: Path | str, manifest: DatasetManifest, *, folder: Folder | None = None
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self._groups = RowGroups(folder or folder_of(Path(directory)), manifest, where=directory)
        starts = self._groups.starts
        threads = self._groups.num_threads
        self._sequences = UnpaddedIds.of(manifest.features)
        self._rows = RowBuffer(starts, self._arrays, num_threads=threads)
        self._targets = RowBuffer(
            starts, lambda group: _present(*self._groups.read_targets(group)), num_threads=threads
        )
        requests = self._groups.requests
        self._request_starts = None if requests is None else requests.starts
        of_requests = zip(manifest.rows_per_list, manifest.features.id_columns, strict=False)
        self._request_ids = np.array([id for rows, ids in of_requests if rows > 1.0 for id in ids], np.int64)
        self._train_starts = self._starts_of_train_rows()
        self.largest_group_rows = self._groups.largest_group_rows
        self._max_lanes = min(MAX_LANES, BUFFER_BYTES // (int(np.diff(starts).max()) * manifest.row_bytes))
        self._order_key: tuple[int, int, int] | None = None
        self._order: EpochOrder | None = None

    @classmethod
    def open(cls, directory: Path | str, *, folder: Folder | None = None) -> PreparedDataset:
        """Open a dataset that `prepare_dataset` has written, in a folder of this machine or elsewhere.

        Raises:
            DataError: There is no complete dataset, or its files do not fit its manifest.
        """
        if folder is None:
            directory = Path(directory)
            folder = folder_of(directory)
        manifest = read_manifest(folder)
        if manifest is None:
            raise DataError(
                directory,
                f"must be a prepared dataset, but has no readable {MANIFEST_NAME} of format "
                f"{FORMAT_VERSION}; prepare it again",
            )
        return cls(directory, manifest, folder=folder)

    def until(self, num_train_rows: int) -> PreparedDataset:
        """Return the same rows with the first `num_train_rows`, at least 1, to train on; all later ones are held out.

        Row groups that are in memory are shared with it. The cut is moved so that it cuts no request.
        """
        if self._request_starts is not None:
            num_train_rows = start_before(self._request_starts, num_train_rows)
        view = copy.copy(self)
        view.manifest = replace(
            self.manifest,
            num_train_rows=num_train_rows,
            num_eval_rows=self.manifest.num_rows - num_train_rows,
        )
        view._train_starts = view._starts_of_train_rows()
        view._order_key = None
        return view

    @property
    def features(self) -> FeatureSpec:
        """Shape of the model's input."""
        return self.manifest.features

    @property
    def num_train_rows(self) -> int:
        """Rows to train on: the earlier part."""
        return self.manifest.num_train_rows

    @property
    def num_eval_rows(self) -> int:
        """Rows held out: the later part."""
        return self.manifest.num_eval_rows

    def targets(self, first: int, stop: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        """Return labels [n] of rows first..stop - 1, the first of several, and weights [n] if they have any."""
        groups = self._groups.between(first, stop)
        offset = first - int(self._groups.starts[groups.start])
        mine = slice(offset, offset + stop - first)
        of_groups = [self._groups.read_targets(group) for group in groups]
        labels = [np.zeros(0, np.uint8), *(first_label(labels) for labels, _ in of_groups)]
        weights = [np.zeros(0, np.float32), *(weights for _, weights in of_groups if weights is not None)]
        has_weights = self.manifest.schema.has_weights
        return np.concatenate(labels)[mine], np.concatenate(weights)[mine] if has_weights else None

    def parts(
        self,
        first: int,
        stop: int,
        *,
        features: FeatureSpec | None = None,
        numeric_transform: NumericTransform | None = None,
    ) -> Iterator[RowArrays]:
        """Yield rows first..stop - 1 in order, those of one row group at most at a time.

        Features are those of a model whose tables have other sizes; by default as prepared, like the transform.
        """
        for group in self._groups.between(first, stop):
            start, end = self._groups.starts[group : group + 2].tolist()
            yield from self._arrays_of(
                self._groups.read(group).between(max(first - start, 0), min(stop, end) - start),
                features or self.features,
                numeric_transform or self.manifest.numeric_transform,
            )

    def sources_from(self, first: int) -> tuple[SourceFile, ...]:
        """Return the files of the source that hold row `first` or later rows."""
        ends = self._groups.starts[np.cumsum(self.manifest.file_groups)]
        return tuple(
            file for file, end in zip(self.manifest.sources, ends.tolist(), strict=True) if end > first
        )

    @property
    def has_requests(self) -> bool:
        """Whether rows are of requests, which should not be cut."""
        return self._request_starts is not None

    @property
    def rows_per_request(self) -> float:
        """Rows of a request in the mean; 1 where the schema has no requests."""
        if self._request_starts is None:
            return 1.0
        return float(self._request_starts[-1]) / (len(self._request_starts) - 1)

    @property
    def events(self) -> EventStore | None:
        """The events that rows are joined with; None where the schema has no history."""
        return None if self._groups.events is None else self._groups.events.store

    @property
    def bucket_requests(self) -> tuple[int, int]:
        """What was asked of buckets of the source so far, and the bytes that they sent."""
        return self._groups.num_requests, self._groups.num_bytes

    def num_batches(self, batch_size: int) -> int:
        """Return the global batches of one epoch, at least 1; see `EpochOrder`.

        Raises:
            ConfigurationError: The batch size is below 1.
        """
        return self._lanes(self.num_train_rows, batch_size).num_batches

    def decoded_share(self, num_rows: int, *, batch_size: int) -> float:
        """Return the share of the rows of an epoch that are decoded while it is trained, of row groups as these.

        In an epoch of `num_rows` rows each lane has a row group in memory from the first batch on; where all row
        groups are held so, no other is ever read.
        """
        num_groups = num_rows * (len(self._train_starts) - 1) / max(self.num_train_rows, 1)
        return 1.0 - min(1.0, min(batch_size, self._max_lanes) / num_groups)

    def batch_rows(
        self,
        epoch: int,
        batch_index: int | Int64Array,
        *,
        batch_size: int,
        seed: int,
        positions: npt.NDArray[Any] | None = None,
    ) -> Int64Array:
        """Return the row indices at some positions of a global batch; None stands for all, 0..batch_size - 1.

        Epochs and batches count from 0; each position may have a batch of its own [n]. Which rows a position holds
        does not depend on how many workers share the batch.

        Raises:
            ConfigurationError: The batch or a position lies outside.
        """
        if self._order is None or self._order_key != (epoch, seed, batch_size):
            self._order = EpochOrder(
                self._train_starts,
                batch_size=batch_size,
                seed=seed,
                epoch=epoch,
                max_lanes=self._lanes_of(batch_size),
                request_starts=self._request_starts,
            )
            self._order_key = (epoch, seed, batch_size)
        return self._rows_of(self._order, batch_index, positions)

    def held_out_rows(
        self, batch_index: int, *, batch_size: int, positions: npt.NDArray[Any] | None = None
    ) -> Int64Array:
        """Return the row indices of a batch of held-out rows, or at some positions; no row follows the last one.

        Each lane is a run of rows, so that a replica meets the same part of the files in each batch. The last batch
        may be short.
        """
        first = batch_index * batch_size
        if first + batch_size <= self.num_eval_rows:
            lanes = self._lanes(self.num_eval_rows, batch_size)
            return self._rows_of(lanes, batch_index, positions, first_row=self.num_train_rows)
        rows = self.num_train_rows + np.arange(first, max(first, self.num_eval_rows))
        return rows if positions is None else rows[positions]

    def _rows_of(
        self,
        order: EpochOrder,
        batch_index: int | Int64Array,
        positions: npt.NDArray[Any] | None,
        *,
        first_row: int = 0,
    ) -> Int64Array:
        """Return rows of a batch, and begin to read those of a later one where several threads read."""
        positions = np.arange(order.batch_size) if positions is None else positions
        if self._groups.num_threads > 1:
            later = min(int(np.max(batch_index)) + STEPS_AHEAD, order.num_batches - 1)
            # Neighbours lie in the same row group, so a position of each lane names it.
            coming = first_row + order.rows(later, positions[:: max(1, len(positions) // MAX_LANES)])
            for buffer in (self._rows, self._targets):
                buffer.expect(coming)
        return first_row + order.rows(batch_index, positions)

    def batch(self, rows: Int64Array, *, begins: npt.NDArray[np.bool_] | None = None) -> ClickBatch:
        """Return rows as tensors, by their indices [B]; row groups of the last call stay in memory for the next.

        Args:
            begins: Whether a part of the batch begins with a row [B]: sequences of a request have ids in the first of
                its rows in a part alone. None gives all rows theirs.

        Raises:
            DataError: A row group is damaged.
        """
        # Here and not above: preparing data must not load torch.
        from heterps_core.data.batch import ClickBatch

        arrays = self._rows.gather(rows)
        if self._sequences is not None:
            dense, *targets, columns, sequences = arrays
            arrays = (dense, self._sequences.padded(columns, sequences), *targets)
        if begins is not None and self._request_starts is not None:
            shared = np.flatnonzero(is_same_request(self._request_starts, rows) & ~begins)
            arrays[1][np.ix_(shared, self._request_ids)] = NO_ID
        return ClickBatch.from_numpy(*arrays)

    def target_batch(self, rows: Int64Array) -> ClickBatch:
        """Return labels and weights alone of rows [B], with features of no column; else as `batch`."""
        from heterps_core.data.batch import ClickBatch

        none = (len(rows), 0)
        return ClickBatch.from_numpy(
            np.zeros(none, np.float32), np.zeros(none, np.int64), *self._targets.gather(rows)
        )

    def _lanes(self, num_rows: int, batch_size: int) -> EpochOrder:
        return EpochOrder(
            np.array([0, max(num_rows, 1)]),
            batch_size=batch_size,
            seed=None,
            max_lanes=self._lanes_of(batch_size),
        )

    def _lanes_of(self, batch_size: int) -> int:
        """Return the most lanes of a batch: each part has whole requests but for its first and its last."""
        requests = 1 if self._request_starts is None else _REQUESTS_OF_LANE
        rows_of_lane = max(round(requests * self.rows_per_request), 1)
        return max(min(self._max_lanes, batch_size // rows_of_lane), 1)

    def _starts_of_train_rows(self) -> Int64Array:
        last = self._groups.between(0, self.num_train_rows).stop
        return np.minimum(self._groups.starts[: last + 1], self.num_train_rows)

    def _arrays(self, group: int) -> tuple[npt.NDArray[Any], ...]:
        """Return the rows of a row group; the ids of sequences without padding, an array for each row."""
        parts = [
            _present(rows.dense, rows.ids, rows.labels, rows.weights)
            if self._sequences is None
            else (*_present(rows.dense, rows.labels, rows.weights), *self._sequences.unpadded(rows.ids))
            for rows in self._arrays_of(
                self._with_lists_of_requests(group), self.features, self.manifest.numeric_transform
            )
        ]
        return parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))

    def _with_lists_of_requests(self, group: int) -> RowBatch:
        """Read a row group; lists of requests come as indices into the different ones, so each is hashed once."""
        batch = self._groups.read(group)
        if self._request_starts is None:
            return batch
        rows = np.arange(*self._groups.starts[group : group + 2])
        is_first = ~is_same_request(self._request_starts, rows)
        indices, mask = pa.array(np.cumsum(is_first) - 1), pa.array(is_first)
        texts = tuple(
            pa.DictionaryArray.from_arrays(indices, lists.filter(mask)) if rows_of_list > 1.0 else lists
            for lists, rows_of_list in zip(batch.texts, self.manifest.rows_per_list, strict=True)
        )
        return replace(batch, texts=texts)

    def _arrays_of(
        self, batch: RowBatch, features: FeatureSpec, transform: NumericTransform
    ) -> Iterator[RowArrays]:
        """Yield rows as a model takes them, so many at a time that padded lists take little memory."""
        size = max(_PADDED_IDS // features.num_ids, 1)
        for first in range(0, max(len(batch.labels), 1), size):
            part = batch.between(first, min(first + size, len(batch.labels)))
            yield rows_as_arrays(part, features, transform)


def _present(*arrays: npt.NDArray[Any] | None) -> tuple[npt.NDArray[Any], ...]:
    return tuple(array for array in arrays if array is not None)
