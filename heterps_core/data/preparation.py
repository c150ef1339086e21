"""Makes a table of clicks ready for training: Parquet is linked as it lies, text is converted to it once.

Rows are split by time and never at random: a random split shows the model the future and flatters it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import BUFFER_BYTES, MIN_SLOT_ROWS, TEXT_RULE
from heterps_core.data.history.event_join import check_pointers
from heterps_core.data.history.event_store import Events, exclusive, find_events, link_events
from heterps_core.data.manifest import (
    MANIFEST_NAME,
    DatasetManifest,
    PreparationRequest,
    SourceFile,
    describe_source,
    describe_sources,
    folder_of,
    read_manifest,
)
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.bucket_path import BucketPath, SourcePath
from heterps_core.data.reading.file_kinds import is_parquet
from heterps_core.data.reading.group_statistics import unproven_groups
from heterps_core.data.reading.parquet_reader import check_schema, parquet_rows
from heterps_core.data.reading.parquet_rows import AS_STORED, FileView
from heterps_core.data.reading.readers import Source, list_source_files
from heterps_core.data.reading.source_files import check_partitions_are_times
from heterps_core.data.reading.text_conversion import ROWS_PER_GROUP, write_parquet
from heterps_core.data.reading.time_order import check_time_order
from heterps_core.data.requests.request_checks import find_requests
from heterps_core.data.requests.request_rows import WHOLE, Requests, start_before
from heterps_core.data.row_groups import (
    REQUESTS_NAME,
    SOURCE_STARTS_NAME,
    STARTS_NAME,
    RowGroups,
    deleted_name,
    footer_name,
    parquet_name,
)
from heterps_core.data.schema import MAX_TABLE_ROWS, DataSchema
from heterps_core.data.training_rows import check_unproven, save_requests, with_sample, without_left_out
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.json_file import replace_json

logger = logging.getLogger(__name__)

_OWN_NAMES = re.compile(
    rf"{MANIFEST_NAME}|{STARTS_NAME}|{SOURCE_STARTS_NAME}|{REQUESTS_NAME}|rows-\d{{5}}\.(parquet|footer\.zst|deleted\.npy)|(dense|ids|labels)\.npy"
    r"|events\.json|events-\d\d-\d+\.arrow"
)


def prepare_dataset(
    source: Source,
    *,
    schema: DataSchema,
    buckets_per_slot: int | Sequence[int] | None = None,
    eval_fraction: float = 0.2,
    eval_source: Source | None = None,
    numeric_transform: NumericTransform | None = None,
    text_rule: int = TEXT_RULE,
    snapshot: str | None = None,
    out_dir: Path | str,
) -> PreparedDataset:
    """Make a prepared dataset of a table of clicks, or reuse the one that is there.

    Parquet files are read by their footers and a sample of their row groups, and must stay where they are, here or in
    a bucket; text is read and checked as a whole.

    `out_dir` is reused if it was made from the same files (by size, time of change and a sample of
    the content), schema and parameters. Otherwise it is replaced in one step at the end; a failure
    leaves it as it was. Processes that prepare in the same folder wait for one another.

    Args:
        source: A file, a folder, a pattern such as "day_*.gz", each here or in a bucket, or a list of them; rows in
            time order.
        schema: Columns and their meaning.
        buckets_per_slot: Rows of the embedding table of every slot, or of each, at least 2: row 0 for a missing
            value and the rest shared by all values through their hash. None: by the different values that a sample
            of `source` shows, see `distinct_values.py`.
        eval_fraction: Share of the rows, the latest ones, that is held out, in [0, 1). At least one
            row is held out unless it is 0.
        eval_source: Rows to hold out, later than all of `source`, which is trained on then as a whole.
        numeric_transform: Of the model that is to go on with these rows; by default fitted on those to train on.
        text_rule: Of that model, see `FeatureSpec`.
        snapshot: Of the table that lists the files, to be kept with the rows.
        out_dir: Folder of the prepared dataset; its parent is made if it is not there.

    Raises:
        DataError: The source cannot be read (with file and line), or has too few rows.
        ConfigurationError: A parameter is out of range, or `out_dir` holds something else.
    """
    request = PreparationRequest(
        schema=schema,
        buckets_per_slot=buckets_per_slot,
        eval_fraction=eval_fraction,
        numeric_transform=numeric_transform,
        text_rule=text_rule,
        snapshot=snapshot,
    )
    _check_parameters(request)
    out_dir = Path(out_dir).absolute()
    _check_replaceable(out_dir)
    files = list_source_files(source)
    eval_files = () if eval_source is None else list_source_files(eval_source)
    is_by_name = isinstance(source, str | SourcePath) and schema.time_column is None
    if is_by_name and eval_fraction and not eval_files:
        check_partitions_are_times(files)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(out_dir.parent):
        events = None if schema.history is None else find_events(schema.history)
        request = replace(
            request,
            sources=describe_sources((*files, *eval_files), schema.used_columns),
            num_eval_sources=len(eval_files),
            events=() if events is None else events.sources,
        )
        present = read_manifest(folder_of(out_dir))
        if present is not None and present.fingerprint == request.fingerprint:
            logger.info("reusing the prepared dataset in %s", out_dir)
            return PreparedDataset(out_dir, present)
        manifest = _replace(out_dir, (*files, *eval_files), request, events)
        logger.info("prepared %d rows in %s", manifest.num_rows, out_dir)
        # Before another process may replace it.
        return PreparedDataset(out_dir, manifest)


def _replace(
    out_dir: Path, files: Sequence[SourcePath], request: PreparationRequest, events: Events | None
) -> DatasetManifest:
    """Prepare rows beside a folder and put them in its place at the end."""
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    try:
        # Files that a killed preparation left there go.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        check_time_order(files, request.schema)
        manifest = _prepare_rows(partial, files, request, events)
        replace_json(partial / MANIFEST_NAME, manifest.to_json(), indent=2)
        # A process that has the old files open keeps them.
        shutil.rmtree(out_dir, ignore_errors=True)
        partial.rename(out_dir)
    except OSError as error:
        free_bytes = shutil.disk_usage(out_dir.parent).free
        raise DataError(
            out_dir,
            f"cannot write the prepared dataset: {error.strerror or error}, with {free_bytes:,} bytes free; "
            f"free space, or give the source as Parquet, which is not copied",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _prepare_rows(
    directory: Path, files: Sequence[SourcePath], request: PreparationRequest, events: Events | None
) -> DatasetManifest:
    """Put a Parquet file for each source into `directory`, with where their rows begin; return what they hold."""
    schema = request.schema
    with ThreadPoolExecutor(thread_name_prefix="convert") as pool:
        # Arrow leaves Python's lock while it parses and writes.
        taken = list(
            pool.map(
                lambda number, file, known: _take_file(file, directory, number, schema, known),
                count(),
                files,
                request.sources,
            )
        )
    if events is not None:
        for file, each in zip(files, taken, strict=True):
            check_pointers(file, schema, events, columns=each.columns)
        link_events(events, directory.parent, directory)
    sizes = [each.sizes for each in taken]
    starts = np.cumsum([0, *chain.from_iterable(sizes)], dtype=np.int64)
    np.save(directory / STARTS_NAME, starts)
    slot_rows = request.buckets_per_slot or MIN_SLOT_ROWS
    if isinstance(slot_rows, int):
        slot_rows = (slot_rows,) * len(schema.slot_columns)
    num_rows, num_eval_rows = int(starts[-1]), _num_held_out(files, list(map(sum, sizes)), request)
    if schema.request_column is not None:
        num_eval_rows = _with_whole_requests(directory, files, schema, num_eval_rows)
    manifest = DatasetManifest(
        fingerprint=request.fingerprint,
        schema=schema,
        features=schema.features(slot_rows, text_rule=request.text_rule),
        numeric_transform=request.numeric_transform
        or NumericTransform(is_count=(), means=(), standard_deviations=()),
        eval_fraction=num_eval_rows / num_rows if request.num_eval_sources else request.eval_fraction,
        num_train_rows=num_rows - num_eval_rows,
        num_eval_rows=num_eval_rows,
        snapshot=request.snapshot,
        file_groups=tuple(map(len, sizes)),
        sources=request.sources,
        bucket_files=tuple(number for number, each in enumerate(taken) if each.is_in_bucket),
        views={str(number): each.view for number, each in enumerate(taken) if each.view != AS_STORED},
    )
    _check_groups_fit(files, sizes, row_bytes=manifest.row_bytes)
    groups = RowGroups(folder_of(directory), manifest, where=directory)
    if schema.negative_share < 1.0:
        manifest = without_left_out(manifest, groups, directory)
        groups = RowGroups(folder_of(directory), manifest, where=directory)
    manifest = with_sample(manifest, groups, fits=request.numeric_transform is None)
    first_groups = np.cumsum([0, *manifest.file_groups]).tolist()
    unproven = {
        first + group: needs_targets
        for first, each in zip(first_groups, taken, strict=False)
        for group, needs_targets in each.unproven.items()
    }
    check_unproven(manifest, groups, unproven)
    if request.buckets_per_slot is not None:
        return manifest
    by_values = tuple(
        column.table_rows(manifest.num_train_rows) if schema.dynamic_ids is None else column.dynamic_rows
        for column in manifest.columns
    )
    return replace(manifest, features=schema.features(by_values, text_rule=request.text_rule))


def _num_held_out(files: Sequence[SourcePath], rows_of_files: list[int], request: PreparationRequest) -> int:
    """Return how many rows are held out: those of the last files, or a share of all."""
    num_train_files = len(files) - request.num_eval_sources
    for first, stop in ((0, num_train_files), (num_train_files, len(files))):
        if first < stop and not sum(rows_of_files[first:stop]):
            raise DataError(
                files[first], f"must hold at least one row of {request.schema.name} data, got none"
            )
    num_rows = sum(rows_of_files)
    if request.num_eval_sources:
        return sum(rows_of_files[num_train_files:])
    if not request.eval_fraction:
        return 0
    if num_rows < 2:
        raise DataError(
            files[0], f"at least 2 rows are needed to train on one and hold out another, got {num_rows}"
        )
    return min(max(1, round(num_rows * request.eval_fraction)), num_rows - 1)


def _with_whole_requests(
    directory: Path, files: Sequence[SourcePath], schema: DataSchema, num_eval_rows: int
) -> int:
    """Write where requests begin; return how many rows are held out where none of these is cut."""
    starts = find_requests(files, schema)
    save_requests(Requests(starts, np.full(len(starts) - 1, WHOLE, dtype=np.uint8)), directory)
    if not num_eval_rows:
        return 0
    if len(starts) < 3:
        raise DataError(
            files[0],
            f"at least 2 requests are needed to train on one and hold out another, got {len(starts) - 1}",
        )
    num_rows = int(starts[-1])
    return num_rows - min(start_before(starts, num_rows - num_eval_rows), int(starts[-2]))


class _TakenFile(NamedTuple):
    sizes: list[int]
    columns: pa.Schema
    is_in_bucket: bool
    unproven: dict[int, bool]
    """See `unproven_groups`; text was read as a whole."""

    view: FileView


def _take_file(
    source: SourcePath, directory: Path, number: int, schema: DataSchema, known: SourceFile
) -> _TakenFile:
    """Link a Parquet file, keep the footer of one in a bucket, or write a text file as Parquet."""
    target, is_in_bucket, unproven = directory / parquet_name(number), False, {}
    if not is_parquet(source):
        write_parquet(source, target, schema)
        if describe_source(source) != known:
            raise DataError(
                source, "must not change while it is read, but did; prepare it once it is complete"
            )
    with parquet_rows(source if is_parquet(source) else target) as rows:
        check_schema(source, rows, schema)
    view = rows.view.of(schema.used_columns)
    if is_parquet(source):
        unproven = unproven_groups(rows.footer, schema, view)
        if isinstance(source, BucketPath):
            is_in_bucket = True
            with pa.output_stream(directory / footer_name(number), compression="zstd") as stream:
                rows.footer.write_metadata_file(stream)
        else:
            target.symlink_to(source.absolute())
        if view.num_deleted:
            np.save(directory / deleted_name(number), rows.deleted)
    return _TakenFile(rows.group_rows, rows.columns, is_in_bucket, unproven, view)


def _check_groups_fit(files: Sequence[SourcePath], sizes: Sequence[Sequence[int]], *, row_bytes: int) -> None:
    """Refuse a row group that is too large to be held in memory."""
    for file, group_rows in zip(files, sizes, strict=True):
        num_bytes = max(group_rows, default=0) * row_bytes
        if num_bytes > BUFFER_BYTES:
            raise DataError(
                file,
                f"a row group must fit into {BUFFER_BYTES / 1e9:.1f} GB of memory, but one holds {max(group_rows):,} "
                f"rows of {row_bytes} bytes, {num_bytes / 1e9:.1f} GB; write the file again with row "
                f"groups of about {ROWS_PER_GROUP:,} rows",
            )


def _check_parameters(request: PreparationRequest) -> None:
    schema, slot_rows, transform = request.schema, request.buckets_per_slot, request.numeric_transform
    if isinstance(slot_rows, Sequence) and len(slot_rows) != len(schema.slot_columns):
        raise ConfigurationError(
            f"buckets_per_slot must be one number, or one for each of {len(schema.slot_columns)} columns, got "
            f"{len(slot_rows)}"
        )
    if isinstance(slot_rows, int) and not MIN_SLOT_ROWS <= slot_rows <= MAX_TABLE_ROWS:
        raise ConfigurationError(
            f"buckets_per_slot must be in {MIN_SLOT_ROWS}..{MAX_TABLE_ROWS}, got {slot_rows}"
        )
    if not 0.0 <= request.eval_fraction < 1.0:
        raise ConfigurationError(f"eval_fraction must be in [0, 1), got {request.eval_fraction}")
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
