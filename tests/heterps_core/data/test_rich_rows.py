"""Rows of all kinds of columns come out of text as out of Parquet, whole, by batches and without their features."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.row_arrays import ids_of_texts
from heterps_core.errors import DataError
from tests.heterps_core.data.rich_clicks import RICH_SCHEMA, write_rich_rows
from tests.heterps_core.data.synthetic_rows import all_rows, held_out, held_out_labels, rows_of_texts

NUM_ROWS = 3_000
EVAL_ROWS = slice(2_400, 3_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rich") / "rows.parquet"
    write_rich_rows(path, num_rows=NUM_ROWS, seed=0)
    return path


@pytest.fixture(scope="module")
def dataset(source: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepare(source, tmp_path_factory.mktemp("out"))


def prepare(source: Path, folder: Path) -> PreparedDataset:
    return prepare_dataset(source, schema=RICH_SCHEMA, buckets_per_slot=40, out_dir=folder / "prepared")


def write_text(source: Path, path: Path, **changes: str) -> Path:
    """Write a Parquet file again as CSV; changes are of the first row."""
    rows = pq.read_table(source).to_pylist()
    for row in rows:
        row |= {name: "|".join(row[name] or ()) for name in ("tags", "few_tags", "history")}
    rows[0] |= changes
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_text_gives_the_rows_of_parquet(source, dataset, tmp_path):
    text = prepare(write_text(source, tmp_path / "rows.csv"), tmp_path)

    for name in ("ids", "labels", "weights"):
        np.testing.assert_array_equal(getattr(all_rows(text), name), getattr(all_rows(dataset), name))
    np.testing.assert_allclose(all_rows(text).dense, all_rows(dataset).dense, atol=1e-6)


def test_batches_and_held_out_rows_carry_labels_and_weights(source, dataset):
    columns, rows = pq.read_table(source).to_pydict(), np.array([7, 2_999, 1_500])

    for batch in (dataset.batch(rows), dataset.target_batch(rows)):
        assert batch.labels.tolist() == [[columns["click"][row], columns["buy"][row]] for row in rows]
        assert batch.weights.tolist() == [columns["weight"][row] for row in rows]
        assert batch.rows(1, 3).weights.tolist() == batch.weights[1:].tolist()
    assert held_out_labels(dataset).tolist() == columns["click"][EVAL_ROWS]
    assert dataset.target_batch(held_out(dataset)).weights.tolist() == columns["weight"][EVAL_ROWS]


def test_both_labels_are_read_and_a_bad_one_is_named_with_its_column(source, dataset, tmp_path):
    columns = pq.read_table(source).to_pydict()

    labels = dataset.target_batch(np.arange(5, 2_500)).labels

    np.testing.assert_array_equal(labels, np.transpose([columns["click"], columns["buy"]])[5:2_500])
    assert dataset.targets(5, 2_500)[0].tolist() == columns["click"][5:2_500]
    assert dataset.targets(3, 3)[0].shape == (0,)
    path = write_text(source, tmp_path / "rows.csv", buy="perhaps")
    with pytest.raises(DataError, match=r"line 2: the label \(column buy\) must be 1 .* got 'perhaps'"):
        prepare(path, tmp_path)


def test_a_line_without_a_weight_is_named(source, tmp_path):
    path = write_text(source, tmp_path / "rows.csv", weight="")

    with pytest.raises(DataError, match=r"rows.csv, line 2: column weight must be the row's weight.* got ''"):
        prepare(path, tmp_path)


@pytest.mark.slow
def test_a_list_gives_the_ids_of_its_texts_then_none(source, dataset):
    """Beside each list taken apart in plain Python and hashed text by text."""
    columns = pq.read_table(source).to_pydict()
    found = all_rows(dataset).ids

    assert found.shape == (NUM_ROWS, 1 + 8 + 3 + 5)
    for slot, (name, length, ids) in enumerate(
        [("tags", 8, found[:, 1:9]), ("few_tags", 3, found[:, 9:12]), ("history", 5, found[:, 12:])], start=1
    ):
        of_text = {
            text: int(rows_of_texts(pa.array([text]), slot=slot, num_rows=40)[0])
            for texts in columns[name]
            for text in texts or ()
        }
        # An empty list and none are a missing value, as an empty text is.
        kept = slice(-length, None) if name == "history" else slice(length)
        expected = [[of_text[text] for text in texts or ()][kept] or [0] for texts in columns[name]]
        assert ids.tolist() == [row + [-1] * (length - len(row)) for row in expected]
        assert sum(row == [0] for row in expected) > 100


def test_missing_values_within_a_list_are_left_out():
    lists = pa.array([["a", None, "b"], ["", None], None, [], ["c", "a", "b"]], pa.list_(pa.string()))
    features = FeatureSpec(num_dense=0, slot_rows=(1_000,), slot_lengths=(2,))
    a, b, c = rows_of_texts(pa.array(["a", "b", "c"]), slot=0, num_rows=1_000).tolist()

    assert ids_of_texts([lists], features).tolist() == [[a, b], [0, -1], [0, -1], [0, -1], [c, a]]
    assert ids_of_texts([lists[3:]], features).tolist() == [[0, -1], [c, a]]


def test_lists_that_are_cut_are_reported_once(source, tmp_path, caplog):
    prepare(source, tmp_path)
    prepare(source, tmp_path)

    reported = [record.getMessage() for record in caplog.records if "max_length" in record.getMessage()]
    lengths = [len(tags) for tags in pq.read_table(source)["tags"][:2_400].to_pylist()]
    share = 100 * np.mean(np.array(lengths) > 8)
    assert len(reported) == 3
    assert reported[0] == (
        f"{share:.1f} % of the lists of column tags are longer than its max_length, 8: their first values are used, "
        f"and the rest of them is not"
    )
    assert "of column history" in reported[2]
    assert "their last values are used" in reported[2]


def test_lists_of_the_same_numbers_are_the_same_categories_whatever_type_each_file_gives_them(
    source, tmp_path
):
    table = pq.read_table(source)

    def write(name, kind):
        numbers = [[number for number, _ in enumerate(tags or ())] for tags in table["tags"].to_pylist()]
        column = pa.array(numbers, pa.list_(kind))
        changed = table.set_column(table.schema.get_field_index("tags"), "tags", column)
        pq.write_table(changed, tmp_path / name)
        return tmp_path / name

    whole, small, fractions = write("a", pa.int64()), write("b", pa.int8()), write("c", pa.float64())

    for other in (small, fractions):
        dataset = prepare([whole, other], tmp_path)
        ids = np.concatenate([rows.ids for rows in dataset.parts(0, 2 * NUM_ROWS)])
        np.testing.assert_array_equal(ids[:NUM_ROWS], ids[NUM_ROWS:])


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (pa.array([{"a": 1}]), "column tags holds a struct<a: int64> in each row"),
        (pa.array([[[1]]]), r"column tags holds a list<.*list<.*> in each row, and only multi_hot_columns"),
    ],
)
def test_lists_of_anything_but_texts_and_numbers_are_refused(tmp_path, lists, message):
    row = {
        "click": [1],
        "buy": [0],
        "weight": [1.0],
        "age": [0.0],
        "site": ["x"],
        "few_tags": [["x"]],
        "history": [[]],
    }
    pq.write_table(pa.table({**row, "tags": lists}), tmp_path / "rows.parquet")

    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "rows.parquet", tmp_path)
