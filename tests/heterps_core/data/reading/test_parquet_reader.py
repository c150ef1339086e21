from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.readers import check_columns, read_rows
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

CLICKS = DataSchema(
    name="clicks",
    label_column="click",
    numeric_columns=("age", "visits"),
    categorical_columns=("site", "hour"),
    missing_markers=("-",),
)

GOOD = {
    "unused": [0.5, 0.5, 0.5],
    "hour": [7, None, 9],
    "click": [1, 0, 1],
    "age": [30, None, 50],
    "visits": ["1", "-", "2.5"],
    "site": ["a", "-", None],
}


def write_parquet(folder, **changes):
    path = folder / "clicks.parquet"
    pq.write_table(pa.table(GOOD | changes), path)
    return path


def test_reads_columns_by_name_and_casts_their_types(tmp_path):
    (batch,) = read_rows([write_parquet(tmp_path)], CLICKS)

    assert batch.labels.tolist() == [1, 0, 1]
    np.testing.assert_array_equal(batch.numbers, [[30, 1], [np.nan, np.nan], [50, 2.5]])
    assert [texts.to_pylist() for texts in batch.texts] == [["a", None, None], ["7", None, "9"]]


@pytest.mark.parametrize(
    "labels",
    [
        [True, False, True],
        [1.0, 0.0, 1.0],
        ["1", "0", "1"],
        pa.array([1, 0, 1], pa.int8()),
        pa.array([1, 0, 1], pa.decimal128(10, 2)),
        ["True", "0.00", "+1"],
    ],
)
@pytest.mark.parametrize("positive", ["1", "1.0", "true"])
def test_labels_may_be_of_any_plain_type_and_form(tmp_path, labels, positive):
    schema = replace(CLICKS, label_positive=(positive,), label_negative=("0",))
    (batch,) = read_rows([write_parquet(tmp_path, click=labels)], schema)

    assert batch.labels.tolist() == [1, 0, 1]


def test_a_missing_label_is_none_of_its_texts_in_another_form(tmp_path):
    schema = replace(CLICKS, label_positive=("1",), label_negative=("None",))
    (batch,) = read_rows([write_parquet(tmp_path, click=["1", "None", "1"])], schema)
    assert batch.labels.tolist() == [1, 0, 1]

    with pytest.raises(DataError, match=r"row 2: the label .* got ''"):
        list(read_rows([write_parquet(tmp_path, click=["1", "", "1"])], schema))


@pytest.mark.parametrize(
    "texts",
    [
        pa.array(["a", None, "b"], pa.large_string()),
        pa.array(["a", None, "b"]).dictionary_encode(),
    ],
)
def test_texts_may_be_dictionaries_or_large(tmp_path, texts):
    (batch,) = read_rows([write_parquet(tmp_path, site=texts)], CLICKS)

    assert batch.texts[0].to_pylist() == ["a", None, "b"]


@pytest.mark.parametrize("number_type", [pa.float64(), pa.float32(), pa.float16()])
def test_nan_is_a_missing_value_in_numbers_and_in_categories(tmp_path, number_type):
    with_nan = pa.array(np.array([3.0, np.nan, 5.0], dtype=number_type.to_pandas_dtype()), from_pandas=False)
    texts = with_nan if number_type != pa.float16() else with_nan.cast(pa.float32())
    (batch,) = read_rows([write_parquet(tmp_path, age=with_nan, hour=texts)], CLICKS)

    np.testing.assert_array_equal(batch.numbers[:, 0], [3, np.nan, 5])
    assert batch.texts[1].null_count == 1
    assert batch.texts[1][1].as_py() is None


@pytest.mark.parametrize(
    ("ages", "marker"),
    [
        ([3.0, float("inf"), 5.0], "inf"),
        ([3, -1, 5], "-1"),
        ([3.0, -1.0, 5.0], "-1"),
        (["3", "many", "5"], "many"),
    ],
)
def test_a_missing_marker_of_the_schema_is_one_whatever_the_type_of_the_column(tmp_path, ages, marker):
    schema = replace(CLICKS, missing_markers=("-", marker))

    (batch,) = read_rows([write_parquet(tmp_path, age=ages)], schema)

    np.testing.assert_array_equal(batch.numbers[:, 0], [3, np.nan, 5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"site": [["a"], [], ["b", "c"]]},
            r"column site holds a list<.*> in each row, and only multi_hot_columns and sequence_columns may",
        ),
        ({"age": [[1.0], [2.0], []]}, r"column age holds a list<.*> in each row"),
        ({"hour": [{"of": 1}, {"of": 2}, None]}, r"column hour holds a struct<.*> in each row"),
        (
            {"age": pa.array([1, 2, 3], pa.timestamp("s"))},
            r"column age must hold numbers, got timestamp",
        ),
    ],
)
def test_a_column_of_a_type_that_cannot_be_read_is_named(tmp_path, changes, message):
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows([write_parquet(tmp_path, **changes)], CLICKS))

    assert "file again" not in str(caught.value)


def test_a_list_in_a_column_that_is_not_used_does_not_matter(tmp_path):
    (batch,) = read_rows([write_parquet(tmp_path, unused=[[1], [], [2]])], CLICKS)

    assert batch.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"click": [1, 2, 0]}, "row 2: the label .* got '2'"),
        ({"click": [1, 0, None]}, "row 3: the label .* got ''"),
        ({"age": [1.0, 2.0, float("inf")]}, "row 3: column age must be a finite number or empty, got 'inf'"),
        ({"visits": ["1", "many", "2"]}, "row 2: column visits must be .* got 'many'"),
    ],
)
def test_names_file_row_and_rule_of_a_bad_value(tmp_path, changes, message):
    path = write_parquet(tmp_path, **changes)

    with pytest.raises(DataError, match=message) as caught:
        list(read_rows([path], CLICKS))

    assert str(caught.value).startswith(f"{path}: ")


def test_counts_rows_across_batches(tmp_path):
    num_rows = 40_000
    columns = {name: [values[0]] * num_rows for name, values in GOOD.items()}
    columns["click"][34_567] = 5

    with pytest.raises(DataError, match="row 34568: the label"):
        list(read_rows([write_parquet(tmp_path, **columns)], CLICKS))


def test_columns_are_checked_without_reading_a_row(tmp_path):
    path = write_parquet(tmp_path, click=["what", "is", "this"])

    check_columns(path, CLICKS)

    pq.write_table(pa.table({"click": [1], "age": [30]}), path)
    with pytest.raises(DataError, match="must have the columns visits, site, hour; has click, age"):
        check_columns(path, CLICKS)


def test_names_missing_columns(tmp_path):
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table({"click": [1], "age": [2]}), path)

    with pytest.raises(DataError, match="must have the columns visits, site, hour; has click, age"):
        list(read_rows([path], CLICKS))


def test_a_truncated_file_is_an_error(tmp_path):
    path = write_parquet(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(DataError, match="cannot be read as Parquet"):
        list(read_rows([path], CLICKS))


def test_a_table_without_rows_is_an_error(tmp_path):
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table(GOOD).slice(0, 0), path)

    with pytest.raises(DataError, match="must hold at least one row of clicks data, got none"):
        list(read_rows([path], CLICKS))


WEIGHED = replace(CLICKS, weight_column="share")


def test_weights_are_read_beside_the_labels(tmp_path):
    (batch,) = read_rows([write_parquet(tmp_path, share=[0, 2, 0.5])], WEIGHED)

    assert batch.weights.tolist() == [0.0, 2.0, 0.5]
    assert batch.labels.tolist() == [1, 0, 1]
    (batch,) = read_rows([write_parquet(tmp_path)], CLICKS)
    assert batch.weights is None


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ([1.0, 2.0, -1.0], "-1"),
        ([1.0, 2.0, None], "''"),
        ([1.0, 2.0, float("inf")], "inf"),
        ([1.0, 2.0, float("nan")], "''"),
        ([1.0, 2.0, 1e300], "1e"),
        (["1", "2", "much"], "much"),
    ],
)
def test_a_weight_that_is_none_is_named_with_its_row(tmp_path, weights, shown):
    path = write_parquet(tmp_path, share=weights)

    with pytest.raises(
        DataError, match=rf"row 3: column share must be the row's weight.* at least 0, got '?{shown}"
    ):
        list(read_rows([path], WEIGHED))


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN"])
def test_texts_of_every_encoding_are_read_and_those_with_a_dictionary_come_with_it(tmp_path, encoding):
    path, sites = tmp_path / "clicks.parquet", [f"site {row}" for row in range(30)]
    table = pa.table(
        {"click": [0, 1] * 15, "age": [1] * 30, "visits": [1] * 30, "site": sites, "hour": ["7"] * 30}
    )
    pq.write_table(
        table,
        path,
        data_page_version="2.0",
        use_dictionary=["hour"],
        column_encoding={"site": encoding},
        row_group_size=10,
    )

    batches = list(read_rows([path], CLICKS))
    dataset = prepare_dataset(path, schema=CLICKS, out_dir=tmp_path / "out")

    assert [text for batch in batches for text in batch.texts[0].to_pylist()] == sites
    assert all(pa.types.is_dictionary(batch.texts[1].type) for batch in batches)
    assert dataset.batch(np.arange(30)).labels.tolist() == [0, 1] * 15
