"""A column in both lists is a number and, by it, a category: alike from every form of file and from callers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.row_arrays import rows_as_arrays
from heterps_core.data.schema import DataSchema
from heterps_core.serving.raw_columns import model_input

AGES = [39, 5, None, 39, -7, 1_000_000]
BOTH = DataSchema(
    name="people",
    label_column="click",
    numeric_columns=("age",),
    categorical_columns=("town", "age"),
    column_names=("click", "town", "age"),
    missing_markers=("?",),
)
AS_TEXT = replace(BOTH, numeric_columns=(), categorical_columns=("town", "age"))
FEATURES = FeatureSpec(num_dense=1, slot_rows=(1_000, 1_000))
PLAIN = NumericTransform(is_count=(False,), means=(0.0,), standard_deviations=(1.0,))


def parquet_of(ages):
    def write(path):
        table = pa.table({"click": [0] * len(AGES), "town": ["a"] * len(AGES), "age": ages})
        pq.write_table(table, path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")

    return write


def text_of(separator, missing="", end=""):
    def write(path):
        ages = [missing if age is None else f"{age}{end}" for age in AGES]
        path.write_text("".join(separator.join(("0", "a", age)) + "\n" for age in ages))
        return path

    return write


FILES = {
    "comma": text_of(","),
    "fractions": text_of(",", end=".0"),
    "a marker": text_of(",", missing="?"),
    "padded": text_of(", ", missing="?"),
    "whole": parquet_of(pa.array(AGES, pa.int64())),
    "floating": parquet_of(pa.array(AGES, pa.float32())),
    "texts": parquet_of(pa.array([None if age is None else str(age) for age in AGES])),
}


def input_of(path, schema):
    (batch,) = read_rows([path], schema)
    rows = rows_as_arrays(batch, FEATURES, PLAIN)
    return rows.dense.tolist(), rows.ids.tolist()


@pytest.mark.parametrize("form", FILES)
def test_a_number_has_the_row_of_its_text_in_every_form_of_file(tmp_path, form):
    schema = replace(BOTH, separator=", ") if form == "padded" else BOTH
    plain = FILES["comma"](tmp_path / "texts.csv")
    (as_text,) = read_rows([plain], AS_TEXT)
    without = FeatureSpec(num_dense=0, slot_rows=FEATURES.slot_rows)
    expected = rows_as_arrays(
        as_text, without, NumericTransform(is_count=(), means=(), standard_deviations=())
    )

    dense, ids = input_of(FILES[form](tmp_path / "rows.csv"), schema)

    assert dense == [[39.0], [5.0], [0.0], [39.0], [-7.0], [1_000_000.0]]
    assert ids == expected.ids.tolist()


@pytest.mark.parametrize(
    "ages",
    [AGES, [None if age is None else str(age) for age in AGES], np.array(AGES, dtype=float), pa.array(AGES)],
    ids=["numbers", "texts", "numpy", "arrow"],
)
def test_callers_get_what_training_saw(tmp_path, ages):
    expected = input_of(FILES["whole"](tmp_path / "rows"), BOTH)

    dense, ids = model_input({"town": ["a"] * len(AGES), "age": ages}, BOTH, PLAIN, FEATURES)

    assert (dense.tolist(), ids.tolist()) == expected


def test_fractions_have_one_row_in_short_and_long_floats_texts_and_from_callers(tmp_path):
    prices = [0.1, 2.3, 1 / 3]
    rows = {"click": [0] * 3, "town": ["a"] * 3}
    pq.write_table(pa.table(rows | {"age": pa.array(prices, pa.float32())}), tmp_path / "short.parquet")
    pq.write_table(pa.table(rows | {"age": pa.array(prices, pa.float64())}), tmp_path / "long.parquet")
    (tmp_path / "texts.csv").write_text("".join(f"0,a,{price!r}\n" for price in prices))

    found = [input_of(tmp_path / name, BOTH)[1] for name in ("short.parquet", "long.parquet", "texts.csv")]
    asked = model_input({"town": rows["town"], "age": prices}, BOTH, PLAIN, FEATURES)[1]

    assert found == [asked.tolist()] * 3


def test_text_is_prepared_once_and_read_again_as_it_was(tmp_path):
    rows = "".join(f"{row % 2},t{row % 3},{row % 7}\n" for row in range(200))
    (tmp_path / "rows.csv").write_text(rows)

    dataset = prepare_dataset(
        tmp_path / "rows.csv", schema=BOTH, buckets_per_slot=100, out_dir=tmp_path / "p"
    )
    ids = dataset.batch(np.arange(200)).ids.numpy()[:, 1].reshape(-1)

    assert len(set(ids.tolist())) == 7
    assert (ids[:14] == ids[7:21]).all()


def test_a_schema_with_a_number_that_is_a_category_stays_itself_as_json():
    assert DataSchema.from_json(json.loads(json.dumps(BOTH.to_json()))) == BOTH
    assert BOTH.used_columns == ("click", "age", "town")
