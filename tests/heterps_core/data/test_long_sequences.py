"""Sequences of hundreds of values, of which those that are there are kept in memory and counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import NO_ID
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema, MultiHotColumn, SequenceColumn
from tests.heterps_core.data.synthetic_rows import all_rows

NUM_ROWS, LONGEST, KEPT = 500, 3_000, 1_000
SCHEMA = DataSchema(
    name="views",
    label_column="click",
    categorical_columns=("site",),
    multi_hot_columns=(MultiHotColumn(name="tags", max_length=2),),
    sequence_columns=(SequenceColumn(name="items", max_length=KEPT), SequenceColumn(name="sites")),
)


def draw_lists() -> dict[str, list[list[str]]]:
    generator = np.random.default_rng(0)
    lengths = {"tags": 3, "items": LONGEST, "sites": 4}
    return {
        name: [
            [f"{name} {value}" for value in generator.integers(0, 900, int(most ** generator.random()) - 1)]
            for _ in range(NUM_ROWS)
        ]
        for name, most in lengths.items()
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    folder: Path = tmp_path_factory.mktemp("long")
    labels, sites = np.arange(NUM_ROWS) % 2, [f"site {row % 7}" for row in range(NUM_ROWS)]
    pq.write_table(pa.table({"click": labels, "site": sites, **draw_lists()}), folder / "rows.parquet")
    return prepare_dataset(
        folder / "rows.parquet", schema=SCHEMA, buckets_per_slot=5_000, out_dir=folder / "prepared"
    )


def test_a_batch_has_the_last_values_of_each_sequence_in_order(dataset):
    rows = np.random.default_rng(1).permutation(NUM_ROWS)

    ids = dataset.batch(rows).ids.numpy()

    assert np.array_equal(ids, all_rows(dataset).ids[rows])
    items = ids[:, 3 : 3 + KEPT]
    lists = [draw_lists()["items"][row][-KEPT:] for row in rows]
    row_of_text: dict[str, int] = {}
    for found, texts in zip(items, lists, strict=True):
        assert (found != NO_ID).sum() == max(len(texts), 1)
        for row, text in zip(found.tolist(), texts, strict=False):
            assert row_of_text.setdefault(text, row) == row


def test_row_groups_in_memory_take_what_the_sum_of_the_lengths_takes(dataset):
    dataset.batch(np.arange(NUM_ROWS))
    sequences = dataset._rows._arrays[-1][:NUM_ROWS]
    lists = draw_lists()

    num_values = sum(
        max(min(len(texts), most), 1)
        for name, most in (("items", KEPT), ("sites", 20))
        for texts in lists[name]
    )
    assert sum(row.nbytes for row in sequences) == 4 * num_values
    assert num_values < 0.25 * NUM_ROWS * (KEPT + 20)


def test_the_mean_of_the_lengths_that_are_used_is_known(dataset):
    lists, trained = draw_lists(), range(dataset.num_train_rows)
    means = [
        np.mean([min(max(len(lists[name][row]), 1), most) for row in trained])
        for name, most in (("tags", 2), ("items", KEPT), ("sites", 20))
    ]

    assert dataset.manifest.mean_lengths == pytest.approx((1.0, *means))
    padding = KEPT + 20 - sum(dataset.manifest.mean_lengths[2:])
    assert dataset.manifest.row_bytes == 4 * (1 + 2 + KEPT + 20) + 1 - 4 * int(padding)
