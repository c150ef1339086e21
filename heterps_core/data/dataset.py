"""A prepared table of clicks: mapped into memory by any number of workers, and visited in the same order by all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from heterps_core.data.array_files import map_array
from heterps_core.data.features import FeatureSpec
from heterps_core.data.manifest import FORMAT_VERSION, MANIFEST_NAME, DatasetManifest, read_manifest
from heterps_core.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from heterps_core.data.batch import ClickBatch


class PreparedDataset:
    """Training and held-out rows on disk, mapped into memory and gathered by row index.

    Rows stand in time order: the training rows 0..num_train_rows - 1 come first, the held-out rows
    after them. An epoch visits the training rows in an order that depends on (seed, epoch) only, so
    that every worker, also one that joins after a restart, computes the same order by itself.

    Attributes:
        directory: Where the files lie; another process calls `PreparedDataset.open` with it.
        manifest: What the dataset holds.
        dense: [N, D] float32, standardised numbers of all rows, 0 where missing.
        ids: [N, S] int32, embedding row inside each slot's table, 0 where missing.
        labels: [N] uint8, 1 for a click.
    """

    def __init__(self, directory: Path, manifest: DatasetManifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.dense: npt.NDArray[np.float32] = map_array(directory, "dense")
        self.ids: npt.NDArray[np.int32] = map_array(directory, "ids")
        self.labels: npt.NDArray[np.uint8] = map_array(directory, "labels")
        self._order_key: tuple[int, int] | None = None
        self._order: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._check_shapes()

    @classmethod
    def open(cls, directory: Path | str) -> PreparedDataset:
        """Open a dataset that `prepare_dataset` has written.

        Raises:
            DataError: There is no complete dataset, or its files do not fit its manifest.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        if manifest is None:
            raise DataError(
                directory,
                f"must be a prepared dataset, but has no readable {MANIFEST_NAME} of format "
                f"{FORMAT_VERSION}; prepare it again",
            )
        return cls(directory, manifest)

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
        """Labels [num_eval_rows] of the held-out rows, in order."""
        return self.labels[self.num_train_rows :]

    def num_batches(self, batch_size: int) -> int:
        """Return the global batches of one epoch, at least 1.

        Every batch is full. The rows that do not fill a last batch are left out of this epoch (another
        epoch's order leaves out others); where there are fewer rows than one batch takes, the
        epoch is one batch that repeats them.
        """
        if batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, got {batch_size}")
        return max(1, self.num_train_rows // batch_size)

    def train_indices(self, epoch: int, seed: int) -> npt.NDArray[np.uint32]:
        """Return the order [num_train_rows] in which an epoch visits the training rows.

        The last order is kept, so asking again for the same epoch costs nothing.
        """
        if (epoch, seed) != self._order_key:
            self._order = epoch_order(self.num_train_rows, epoch, seed)
            self._order.flags.writeable = False
            self._order_key = (epoch, seed)
        return self._order

    def batch_rows(
        self, epoch: int, batch_index: int, *, batch_size: int, seed: int, lo: int = 0, hi: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the row indices of positions lo..hi (half open) of one global batch.

        Epochs and batches count from 0; `hi` None stands for `batch_size`.

        The rows of a global batch are sorted before they are cut, so which rows a position holds does
        not depend on how many workers share the batch, and each slice reads the files forwards.

        Raises:
            ConfigurationError: The batch or the positions lie outside.
        """
        num_batches = self.num_batches(batch_size)
        stop = batch_size if hi is None else hi
        if not 0 <= batch_index < num_batches:
            raise ConfigurationError(
                f"batch_index must be in 0..{num_batches - 1} for {self.num_train_rows} training rows in "
                f"batches of {batch_size}, got {batch_index}"
            )
        if not 0 <= lo <= stop <= batch_size:
            raise ConfigurationError(
                f"positions must satisfy 0 <= lo <= hi <= {batch_size}, got {lo} and {stop}"
            )
        order = self.train_indices(epoch, seed)
        if self.num_train_rows < batch_size:
            batch = np.resize(order, batch_size)
        else:
            batch = order[batch_index * batch_size : (batch_index + 1) * batch_size]
        return np.sort(batch)[lo:stop].astype(np.int64)

    def train_batch(self, rows: npt.NDArray[np.int64]) -> ClickBatch:
        """Return training rows as tensors, by their indices [B] below `num_train_rows`."""
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_train_rows:
            raise ConfigurationError(
                f"training rows must be in 0..{self.num_train_rows - 1}, got {rows.min()}..{rows.max()}"
            )
        return self._batch(rows)

    def eval_batch(self, start: int, stop: int) -> ClickBatch:
        """Return held-out rows start..stop (half open, counted from the first held-out row) as tensors.

        A `stop` beyond the last row means the last row.
        """
        first = self.num_train_rows
        rows = np.arange(first + start, first + min(stop, self.num_eval_rows), dtype=np.int64)
        return self._batch(rows)

    def _batch(self, rows: npt.NDArray[np.int64]) -> ClickBatch:
        # Here and not above: preparing data must not load torch.
        from heterps_core.data.batch import ClickBatch

        return ClickBatch.from_numpy(
            self.dense.take(rows, axis=0), self.ids.take(rows, axis=0), self.labels.take(rows)
        )

    def _check_shapes(self) -> None:
        num_rows, features = self.manifest.num_rows, self.features
        expected = {
            "dense": (num_rows, features.num_dense),
            "ids": (num_rows, features.num_slots),
            "labels": (num_rows,),
        }
        for name, shape in expected.items():
            found = getattr(self, name).shape
            if found != shape:
                raise DataError(
                    self.directory / f"{name}.npy",
                    f"must have the shape {shape} of the manifest, got {found}; prepare the dataset again",
                )


def epoch_order(num_train_rows: int, epoch: int, seed: int) -> npt.NDArray[np.uint32]:
    """Return the order [num_train_rows] in which an epoch visits the training rows; from its arguments alone."""
    generator = np.random.default_rng([seed, epoch])
    order = np.arange(num_train_rows, dtype=np.uint32)
    generator.shuffle(order)  # in place: `permutation` gives the same order and holds it twice
    return order
