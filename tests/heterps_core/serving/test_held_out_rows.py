"""Held-out rows are predicted alike, whether they lie prepared as the model's own or are read from their files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.parquet_rows import TableView, ViewedPath
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError, OtherColumnsError
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.serving.held_out_predictions import (
    held_out_rows,
    held_out_scores,
    predicted_parts,
)
from tests.heterps_core.serving.builders import fit_logistic, raw_columns, write_logistic

NUM_ROWS = 1_000
NUM_EVAL_ROWS = 200


@pytest.fixture
def stream(tmp_path):
    return write_click_stream(tmp_path / "clicks.tsv", num_rows=NUM_ROWS, seed=1)


@pytest.fixture
def dataset(tmp_path, stream):
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=tmp_path / "prepared"
    )


@pytest.fixture
def predictor(tmp_path, dataset):
    return ClickPredictor(write_logistic(tmp_path / "model", dataset, fit_logistic(dataset)))


def predicted(predictor, dataset):
    """Labels and logits of the held-out rows."""
    parts = list(predicted_parts(predictor, dataset, *held_out_rows(dataset)))
    return np.concatenate([rows.labels for rows, _ in parts]), np.concatenate([logits for _, logits in parts])


def log_odds(probabilities):
    return np.log(probabilities / (1 - probabilities))


def test_prepared_rows_give_the_log_odds_of_their_raw_columns(stream, dataset, predictor):
    labels, found = predicted(predictor, dataset)

    raw = predictor.predict(raw_columns(stream.path, slice(-NUM_EVAL_ROWS, None)))
    np.testing.assert_allclose(found, log_odds(raw), atol=1e-5)
    np.testing.assert_array_equal(
        labels,
        [int(v) for v in raw_columns(stream.path, slice(-NUM_EVAL_ROWS, None))["label"]],
    )


def test_rows_of_other_table_sizes_and_another_transform_are_read_as_the_model_reads_them(
    tmp_path, stream, dataset, predictor
):
    other = prepare_dataset(
        stream.path,
        schema=CRITEO_SCHEMA,
        buckets_per_slot=91,
        eval_fraction=0.5,
        out_dir=tmp_path / "other",
    )
    assert other.manifest.numeric_transform != dataset.manifest.numeric_transform

    _, found = predicted(predictor, other)

    raw = predictor.predict(raw_columns(stream.path, slice(NUM_ROWS // 2, None)))
    np.testing.assert_allclose(found, log_odds(raw), atol=1e-5)


def test_all_rows_count_where_none_are_held_out(tmp_path, stream, predictor):
    whole = prepare_dataset(
        stream.path,
        schema=CRITEO_SCHEMA,
        buckets_per_slot=50,
        eval_fraction=0.0,
        numeric_transform=predictor.numeric_transform,
        out_dir=tmp_path / "whole",
    )

    assert [len(array) for array in predicted(predictor, whole)] == [NUM_ROWS, NUM_ROWS]


def test_other_columns_cannot_be_predicted(stream, dataset, predictor):
    schema = replace(CRITEO_SCHEMA, categorical_columns=CRITEO_SCHEMA.categorical_columns[::-1])
    features = replace(dataset.features, slot_names=schema.categorical_columns)
    other = PreparedDataset(dataset.directory, replace(dataset.manifest, schema=schema, features=features))

    with pytest.raises(
        ConfigurationError, match="rows must have the categorical_columns of the model, C1, C2"
    ):
        predicted(predictor, other)


def test_rows_of_a_table_are_not_judged_by_a_model_of_another_schema_that_knows_no_deleted_rows(tmp_path):
    columns = {"click": np.arange(300) % 2, "old": ["a", "b", "c"] * 100, "new": ["x"] * 300}
    file = ViewedPath(tmp_path / "rows.parquet")
    pq.write_table(pa.table(columns), file)
    file.view = TableView(keys={name: (name,) for name in columns}, find_deleted=lambda: np.arange(250, 290))
    of_then = DataSchema(name="clicks", label_column="click", categorical_columns=("old",))
    of_today = replace(of_then, categorical_columns=("old", "new"))
    before, today = (
        prepare_dataset([file], schema=schema, buckets_per_slot=9, out_dir=tmp_path / place)
        for place, schema in (("before", of_then), ("today", of_today))
    )
    predictor = ClickPredictor(write_logistic(tmp_path / "champion", before, fit_logistic(before)))

    held_out_scores(predictor, before)
    with pytest.raises(OtherColumnsError, match="is a file of a table"):
        held_out_scores(predictor, today)
