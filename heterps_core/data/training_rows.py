"""Which rows of a prepared source are trained on, and what a sample of them shows."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from heterps_core.data.distinct_values import ValueCounter
from heterps_core.data.features import SEQUENCE
from heterps_core.data.manifest import DatasetManifest
from heterps_core.data.negative_sampling import are_drawn
from heterps_core.data.numeric_transform import Floats, fit_numeric_transform, take_logarithms
from heterps_core.data.reading.row_batch import RowBatch, first_label
from heterps_core.data.requests.request_rows import Requests, kinds_of_requests
from heterps_core.data.row_groups import (
    REQUESTS_NAME,
    SOURCE_STARTS_NAME,
    STARTS_NAME,
    RowGroups,
    sampled_runs,
)
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

logger = logging.getLogger(__name__)

SAMPLED_ROWS, SAMPLED_RUNS = 1_048_576, 32
"""Rows that are looked at, and the runs that they lie in, spread evenly over the training rows; where these runs lie
does not depend on the kind of the files or their row groups, of which one or two are read for each."""


_MOST_FITTED = 1 << 24
"""Numbers of all columns together that are in memory to fit the transform: 134 MB."""


def without_left_out(manifest: DatasetManifest, groups: RowGroups, directory: Path) -> DatasetManifest:
    """Number the rows again without those that are left out; reads the labels of the training rows."""
    sizes = np.diff(groups.starts)
    of_training = groups.between(0, manifest.num_train_rows)
    if groups.requests is not None:
        groups.requests = _with_kinds(groups.requests, groups, manifest)
        save_requests(groups.requests, directory)
    with ThreadPoolExecutor(groups.num_threads, thread_name_prefix="labels") as pool:
        sizes[: of_training.stop] = list(pool.map(groups.num_kept, of_training))
    starts = np.cumsum([0, *sizes], dtype=np.int64)
    num_left_out = manifest.num_rows - int(starts[-1])
    if num_left_out == manifest.num_train_rows:
        raise DataError(
            manifest.sources[0].path,
            f"must keep a row to train on, but none has a click and a negative_share of "
            f"{manifest.schema.negative_share} keeps none of {num_left_out:,}; raise it",
        )
    np.save(directory / SOURCE_STARTS_NAME, groups.starts)
    np.save(directory / STARTS_NAME, starts)
    return replace(
        manifest, num_train_rows=manifest.num_train_rows - num_left_out, num_left_out_rows=num_left_out
    )


def save_requests(requests: Requests, directory: Path) -> None:
    """Write the requests of a source."""
    kinds = np.append(requests.kinds, 0)
    np.save(directory / REQUESTS_NAME, np.column_stack([requests.source_starts, kinds]))


def _with_kinds(requests: Requests, groups: RowGroups, manifest: DatasetManifest) -> Requests:
    """Return which requests are trained on; reads the labels of the training rows."""
    with ThreadPoolExecutor(groups.num_threads, thread_name_prefix="labels") as pool:
        labels = pool.map(groups.read_targets, groups.between(0, manifest.num_train_rows))
        is_click = np.concatenate([of_group == 1 for of_group, _ in labels])[: manifest.num_train_rows]
    starts = requests.source_starts
    is_drawn = are_drawn(starts[:-1].astype(np.uint64), manifest.schema.negative_share)
    kinds = kinds_of_requests(starts, is_click, is_drawn, num_train_rows=manifest.num_train_rows)
    return replace(requests, kinds=kinds)


def with_sample(manifest: DatasetManifest, groups: RowGroups, *, fits: bool) -> DatasetManifest:
    """Return a manifest with what evenly spread runs of the training rows show; all of them where they are few.

    Of many numeric columns the transform is fitted on every second of these rows, or every third, and so on.
    """
    num_rows = num_clicks = 0
    num_cut: Counter[str] = Counter()
    num_values: Counter[str] = Counter()
    counters = [ValueCounter() for _ in manifest.schema.slot_columns]
    # Short runs of large row groups lie in the same one.
    read = lru_cache(1)(groups.read)

    num_numbers = min(manifest.num_train_rows, SAMPLED_ROWS) * manifest.features.num_dense
    every = max(1, math.ceil(num_numbers / _MOST_FITTED))

    def chunks() -> Iterator[Floats]:
        nonlocal num_rows, num_clicks
        for first, stop in sampled_runs(manifest.num_train_rows, at_most=SAMPLED_ROWS, num_runs=SAMPLED_RUNS):
            for group in groups.between(first, stop):
                batch, start = read(group), int(groups.starts[group])
                mine = slice(max(first - start, 0), stop - start)
                num_rows += len(batch.labels[mine])
                num_clicks += int(first_label(batch.labels)[mine].sum(dtype=np.int64))
                num_cut.update(_longer_lists(batch, manifest.schema, mine))
                num_values.update(_values_of_lists(batch, manifest.schema, mine))
                for counter, texts in zip(counters, batch.texts, strict=True):
                    counter.add(texts[mine])
                yield take_logarithms(batch.numbers[mine][::every], manifest.schema.count_flags)

    transform = fit_numeric_transform(chunks(), manifest.schema.count_flags)
    for name, number in num_cut.items():
        if number:
            logger.warning(
                "%.1f %% of the lists of column %s are longer than its max_length, %d: their %s values are used, and "
                "the rest of them is not",
                100 * number / num_rows,
                name,
                manifest.schema.list_columns[name].max_length,
                "first" if name in {each.name for each in manifest.schema.multi_hot_columns} else "last",
            )
    return replace(
        manifest,
        num_sampled_rows=num_rows,
        num_sampled_clicks=num_clicks,
        columns=tuple(
            counter.column(name, num_rows=manifest.num_train_rows)
            for name, counter in zip(manifest.schema.slot_columns, counters, strict=True)
        ),
        mean_lengths=tuple(
            num_values[name] / num_rows if name in num_values else 1.0
            for name in manifest.schema.slot_columns
        ),
        rows_per_list=_rows_per_list(manifest, groups),
        numeric_transform=transform if fits else manifest.numeric_transform,
    )


def _rows_per_list(manifest: DatasetManifest, groups: RowGroups) -> tuple[float, ...]:
    """Return `DatasetManifest.rows_per_list`: sequences of one history are shared together."""
    if groups.requests is None:
        return ()
    features, columns = manifest.features, manifest.schema.request_columns
    named = zip(features.slot_names, features.slot_histories, strict=True)
    own = {history for name, history in named if name not in columns}
    kinds = zip(features.slot_poolings, features.slot_histories, strict=True)
    mean = manifest.num_rows / (len(groups.requests.starts) - 1)
    return tuple(mean if kind == SEQUENCE and history not in own else 1.0 for kind, history in kinds)


def check_unproven(manifest: DatasetManifest, groups: RowGroups, unproven: Mapping[int, bool]) -> None:
    """Read row groups that the sample did not meet and of which no statistics show that every row can be used.

    Args:
        manifest: Of the rows.
        groups: To read.
        unproven: Row groups; whether labels and weights alone are to be read.

    Raises:
        DataError: A row breaks the schema, among the held-out rows, too: found here, it costs no machines.
    """
    runs = sampled_runs(manifest.num_train_rows, at_most=SAMPLED_ROWS, num_runs=SAMPLED_RUNS)
    sampled = {group for first, stop in runs for group in groups.between(first, stop)}
    rest = sorted(unproven.keys() - sampled)
    if rest:
        logger.info(
            "%d of %d row groups have no statistics that show their values; reading them",
            len(rest),
            len(groups.starts) - 1,
        )

    def check(group: int) -> None:
        (groups.read_targets if unproven[group] else groups.read)(group)

    with ThreadPoolExecutor(groups.num_threads, thread_name_prefix="check") as pool:
        for _ in pool.map(check, rest):
            pass


def _values_of_lists(batch: RowBatch, schema: DataSchema, rows: slice) -> dict[str, int]:
    """Return how many values some rows have in each column of lists, a missing one where a list is empty."""
    lengths = {
        name: pc.fill_null(pc.list_value_length(texts[rows]), 0).to_numpy(zero_copy_only=False)
        for name, texts in zip(schema.slot_columns, batch.texts, strict=True)
        if name in schema.list_columns
    }
    return {
        name: int(own.clip(1, schema.list_columns[name].max_length).sum()) for name, own in lengths.items()
    }


def _longer_lists(batch: RowBatch, schema: DataSchema, rows: slice) -> dict[str, int]:
    """Return how many lists of each column in some rows are longer than what is used of them."""
    return {
        name: pc.greater(pc.list_value_length(texts[rows]), schema.list_columns[name].max_length).true_count
        for name, texts in zip(schema.slot_columns, batch.texts, strict=True)
        if name in schema.list_columns
    }
