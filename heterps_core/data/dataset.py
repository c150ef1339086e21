"""A prepared table of clicks: Parquet files that any number of workers stream, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heterps_core.data.epoch_order import MAX_LANES, EpochOrder, Int64Array
from heterps_core.data.features import BUFFER_BYTES, FeatureSpec
from heterps_core.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    DatasetManifest,
    Folder,
    folder_of,
    read_manifest,
)
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.row_arrays import RowArrays, rows_as_arrays
from heterps_core.data.row_groups import RowBuffer, RowGroups
from heterps_core.errors import DataError

if TYPE_CHECKING:
    from heterps_core.data.batch import ClickBatch


class PreparedDataset:
    """Training and held-out rows, read by row index.

    Rows stand in time order: the training rows 0..num_train_rows - 1 come first, the held-out rows
    after them. An epoch visits the training rows in an order that depends on (seed, epoch) only, so
    that every worker, also one that joins after a restart, computes the same order by itself (`epoch_order.py`).

    Attributes:
        directory: Where the files lie; another process calls `PreparedDataset.open` with it.
        manifest: What the dataset holds.
    """

    def __init__(
        self, directory: Path | str, manifest: DatasetManifest, *, folder: Folder | None = None
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self._groups = RowGroups(folder or folder_of(Path(directory)), manifest, where=directory)
        starts = self._groups.starts
        self._rows = RowBuffer(starts, self._arrays)
        self._labels = RowBuffer(starts, lambda group: (self._groups.read_labels(group),))
        last = self._groups.between(0, self.num_train_rows).stop
        self._train_starts = np.minimum(starts[: last + 1], self.num_train_rows)
        largest_bytes = int(np.diff(starts).max()) * self.features.row_bytes
        self._max_lanes = min(MAX_LANES, BUFFER_BYTES // largest_bytes)
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

    @property
    def eval_labels(self) -> npt.NDArray[np.uint8]:
        """Labels [num_eval_rows] of the held-out rows, in order; read at each call."""
        return self.labels(self.num_train_rows, self.manifest.num_rows)

    def labels(self, first: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the labels of rows first..stop - 1."""
        groups = self._groups.between(first, stop)
        labels = [self._groups.read_labels(group) for group in groups]
        offset = first - int(self._groups.starts[groups.start])
        found: npt.NDArray[np.uint8] = np.concatenate([np.zeros(0, dtype=np.uint8), *labels])
        return found[offset : offset + stop - first]

    def parts(
        self,
        first: int,
        stop: int,
        *,
        features: FeatureSpec | None = None,
        numeric_transform: NumericTransform | None = None,
    ) -> Iterator[RowArrays]:
        """Yield rows first..stop - 1 in order, those of one row group at a time.

        Args:
            features: Of a model whose tables have other sizes; by default as prepared, like the transform.
        """
        for group in self._groups.between(first, stop):
            start, end = self._groups.starts[group : group + 2].tolist()
            rows = rows_as_arrays(
                self._groups.read(group),
                features or self.features,
                numeric_transform or self.manifest.numeric_transform,
            )
            mine = slice(max(first - start, 0), min(stop, end) - start)
            yield RowArrays(dense=rows.dense[mine], ids=rows.ids[mine], labels=rows.labels[mine])

    def num_batches(self, batch_size: int) -> int:
        """Return the global batches of one epoch, at least 1; see `EpochOrder`.

        Raises:
            ConfigurationError: The batch size is below 1.
        """
        return self._lanes(self.num_train_rows, batch_size).num_batches

    def batch_rows(
        self,
        epoch: int,
        batch_index: int,
        *,
        batch_size: int,
        seed: int,
        positions: npt.NDArray[Any] | None = None,
    ) -> Int64Array:
        """Return the row indices at some positions of a global batch; None stands for all, 0..batch_size - 1.

        Epochs and batches count from 0. Which rows a position holds does not depend on how many workers share the
        batch.

        Raises:
            ConfigurationError: The batch or a position lies outside.
        """
        if self._order is None or self._order_key != (epoch, seed, batch_size):
            self._order = EpochOrder(
                self._train_starts, batch_size=batch_size, seed=seed, epoch=epoch, max_lanes=self._max_lanes
            )
            self._order_key = (epoch, seed, batch_size)
        return self._order.rows(batch_index, np.arange(batch_size) if positions is None else positions)

    def held_out_rows(self, batch_index: int, *, batch_size: int) -> Int64Array:
        """Return the row indices of a batch of held-out rows, the last of which may be short; none behind it.

        Each lane is a run of rows, so that a replica meets the same part of the files in each batch.
        """
        first, positions = batch_index * batch_size, np.arange(batch_size)
        if first + batch_size <= self.num_eval_rows:
            return self.num_train_rows + self._lanes(self.num_eval_rows, batch_size).rows(
                batch_index, positions
            )
        return self.num_train_rows + np.arange(first, max(first, self.num_eval_rows))

    def batch(self, rows: Int64Array) -> ClickBatch:
        """Return rows as tensors, by their indices [B]; row groups of the last call stay in memory for the next.

        Raises:
            DataError: A row group is damaged.
        """
        # Here and not above: preparing data must not load torch.
        from heterps_core.data.batch import ClickBatch

        dense, ids, labels = self._rows.gather(rows)
        return ClickBatch.from_numpy(dense, ids, labels)

    def label_batch(self, rows: Int64Array) -> ClickBatch:
        """Return the labels alone of rows [B], with features of no column; else as `batch`."""
        from heterps_core.data.batch import ClickBatch

        (labels,) = self._labels.gather(rows)
        none = (len(rows), 0)
        return ClickBatch.from_numpy(np.zeros(none, np.float32), np.zeros(none, np.int64), labels)

    def _lanes(self, num_rows: int, batch_size: int) -> EpochOrder:
        return EpochOrder(
            np.array([0, max(num_rows, 1)]), batch_size=batch_size, seed=None, max_lanes=self._max_lanes
        )

    def _arrays(self, group: int) -> tuple[npt.NDArray[Any], ...]:
        rows = rows_as_arrays(self._groups.read(group), self.features, self.manifest.numeric_transform)
        return rows.dense, rows.ids, rows.labels
