"""Makes a table of clicks ready for training: one streaming pass from text or Parquet to three NumPy files.

Rows are split by time and never at random: a random split shows the model the future and flatters it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from heterps_core.data.array_files import ARRAY_NAMES, map_array, standardise_in_place, write_arrays
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import MIN_SLOT_ROWS, FeatureSpec, buckets_for_rows
from heterps_core.data.manifest import (
    MANIFEST_NAME,
    DatasetManifest,
    SourceFile,
    compute_fingerprint,
    describe_source,
    read_manifest,
)
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.readers import Source, count_rows, list_source_files, read_rows
from heterps_core.data.reading.row_batch import RowBatch
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.json_file import replace_json

logger = logging.getLogger(__name__)

_MAX_ROWS = 2**32 - 1
"""Row indices of an epoch's order are held in 32 bits."""


def prepare_dataset(
    source: Source,
    *,
    schema: DataSchema,
    buckets_per_slot: int | None = None,
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
            and the rest shared by all values through their hash. None: by the number of rows of `source`.
        eval_fraction: Share of the rows, the latest ones, that is held out, in [0, 1). At least one
            row is held out unless it is 0.
        eval_source: Rows to hold out, later than all of `source`, which is trained on then as a whole.
        numeric_transform: Of the model that is to go on with these rows; by default fitted on those to train on.
        out_dir: Folder of the prepared dataset; its parent is made if it is not there.

    Raises:
        DataError: The source cannot be read (with file and line), or has too few rows.
        ConfigurationError: A parameter is out of range, or `out_dir` holds something else.
    """
    _check_parameters(buckets_per_slot, eval_fraction, numeric_transform, schema)
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
            # What a killed preparation left there goes.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
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
            replace_json(partial / MANIFEST_NAME, manifest.to_json(), indent=2)
            # Who has the old files mapped keeps them.
            shutil.rmtree(out_dir, ignore_errors=True)
            partial.rename(out_dir)
        except OSError as error:
            raise DataError(
                out_dir, f"cannot write the prepared dataset: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        logger.info("prepared %d rows in %s", manifest.num_rows, out_dir)
        # Before another process may replace it.
        return PreparedDataset(out_dir, manifest)


def _prepare_arrays(
    directory: Path,
    files: Sequence[Path],
    eval_files: Sequence[Path],
    *,
    schema: DataSchema,
    buckets_per_slot: int | None,
    eval_fraction: float,
    numeric_transform: NumericTransform | None,
    sources: tuple[SourceFile, ...],
    fingerprint: str,
) -> DatasetManifest:
    """Write the three arrays into `directory` and return what they hold."""
    if buckets_per_slot is None:
        buckets_per_slot = buckets_for_rows(count_rows(files, schema))
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
        num_eval_rows = min(max(1, round(num_rows * eval_fraction)), num_rows - 1) if eval_fraction else 0
    if num_rows > _MAX_ROWS:
        raise DataError(files[0], f"a dataset can hold at most {_MAX_ROWS} rows, got {num_rows}")
    if eval_fraction > 0.0 and num_rows < 2:
        raise DataError(
            files[0], f"at least 2 rows are needed to train on one and hold out another, got {num_rows}"
        )
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


def _check_parameters(
    buckets_per_slot: int | None,
    eval_fraction: float,
    transform: NumericTransform | None,
    schema: DataSchema,
) -> None:
    if buckets_per_slot is not None and not MIN_SLOT_ROWS <= buckets_per_slot < 2**31:
        raise ConfigurationError(
            f"buckets_per_slot must be in {MIN_SLOT_ROWS}..{2**31 - 1}, got {buckets_per_slot}"
        )
    if not 0.0 <= eval_fraction < 1.0:
        raise ConfigurationError(f"eval_fraction must be in [0, 1), got {eval_fraction}")
    if transform is not None and transform.is_count != schema.count_flags:
        raise ConfigurationError(
            f"a numeric transform must be of the numeric columns of the {schema.name} data and treat the same ones "
            f"as counts; fit a new one, and train from the start"
        )


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
