"""Makes a table of clicks ready for training: Parquet is linked as it lies, text is converted to it once.

Rows are split by time and never at random: a random split shows the model the future and flatters it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import BUFFER_BYTES, MIN_SLOT_ROWS, FeatureSpec, buckets_for_rows
from heterps_core.data.manifest import (
    MANIFEST_NAME,
    DatasetManifest,
    SourceFile,
    compute_fingerprint,
    describe_source,
    folder_of,
    read_manifest,
)
from heterps_core.data.numeric_transform import NumericTransform, fit_numeric_transform, take_logarithms
from heterps_core.data.reading.parquet_reader import group_sizes
from heterps_core.data.reading.readers import Source, is_parquet, list_source_files, read_rows
from heterps_core.data.row_groups import STARTS_NAME, RowGroups, parquet_name
from heterps_core.data.schema import DataSchema
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.json_file import replace_json

logger = logging.getLogger(__name__)

ROWS_PER_GROUP = 16_384
"""Of the files that text is converted to: a gigabyte holds 417 row groups of Criteo's columns."""

SAMPLED_ROWS = 1_048_576

_OWN_NAMES = re.compile(rf"{MANIFEST_NAME}|{STARTS_NAME}|rows-\d{{5}}\.parquet|(dense|ids|labels)\.npy")
"""The last of format 1."""


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
    """Make a prepared dataset of a table of clicks, or reuse the one that is there.

    Parquet files are read by their footers and a sample of their row groups, and must stay where they are; text is
    read and checked as a whole.

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
        present = read_manifest(folder_of(out_dir))
        if present is not None and present.fingerprint == fingerprint:
            logger.info("reusing the prepared dataset in %s", out_dir)
            return PreparedDataset(out_dir, present)
        partial = out_dir.with_name(f".{out_dir.name}.partial")
        try:
            # What a killed preparation left there goes.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            manifest = _prepare_rows(
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
            # Who has the old files open keeps them.
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


def _prepare_rows(
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
    """Put a Parquet file for each source into `directory`, with where their rows begin; return what they hold."""
    with ThreadPoolExecutor(thread_name_prefix="convert") as pool:
        # Arrow leaves Python's lock while it parses and writes.
        sizes = list(
            pool.map(
                lambda numbered: _take_file(numbered[1], directory / parquet_name(numbered[0]), schema),
                enumerate((*files, *eval_files)),
            )
        )
    num_rows_of = [sum(each) for each in sizes]
    num_rows = sum(num_rows_of)
    if buckets_per_slot is None:
        buckets_per_slot = buckets_for_rows(sum(num_rows_of[: len(files)]))
    if eval_files:
        num_eval_rows = sum(num_rows_of[len(files) :])
        eval_fraction = num_eval_rows / num_rows
    else:
        num_eval_rows = min(max(1, round(num_rows * eval_fraction)), num_rows - 1) if eval_fraction else 0
    if eval_fraction > 0.0 and num_rows < 2:
        raise DataError(
            files[0], f"at least 2 rows are needed to train on one and hold out another, got {num_rows}"
        )
    starts = np.cumsum([0, *(size for each in sizes for size in each)], dtype=np.int64)
    np.save(directory / STARTS_NAME, starts)
    manifest = DatasetManifest(
        fingerprint=fingerprint,
        schema=schema,
        features=FeatureSpec(
            num_dense=len(schema.numeric_columns),
            slot_rows=(buckets_per_slot,) * len(schema.categorical_columns),
            slot_names=schema.categorical_columns,
            dense_names=schema.numeric_columns,
        ),
        numeric_transform=numeric_transform
        or NumericTransform(is_count=(), means=(), standard_deviations=()),
        eval_fraction=eval_fraction,
        num_train_rows=num_rows - num_eval_rows,
        num_eval_rows=num_eval_rows,
        num_sampled_rows=0,
        num_sampled_clicks=0,
        file_groups=tuple(len(each) for each in sizes),
        sources=sources,
    )
    _check_groups_fit((*files, *eval_files), sizes, manifest.features)
    return _with_sample(
        manifest, RowGroups(folder_of(directory), manifest, where=directory), fits=numeric_transform is None
    )


def _take_file(source: Path, target: Path, schema: DataSchema) -> list[int]:
    """Link a Parquet file, or write a text file as one; returns the rows of each row group."""
    if is_parquet(source, schema):
        target.symlink_to(source.absolute())
    else:
        _write_parquet(source, target, schema)
    sizes = group_sizes(target, schema)
    if not sum(sizes):
        raise DataError(source, f"must hold at least one row of {schema.name} data, got none")
    return sizes


def _write_parquet(source: Path, target: Path, schema: DataSchema) -> None:
    """Write the rows of a file as Parquet that the same schema reads."""
    label_texts = pa.array([schema.label_negative[0], schema.label_positive[0]])
    types = [pa.dictionary(pa.int8(), pa.string())]
    types += [pa.float32()] * len(schema.numeric_columns) + [pa.string()] * len(schema.categorical_columns)
    table_schema = pa.schema(list(zip(schema.used_columns, types, strict=True)))
    with pq.ParquetWriter(target, table_schema, compression="zstd", write_statistics=False) as writer:
        held: list[pa.RecordBatch] = []
        for batch in read_rows([source], schema):
            columns = [pa.DictionaryArray.from_arrays(pa.array(batch.labels.view(np.int8)), label_texts)]
            columns += [pa.array(numbers, from_pandas=True) for numbers in batch.numbers.T.astype(np.float32)]
            held.append(pa.record_batch([*columns, *batch.texts], schema=table_schema))
            if sum(each.num_rows for each in held) >= ROWS_PER_GROUP:
                held = _write_groups(writer, held, at_least=ROWS_PER_GROUP)
        _write_groups(writer, held, at_least=1)


def _write_groups(
    writer: pq.ParquetWriter, batches: list[pa.RecordBatch], *, at_least: int
) -> list[pa.RecordBatch]:
    """Write full row groups of the batches; returns the rest, of fewer rows than `at_least`."""
    table = pa.Table.from_batches(batches, writer.schema) if batches else None
    first = 0
    while table is not None and table.num_rows - first >= at_least:
        writer.write_table(table.slice(first, ROWS_PER_GROUP))
        first += ROWS_PER_GROUP
    return [] if table is None else list(table.slice(first).to_batches())


def _check_groups_fit(files: Sequence[Path], sizes: Sequence[Sequence[int]], features: FeatureSpec) -> None:
    """Refuse a row group that is too large to be held in memory."""
    for file, group_rows in zip(files, sizes, strict=True):
        num_bytes = max(group_rows) * features.row_bytes
        if num_bytes > BUFFER_BYTES:
            raise DataError(
                file,
                f"a row group must fit into {BUFFER_BYTES / 1e9:.1f} GB of memory, but one holds {max(group_rows):,} "
                f"rows of {features.row_bytes} bytes, {num_bytes / 1e9:.1f} GB; write the file again with row "
                f"groups of about {ROWS_PER_GROUP:,} rows",
            )


def _with_sample(manifest: DatasetManifest, groups: RowGroups, *, fits: bool) -> DatasetManifest:
    """Return a manifest with what evenly spread row groups of the training rows show; all of them where they are few.

    Means and deviations of the parts are merged exactly.
    """
    training = groups.between(0, manifest.num_train_rows)
    largest = int(np.diff(groups.starts[: training.stop + 1]).max())
    count = min(len(training), max(1, SAMPLED_ROWS // largest))
    num_rows = num_clicks = 0

    def chunks() -> Iterator[npt.NDArray[np.float32]]:
        nonlocal num_rows, num_clicks
        for number in range(count):
            group = number * len(training) // count
            batch = groups.read(group)
            stop = manifest.num_train_rows - int(groups.starts[group])
            num_rows += min(stop, len(batch.labels))
            num_clicks += int(batch.labels[:stop].sum(dtype=np.int64))
            yield take_logarithms(batch.numbers[:stop], manifest.schema.count_flags)

    transform = fit_numeric_transform(chunks(), manifest.schema.count_flags)
    return replace(
        manifest,
        num_sampled_rows=num_rows,
        num_sampled_clicks=num_clicks,
        numeric_transform=transform if fits else manifest.numeric_transform,
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
    foreign = sorted(entry.name for entry in out_dir.iterdir() if not _OWN_NAMES.fullmatch(entry.name))
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
