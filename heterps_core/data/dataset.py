"""A table of clicks made ready for training: hashed, split by time, laid out for fast random access.

Preparation is one streaming pass from text or Parquet to three NumPy files in time order, which any
number of workers then map into memory. Rows are split by time and never at random: a random split
shows the model the future and flatters it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from heterps_core.data.array_files import ARRAY_NAMES, map_array, standardise_in_place, write_arrays
from heterps_core.data.features import MIN_SLOT_ROWS, FeatureSpec
from heterps_core.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    DatasetManifest,
    SourceFile,
    compute_fingerprint,
    describe_source,
    read_manifest,
    write_manifest,
)
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.readers import Source, list_source_files, read_rows
from heterps_core.data.row_batch import RowBatch
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from heterps_core.data.batch import ClickBatch

__all__ = ["DatasetManifest", "PreparedDataset", "prepare_dataset"]

logger = logging.getLogger(__name__)

_MAX_ROWS = 2**32 - 1
"""Row numbers of an epoch's order are held in 32 bits."""


class PreparedDataset:
    """Training and held-out rows on disk, mapped into memory and gathered by row number.

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
                f"{FORMAT_VERSION}; prepare it anew",
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

        Args:
            epoch: Counted from 0.
            seed: At least 0.
        """
        if (epoch, seed) != self._order_key:
            self._order = epoch_order(self.num_train_rows, epoch, seed)
            self._order.flags.writeable = False
            self._order_key = (epoch, seed)
        return self._order

    def batch_rows(
        self, epoch: int, batch_index: int, *, batch_size: int, seed: int, lo: int = 0, hi: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the row numbers of positions lo..hi (half open) of one global batch.

        The rows of a global batch are sorted before they are cut, so which rows a position holds does
        not depend on how many workers share the batch, and each slice reads the files forwards.

        Args:
            epoch: Counted from 0.
            batch_index: Global batch of the epoch, from 0 to `num_batches(batch_size)` - 1.
            batch_size: Rows of a global batch.
            seed: At least 0.
            lo: First position, at least 0.
            hi: Position after the last, at most `batch_size`; None stands for `batch_size`.

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
        """Return the given training rows as tensors.

        Args:
            rows: [B] row numbers below `num_train_rows`, as from `batch_rows`.
        """
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
                    f"must have the shape {shape} of the manifest, got {found}; prepare the dataset anew",
                )


def epoch_order(num_train_rows: int, epoch: int, seed: int) -> npt.NDArray[np.uint32]:
    """Return the order [num_train_rows] in which an epoch visits the training rows; from its arguments alone."""
    generator = np.random.default_rng([seed, epoch])
    return generator.permutation(np.arange(num_train_rows, dtype=np.uint32))


def prepare_dataset(
    source: Source,
    *,
    schema: DataSchema,
    buckets_per_slot: int,
    eval_fraction: float = 0.2,
    eval_source: Source | None = None,
    numeric_transform: NumericTransform | None = None,
    out_dir: Path | str,
) -> PreparedDataset:
    """Read a table of clicks once and write it as a prepared dataset, or reuse the one that is there.

    `out_dir` is reused if it was made from the same files (by size, time of change and a sample of
    the content), schema and parameters. Otherwise it is replaced in one step at the end; a failure
    leaves it as it was. Processes that prepare in the same folder wait for one another.

    Args:
        source: A file, a folder, a pattern such as "day_*.gz", or a list of them; rows in time order.
        schema: Columns and their meaning.
        buckets_per_slot: Rows of each slot's embedding table, at least 2: row 0 for a missing value
            and the rest shared by all values through their hash.
        eval_fraction: Share of the rows, the latest ones, that is held out, in [0, 1). At least one
            row is held out unless it is 0.
        eval_source: Rows to hold out, later than all of `source`, which is trained on then as a whole.
        numeric_transform: Of the model that is to go on with these rows; by default fitted on those to train on.
        out_dir: Folder of the prepared dataset; its parent is made if it is not there.

    Raises:
        DataError: The source cannot be read (with file and line), or has too few rows.
        ConfigurationError: A parameter is out of range, or `out_dir` holds something else.
    """
    _check_parameters(buckets_per_slot, eval_fraction)
    _check_transform(numeric_transform, schema)
    out_dir = Path(out_dir).absolute()
    _check_replaceable(out_dir)
    files = list_source_files(source)
    eval_files = () if eval_source is None else list_source_files(eval_source)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(out_dir.parent):
        sources = tuple(describe_source(file) for file in (*files, *eval_files))
        fingerprint = compute_fingerprint(
            sources,
            schema,
            buckets_per_slot,
            eval_fraction,
            num_eval_sources=len(eval_files),
            numeric_transform=numeric_transform,
        )
        present = read_manifest(out_dir)
        if present is not None and present.fingerprint == fingerprint:
            logger.info("reusing the prepared dataset in %s", out_dir)
            return PreparedDataset(out_dir, present)
        partial = out_dir.with_name(f".{out_dir.name}.partial")
        try:
            _start_empty(partial)
            manifest = _prepare_arrays(
                partial,
                files,
                eval_files,
                schema=schema,
                buckets_per_slot=buckets_per_slot,
                eval_fraction=eval_fraction,
                numeric_transform=numeric_transform,
                sources=sources,
                fingerprint=fingerprint,
            )
            write_manifest(partial, manifest)
            _replace(out_dir, partial)
        except OSError as error:
            raise DataError(
                out_dir, f"cannot write the prepared dataset: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    logger.info("prepared %d rows in %s", manifest.num_rows, out_dir)
    return PreparedDataset.open(out_dir)


def _prepare_arrays(
    directory: Path,
    files: Sequence[Path],
    eval_files: Sequence[Path],
    *,
    schema: DataSchema,
    buckets_per_slot: int,
    eval_fraction: float,
    numeric_transform: NumericTransform | None,
    sources: tuple[SourceFile, ...],
    fingerprint: str,
) -> DatasetManifest:
    """Write the three arrays into `directory` and return what they hold."""
    features = FeatureSpec(
        num_dense=len(schema.numeric_columns),
        slot_rows=(buckets_per_slot,) * len(schema.categorical_columns),
        slot_names=schema.categorical_columns,
        dense_names=schema.numeric_columns,
    )
    is_count = schema.count_flags
    num_read_to_train = 0

    def rows() -> Iterator[RowBatch]:
        nonlocal num_read_to_train
        for batch in read_rows(files, schema):
            num_read_to_train += len(batch.labels)
            yield batch
        yield from read_rows(eval_files, schema)

    num_rows = write_arrays(directory, rows(), features, is_count)
    if eval_files:
        num_eval_rows = num_rows - num_read_to_train
        eval_fraction = num_eval_rows / num_rows
    else:
        num_eval_rows = _num_eval_rows(num_rows, eval_fraction)
    _check_num_rows(num_rows, eval_fraction, files)
    num_train_rows = num_rows - num_eval_rows
    transform = standardise_in_place(directory, num_train_rows, is_count, numeric_transform)
    labels = map_array(directory, "labels")
    return DatasetManifest(
        fingerprint=fingerprint,
        schema=schema,
        features=features,
        numeric_transform=transform,
        eval_fraction=eval_fraction,
        num_train_rows=num_train_rows,
        num_eval_rows=num_eval_rows,
        num_train_clicks=int(labels[:num_train_rows].sum(dtype=np.int64)),
        num_eval_clicks=int(labels[num_train_rows:].sum(dtype=np.int64)),
        sources=sources,
    )


def _num_eval_rows(num_rows: int, eval_fraction: float) -> int:
    """Return how many of the latest rows are held out."""
    return 0 if eval_fraction == 0.0 else min(max(1, round(num_rows * eval_fraction)), num_rows - 1)


def _check_num_rows(num_rows: int, eval_fraction: float, files: Sequence[Path]) -> None:
    if num_rows > _MAX_ROWS:
        raise DataError(files[0], f"a dataset can hold at most {_MAX_ROWS} rows, got {num_rows}")
    if eval_fraction > 0.0 and num_rows < 2:
        raise DataError(
            files[0], f"at least 2 rows are needed to train on one and hold out another, got {num_rows}"
        )


def _check_transform(transform: NumericTransform | None, schema: DataSchema) -> None:
    if transform is not None and transform.is_count != schema.count_flags:
        raise ConfigurationError(
            f"a numeric transform must be of the numeric columns of the {schema.name} data and treat the same ones "
            f"as counts; fit a new one, and train from the start"
        )


def _check_parameters(buckets_per_slot: int, eval_fraction: float) -> None:
    if not MIN_SLOT_ROWS <= buckets_per_slot < 2**31:
        raise ConfigurationError(
            f"buckets_per_slot must be in {MIN_SLOT_ROWS}..{2**31 - 1}, got {buckets_per_slot}"
        )
    if not 0.0 <= eval_fraction < 1.0:
        raise ConfigurationError(f"eval_fraction must be in [0, 1), got {eval_fraction}")


def _check_replaceable(out_dir: Path) -> None:
    """Refuse to replace a folder that holds anything but a prepared dataset."""
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise ConfigurationError(f"out_dir must be a folder, but {out_dir} is a file; choose another path")
    own = {MANIFEST_NAME, *(f"{name}.npy" for name in ARRAY_NAMES)}
    foreign = sorted(entry.name for entry in out_dir.iterdir() if entry.name not in own)
    if foreign:
        raise ConfigurationError(
            f"out_dir must be new, empty or a prepared dataset, but {out_dir} holds {foreign[0]!r}; "
            f"choose another folder"
        )


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Hold an advisory lock on a folder; it ends with the process, however that ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start_empty(directory: Path) -> None:
    """Make an empty folder; what a killed preparation left there goes."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir()


def _replace(out_dir: Path, partial: Path) -> None:
    """Put the finished folder in place; who has the old files mapped keeps them."""
    if out_dir.exists():
        shutil.rmtree(out_dir)
    partial.rename(out_dir)
