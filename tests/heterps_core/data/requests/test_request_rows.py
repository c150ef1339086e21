"""Rows of a request stay together: in the order of an epoch, where rows are held out and where some are left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.errors import ConfigurationError, DataError
from tests.heterps_core.data.requests.request_table import SCHEMA, request_columns, write_requests
from tests.heterps_core.data.synthetic_rows import all_rows

COLUMNS = request_columns(600)
REQUESTS = np.array([int(each[1:]) for each in COLUMNS["request"]])
CLICKS = np.array(COLUMNS["click"])


def prepared(folder, columns=COLUMNS, *, schema=SCHEMA, **changes) -> PreparedDataset:
    source = write_requests(folder / "rows.parquet", columns)
    return prepare_dataset(source, schema=schema, buckets_per_slot=50, out_dir=folder / "out", **changes)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepared(tmp_path_factory.mktemp("requests"))


def test_no_request_is_on_both_sides_of_the_held_out_rows(dataset):
    cut = dataset.num_train_rows

    assert REQUESTS[cut - 1] < REQUESTS[cut]
    assert 0.78 * len(REQUESTS) < cut < 0.82 * len(REQUESTS)
    for wanted in (1, 2, 77, 500):
        view = dataset.until(wanted)
        assert REQUESTS[view.num_train_rows - 1] < REQUESTS[view.num_train_rows]
        assert abs(view.num_train_rows - wanted) < 7


@pytest.mark.parametrize("batch_size", [50, 128])
def test_an_epoch_has_each_row_once_and_the_rows_of_a_request_side_by_side(dataset, batch_size):
    order = [
        dataset.batch_rows(2, index, batch_size=batch_size, seed=5)
        for index in range(dataset.num_batches(batch_size))
    ]

    rows = np.concatenate(order)
    assert len(np.unique(rows)) == len(rows) == len(rows) // batch_size * batch_size
    assert rows.max() < dataset.num_train_rows
    num_parts = [Counter(REQUESTS[batch][np.diff(REQUESTS[batch], prepend=-1) != 0]) for batch in order]
    num_times = sum(num_parts, Counter())
    # A request is cut where a batch, a lane or a row group ends.
    num_ends = dataset.num_train_rows / 170 + len(rows) / (7 * 4)
    assert sum(num_times.values()) - len(num_times) < num_ends
    assert np.abs(np.diff([batch.mean() for batch in order])).max() > 10  # shuffled


def test_requests_are_drawn_whole_and_stand_for_those_that_are_left_out(tmp_path):
    dataset = prepared(tmp_path, schema=replace(SCHEMA, negative_share=0.25))
    whole = prepared(tmp_path, schema=SCHEMA)
    cut = whole.num_train_rows

    rows = dataset.batch(np.arange(dataset.manifest.num_rows))

    has_click = {request for request, click in zip(REQUESTS[:cut], CLICKS[:cut], strict=True) if click}
    sizes = Counter(REQUESTS[:cut].tolist())
    weights = rows.weights[: dataset.num_train_rows].tolist()
    num_drawn = weights.count(4.0)
    num_others = sum(size for request, size in sizes.items() if request not in has_click)
    assert weights.count(1.0) == sum(sizes[request] for request in has_click)
    assert abs(num_drawn - 0.25 * num_others) < 4 * 7 * (0.25 * 0.75 * num_others / 4) ** 0.5
    assert rows.weights[dataset.num_train_rows :].eq(1.0).all()
    assert dataset.num_eval_rows == len(REQUESTS) - cut
    assert rows.labels.sum() == CLICKS.sum()
    assert dataset.manifest.schema.logit_shift == 0.0
    # Of the users, whose ids stand in the rows that stay, each has as many rows as requests of theirs have.
    kept = dataset.targets(0, dataset.manifest.num_rows)
    assert kept[1].tolist() == rows.weights.tolist()


def test_lists_of_a_request_are_hashed_once_to_the_ids_of_each_of_its_rows(dataset):
    rows = np.arange(dataset.manifest.num_rows)

    assert np.array_equal(dataset.batch(rows).ids, all_rows(dataset).ids)
    read = dataset._with_lists_of_requests(0).texts[2]
    assert len(read) == 170
    assert len(read.dictionary) == len(np.unique(REQUESTS[:170]))


def test_lists_by_indices_of_8_bits_are_those_of_plain_texts(tmp_path):
    """As many texts as 8 bits count leave no number for a missing one."""
    numbers = np.arange(128).repeat(2)
    columns = request_columns(len(numbers), most_candidates=1)
    columns |= {
        "request": numbers,
        "user": numbers,
        "age": numbers,
        "items": [[f"{each}"] for each in numbers],
    }
    path = write_requests(tmp_path / "rows.parquet", columns)
    texts = pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int8()), [str(each) for each in range(128)])
    lists = pa.ListArray.from_arrays(np.arange(len(numbers) + 1, dtype=np.int32), texts)
    pq.write_table(pq.read_table(path).set_column(4, "items", lists), tmp_path / "indices.parquet")

    found, plain = (
        prepare_dataset(source, schema=SCHEMA, buckets_per_slot=50, out_dir=tmp_path / f"out {source.stem}")
        for source in (tmp_path / "indices.parquet", path)
    )

    every = np.arange(len(numbers))
    assert (found.batch(every).ids == plain.batch(every).ids).all()


def test_text_files_have_the_requests_of_parquet_files(dataset, tmp_path):
    table = {**COLUMNS, "items": ["|".join(items) for items in COLUMNS["items"]]}
    pa_csv.write_csv(pa.table(table), tmp_path / "rows.csv")

    of_text = prepare_dataset(
        tmp_path / "rows.csv", schema=SCHEMA, buckets_per_slot=50, out_dir=tmp_path / "out"
    )

    assert of_text.num_train_rows == dataset.num_train_rows
    rows = np.arange(dataset.manifest.num_rows)
    assert of_text.batch(rows).ids.equal(dataset.batch(rows).ids)


def test_a_request_that_begins_again_is_refused(tmp_path):
    columns = {name: [*values, values[4]] for name, values in COLUMNS.items()}
    request = COLUMNS["request"][4]
    first = COLUMNS["request"].index(request) + 1

    with pytest.raises(
        DataError, match=rf"request '{request}' begins in row {first} .* again in row {len(REQUESTS) + 1:,}"
    ):
        prepared(tmp_path, columns)


def test_a_request_that_spreads_over_files_is_refused(tmp_path):
    cut = next(row for row in range(50, 99) if REQUESTS[row] == REQUESTS[row - 1])
    files = [
        write_requests(tmp_path / f"{part}.parquet", {name: values[rows] for name, values in COLUMNS.items()})
        for part, rows in enumerate((slice(0, cut), slice(cut, 99)))
    ]

    with pytest.raises(
        DataError, match=r"1\.parquet: .*one file, .* of .*0\.parquet and again in row 1 here"
    ) as found:
        prepare_dataset(files, schema=SCHEMA, buckets_per_slot=50, out_dir=tmp_path / "out")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("column", "value"), [("age", 99.0), ("user", "another"), ("items", ["other"]), ("items", ["item 1"] * 2)]
)
def test_a_request_column_that_differs_within_a_request_is_refused(tmp_path, column, value):
    row = next(row for row in range(200, 300) if REQUESTS[row] == REQUESTS[row - 1])
    columns = {name: [*values] for name, values in COLUMNS.items()}
    columns[column][row] = value

    with pytest.raises(DataError, match=rf"column {column} must be equal .* row {row + 1} differs"):
        prepared(tmp_path, columns)
    prepared(tmp_path, columns, schema=replace(SCHEMA, request_columns=()))


def test_a_row_without_a_request_is_refused(tmp_path):
    columns = {**COLUMNS, "request": [*COLUMNS["request"][:20], None, *COLUMNS["request"][21:]]}

    with pytest.raises(DataError, match="row 21 must have a value in the request_column request"):
        prepared(tmp_path, columns)


def test_one_request_alone_cannot_be_cut(tmp_path):
    columns = {name: values[:1] * 5 for name, values in COLUMNS.items()}

    with pytest.raises(DataError, match="at least 2 requests are needed"):
        prepared(tmp_path, columns)


@pytest.mark.parametrize("changes", [{"request_columns": ("town",)}, {"request_column": None}])
def test_request_columns_must_be_seen_by_the_model_and_need_requests(changes):
    with pytest.raises(ConfigurationError, match="request_columns must be columns that the model sees"):
        replace(SCHEMA, **changes)
