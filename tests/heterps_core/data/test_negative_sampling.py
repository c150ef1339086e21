"""Rows without a click that are left out: which they are, that all others are read once, and who may ask for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema, MultiHotColumn
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.synthetic_rows import all_rows, prepare, write_parquet

NUM_ROWS, NUM_TRAIN_ROWS = 6_000, 4_800
SHARE = 0.3
SCHEMA = replace(CRITEO_SCHEMA, negative_share=SHARE)
"""Every third row is a click."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory):
    """Row groups of 170 rows, so that one of them lies on both sides of the cut."""
    path = tmp_path_factory.mktemp("source") / "rows.parquet"
    return write_parquet(path, NUM_ROWS, rows_per_group=170)


@pytest.fixture(scope="module")
def dataset(source, tmp_path_factory) -> PreparedDataset:
    return prepare(source, tmp_path_factory.mktemp("out") / "prepared", schema=SCHEMA)


def kept_in(dataset: PreparedDataset, whole: PreparedDataset) -> list[int]:
    """Return the places in the source of the rows of a dataset, found by their ids; these differ between rows."""
    places = {row.tobytes(): place for place, row in enumerate(all_rows(whole).ids)}
    assert len(places) == NUM_ROWS
    return [places[row.tobytes()] for row in all_rows(dataset).ids]


def test_all_clicks_and_held_out_rows_stay_and_a_share_of_the_others(source, dataset, tmp_path):
    whole = prepare(source, tmp_path / "whole")

    kept = kept_in(dataset, whole)

    assert kept == sorted(kept)
    assert set(kept) >= {*range(0, NUM_ROWS, 3), *range(NUM_TRAIN_ROWS, NUM_ROWS)}
    drawn = sum(1 for place in kept if place < NUM_TRAIN_ROWS and place % 3)
    num_negatives = NUM_TRAIN_ROWS * 2 // 3
    assert abs(drawn - SHARE * num_negatives) < 4 * np.sqrt(SHARE * (1 - SHARE) * num_negatives)
    manifest = dataset.manifest
    assert (manifest.num_train_rows, manifest.num_eval_rows) == (1_600 + drawn, 1_200)
    assert manifest.num_left_out_rows == num_negatives - drawn
    assert manifest.train_click_rate == pytest.approx(1_600 / (1_600 + drawn))
    labels = [int(place % 3 == 0) for place in kept]
    assert dataset.targets(0, manifest.num_rows)[0].tolist() == labels
    assert dataset.target_batch(np.arange(manifest.num_rows)).labels.tolist() == labels


def test_the_same_rows_stay_in_text_and_in_other_row_groups_and_after_opening_again(
    source, dataset, tmp_path
):
    table = pq.read_table(source)
    pa_csv.write_csv(table, tmp_path / "rows.csv")
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1_000)
    expected = all_rows(dataset)

    for name in ("rows.csv", "rows.parquet"):
        prepare(tmp_path / name, tmp_path / "out" / name, schema=SCHEMA)
        opened = PreparedDataset.open(tmp_path / "out" / name)
        for part in ("ids", "labels"):
            np.testing.assert_array_equal(getattr(all_rows(opened), part), getattr(expected, part))


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_an_epoch_meets_each_kept_row_once_whatever_the_number_of_replicas(dataset, num_replicas):
    batch_size = 60
    num_batches = dataset.num_batches(batch_size)

    met = [
        dataset.batch_rows(1, index, batch_size=batch_size, seed=7, positions=positions)
        for positions in np.split(np.arange(batch_size), num_replicas)
        for index in range(num_batches)
    ]

    rows = np.concatenate(met)
    assert num_batches == dataset.num_train_rows // batch_size
    assert len(np.unique(rows)) == len(rows) == num_batches * batch_size
    assert rows.max() < dataset.num_train_rows
    np.testing.assert_array_equal(dataset.batch(rows[:200]).ids, all_rows(dataset).ids[rows[:200]])


def test_another_share_is_another_data_set(source, tmp_path):
    first = prepare(source, tmp_path / "out", schema=SCHEMA).num_train_rows
    second = prepare(source, tmp_path / "out", schema=replace(SCHEMA, negative_share=0.1)).num_train_rows

    assert second < first
    assert prepare(source, tmp_path / "out", schema=CRITEO_SCHEMA).num_train_rows == NUM_TRAIN_ROWS


def test_weights_and_lists_stay_with_their_rows(tmp_path):
    columns = {
        "click": [int(row % 5 == 0) for row in range(1_000)],
        "weight": [float(row) for row in range(1_000)],
        "tags": [[f"{row}"] * (row % 3) for row in range(1_000)],
    }
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=64)
    schema = DataSchema(
        name="clicks",
        label_column="click",
        weight_column="weight",
        multi_hot_columns=(MultiHotColumn(name="tags"),),
        negative_share=0.2,
    )

    rows = all_rows(prepare_dataset(path, schema=schema, buckets_per_slot=50, out_dir=tmp_path / "out"))

    places = rows.weights.astype(int)
    assert 300 < len(places) < 600
    assert rows.labels.tolist() == [int(place % 5 == 0) for place in places]
    assert (rows.ids >= 1).sum(1).tolist() == [place % 3 for place in places]


def test_a_share_that_keeps_no_row_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pq.read_table(write_parquet(path, 40)).filter([i % 3 > 0 for i in range(40)]), path)

    with pytest.raises(DataError, match=r"none has a click and a negative_share of 1e-09 keeps none of 21"):
        prepare(path, tmp_path / "out", schema=replace(CRITEO_SCHEMA, negative_share=1e-9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"negative_share": 0.0}, "negative_share must be above 0"),
        (
            {"negative_share": 0.5, "label_column": "", "label_columns": ("click", "buy")},
            "several label_columns",
        ),
    ],
)
def test_a_share_that_cannot_be_corrected_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(CRITEO_SCHEMA, column_names=(), **changes)
