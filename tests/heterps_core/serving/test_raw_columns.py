"""Columns as callers have them become the same input as the file that holds the same values."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.row_arrays import rows_as_arrays
from heterps_core.data.schema import DataSchema, MultiHotColumn
from heterps_core.errors import DataError
from heterps_core.serving.raw_columns import model_input

SCHEMA = DataSchema(
    name="small",
    label_column="click",
    numeric_columns=("age",),
    categorical_columns=("site",),
    missing_markers=("?", "-1"),
)
FEATURES = FeatureSpec(num_dense=1, slot_rows=(1_000,))
PLAIN = NumericTransform(is_count=(False,), means=(0.0,), standard_deviations=(1.0,))


def dense(values, schema=SCHEMA):
    # A column of sites of the same length, as both are needed.
    columns = {"age": values, "site": ["a"] * len(values)}
    return model_input(columns, schema, PLAIN, FEATURES)[0][:, 0].tolist()


def ids(values, schema=SCHEMA):
    columns = {"age": [0.0] * len(values), "site": values}
    return model_input(columns, schema, PLAIN, FEATURES)[1][:, 0].tolist()


def read_as_a_file(tmp_path, texts, schema=SCHEMA):
    """The embedding rows that training gives to the texts of a CSV file."""
    path = tmp_path / "rows.csv"
    path.write_text("click,age,site\n" + "".join(f"0,1,{text}\n" for text in texts))
    (batch,) = read_rows([path], schema)
    return rows_as_arrays(batch, FEATURES, PLAIN).ids[:, 0].tolist()


@pytest.mark.parametrize(
    "values",
    [
        [5, 7],
        [5.0, 7.0],
        ["5", "7"],
        [" 5 ", "7.0"],
        [5, "7"],
        [Decimal(5), Decimal(7)],
        np.array([5, 7], dtype=np.uint8),
        pd.Series([5, 7], index=[40, 3]),
        pd.Series(["5", "7"], dtype="category"),
        pd.Series([5, 7], dtype="Int64"),
        pa.chunked_array([["5"], ["7"]]),
        pa.array(["5", "7"], pa.large_string()),
    ],
    ids=str,
)
def test_numbers_are_read_from_any_type(values):
    assert dense(values) == [5.0, 7.0]


def test_a_row_of_lists_is_the_row_of_the_same_large_columns():
    schema = replace(SCHEMA, numeric_columns=("age", "price"), categorical_columns=("site", "shop", "day"))
    features = FeatureSpec(num_dense=2, slot_rows=(1_000,) * 3)
    plain = NumericTransform(is_count=(False,) * 2, means=(0.0,) * 2, standard_deviations=(1.0,) * 2)
    columns = {
        "age": [-1, None, 2.5, 2**70],
        "price": [3, 4, float("nan"), -1.0],
        "site": [" a", "-1.0", None, "7.00"],
        "shop": ["?", "a", "", "NaN"],
        "day": [1, "1", None, 1.0],
    }
    many = {name: values * 50 for name, values in columns.items()}
    dense_ND, ids_NK = model_input(many, schema, plain, features)
    for row in range(4):
        one = {name: values[row : row + 1] for name, values in columns.items()}
        dense_1D, ids_1K = model_input(one, schema, plain, features)
        assert dense_1D.tolist() == dense_ND[row : row + 1].tolist()
        assert ids_1K.tolist() == ids_NK[row : row + 1].tolist()


@pytest.mark.parametrize("missing", [None, float("nan"), "", "?", "-1", -1, " ", "nan", pd.NA], ids=repr)
def test_a_missing_number_is_the_mean(missing):
    assert dense([missing, 7.0]) == [0.0, 7.0]


def test_a_column_of_missing_numbers_is_read():
    assert dense([None, None]) == [0.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        ["5", "7"],
        [5, 7],
        [5.0, 7.0],
        [5, "7"],
        np.array([5.0, 7.0], dtype=np.float32),
        pd.Series([5, 7], dtype="Int64"),
        pd.Series(["5", "7"], dtype="category"),
        pa.chunked_array([["5"], ["7"]]),
    ],
    ids=str,
)
def test_ids_are_those_of_the_same_texts_in_a_file(tmp_path, values):
    assert ids(values) == read_as_a_file(tmp_path, ["5", "7"])


def test_true_and_false_are_1_and_0_as_in_files(tmp_path):
    assert ids([True, False]) == read_as_a_file(tmp_path, ["1", "0"])


@pytest.mark.parametrize("missing", [None, float("nan"), "", "?", "-1", -1, pd.NA], ids=repr)
def test_a_missing_id_has_the_row_of_missing_values(tmp_path, missing):
    assert ids([missing, "b"]) == [0, *read_as_a_file(tmp_path, ["b"])]


def test_blanks_are_dropped_where_the_files_of_the_schema_have_them(tmp_path):
    padded = replace(SCHEMA, separator=", ")

    assert ids([" Private", "Private"], padded) == [*read_as_a_file(tmp_path, ["Private"], padded)] * 2
    assert ids([" Private"]) != ids(["Private"])


def test_no_rows_give_no_input():
    assert dense([]) == []
    assert ids([]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1", "many"], "column age must hold numbers, got 'many'"),
        ([1, "many"], "column age must hold numbers, got 'many'"),
        ([float("inf")], "column age must hold finite numbers, got inf"),
        ([1e300], r"column age must hold numbers that stay in 32-bit range once .* got 1e\+300"),
        (
            pd.Series(["2026-11-21"]).astype("datetime64[ns]"),
            "column age must hold numbers, got values of type",
        ),
        ([object()], "column age must hold texts or numbers, got values of type object"),
    ],
)
def test_what_is_no_number_is_named(values, message):
    with pytest.raises(DataError, match=message):
        dense(values)


def test_what_is_no_text_is_named():
    with pytest.raises(DataError, match="column site must hold texts or numbers, got values of type list"):
        ids([["a", "b"]])


def test_columns_that_are_missing_or_of_other_lengths_are_reported():
    with pytest.raises(DataError, match="must have the columns age"):
        model_input({"site": ["a"]}, SCHEMA, PLAIN, FEATURES)
    with pytest.raises(DataError, match="must have columns of one length, got 1, 2"):
        model_input({"site": ["a"], "age": [1, 2]}, SCHEMA, PLAIN, FEATURES)


def test_periods_of_pandas_are_their_texts():
    periods = pd.Series(pd.period_range("2026-10", periods=3, freq="M"))

    assert ids(periods) == ids(["2026-10", "2026-11", "2026-12"])
    assert ids(pd.Series([pd.NaT, periods[0]], dtype="period[M]")) == ids([None, "2026-10"])


def test_chunks_with_dictionaries_of_their_own_are_one_column():
    chunks = [pa.array(values).dictionary_encode() for values in (["a", "b"], ["b", None, "c"])]

    assert ids(pa.chunked_array(chunks)) == ids(["a", "b", "b", None, "c"])


def test_a_list_that_is_written_as_a_text_is_refused():
    schema = replace(SCHEMA, categorical_columns=(), multi_hot_columns=(MultiHotColumn(name="site"),))
    features = schema.features([1_000])

    with pytest.raises(
        DataError, match=r"""site must hold lists, or texts with '|' .* got the text "\['a', 'b'\]".*"""
    ):
        model_input({"age": [1.0], "site": ["['a', 'b']"]}, schema, PLAIN, features)
