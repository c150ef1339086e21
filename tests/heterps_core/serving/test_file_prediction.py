"""Files are predicted as their rows are in memory."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading import readers
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.serving.file_prediction import predict_files
from tests.heterps_core.serving.builders import raw_columns, write_logistic

NUM_ROWS = 300


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> tuple[ClickPredictor, Path, np.ndarray]:
    """A predictor, a file in the Criteo format, and the probabilities of its rows."""
    folder = tmp_path_factory.mktemp("clicks")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=1)
    dataset = prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=31, out_dir=folder / "prepared"
    )
    num_weights = dataset.features.num_dense + dataset.features.total_rows + 1
    weights = np.random.default_rng(2).normal(0, 0.1, num_weights)
    predictor = ClickPredictor(write_logistic(folder / "model", dataset, weights))
    return predictor, stream.path, predictor.predict(raw_columns(stream.path, slice(None)))


def as_table(path: Path) -> pa.Table:
    return pa.table(raw_columns(path, slice(None)))


def test_a_text_file_is_predicted_row_by_row_in_its_order(clicks, tmp_path):
    predictor, path, probabilities = clicks

    assert predict_files(predictor, [path, path], tmp_path / "out.parquet") == 2 * NUM_ROWS

    written = pq.read_table(tmp_path / "out.parquet")
    assert written.column_names == ["probability"]
    np.testing.assert_allclose(written["probability"], np.tile(probabilities, 2), atol=1e-7)
    assert [each.name for each in tmp_path.iterdir()] == ["out.parquet"]


def test_a_file_without_header_may_lack_the_label(clicks, tmp_path):
    predictor, path, probabilities = clicks
    unlabelled = tmp_path / "test.txt"
    unlabelled.write_text(
        "".join(line.partition("\t")[2] for line in path.read_text().splitlines(keepends=True))
    )

    predict_files(predictor, [unlabelled], tmp_path / "out.csv")

    with (tmp_path / "out.csv").open() as file:
        written = [float(row["probability"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(written, probabilities, atol=1e-7)


def test_parquet_is_predicted_in_batches_beside_the_columns_that_are_kept(clicks, tmp_path, monkeypatch):
    predictor, path, probabilities = clicks
    monkeypatch.setattr(readers, "ROWS_PER_BATCH", 70)
    table = as_table(path).drop_columns(["label"]).append_column("id", pa.array(range(NUM_ROWS)))
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=110)

    predict_files(predictor, [tmp_path / "in.parquet"], tmp_path / "out.parquet", kept=["id", "C1"])

    written = pq.read_table(tmp_path / "out.parquet")
    assert written.column_names == ["id", "C1", "probability"]
    assert written["id"].to_pylist() == list(range(NUM_ROWS))
    assert written["C1"].to_pylist() == table["C1"].to_pylist()
    np.testing.assert_allclose(written["probability"], probabilities, atol=1e-7)


def test_a_missing_column_is_named_and_nothing_is_written(clicks, tmp_path):
    predictor, path, _ = clicks
    pq.write_table(as_table(path).drop_columns(["C7"]), tmp_path / "in.parquet")

    with pytest.raises(DataError, match=r"in\.parquet: must have the columns C7"):
        predict_files(predictor, [tmp_path / "in.parquet"], tmp_path / "out.parquet")

    assert [each.name for each in tmp_path.iterdir()] == ["in.parquet"]


def test_a_row_that_cannot_be_predicted_is_named_and_leaves_no_half_output(clicks, tmp_path, monkeypatch):
    predictor, path, _ = clicks
    monkeypatch.setattr(readers, "ROWS_PER_BATCH", 50)
    table = as_table(path)
    pq.write_table(table, tmp_path / "1.parquet")
    some = pa.array(["many" if row in (130, 140) else str(row) for row in range(NUM_ROWS)])
    pq.write_table(table.set_column(table.column_names.index("I3"), "I3", some), tmp_path / "2.parquet")

    with pytest.raises(DataError, match=r"2\.parquet: row 131: column I3 must hold numbers, got 'many'"):
        predict_files(predictor, [tmp_path / "1.parquet", tmp_path / "2.parquet"], tmp_path / "out.parquet")

    assert not list(tmp_path.glob("out*"))


def test_a_line_with_too_few_fields_is_an_error_of_the_file(clicks, tmp_path):
    predictor, path, _ = clicks
    (tmp_path / "bad.tsv").write_text(path.read_text() + "1\t2\n")

    with pytest.raises(
        DataError, match=r"bad\.tsv: cannot be read as rows of text.*Expected 40 columns, got 2"
    ):
        predict_files(predictor, [tmp_path / "bad.tsv"], tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("output", "kept", "message"),
    [
        ("out.json", [], r"must end in \.parquet or \.csv, got .*out\.json"),
        ("out.csv", ["probability"], "must differ from those that are added, got probability"),
    ],
)
def test_an_output_that_cannot_be_is_refused(clicks, tmp_path, output, kept, message):
    predictor, path, _ = clicks

    with pytest.raises(ConfigurationError, match=message):
        predict_files(predictor, [path], tmp_path / output, kept=kept)


@pytest.mark.parametrize(
    ("of_files", "expected"),
    [
        ([pa.array(range(NUM_ROWS)), pa.array(map(str, range(NUM_ROWS)))], [*map(str, range(NUM_ROWS))] * 2),
        ([pa.nulls(NUM_ROWS), pa.array(range(NUM_ROWS))], [None] * NUM_ROWS + [*range(NUM_ROWS)]),
    ],
)
def test_kept_columns_have_one_type_that_holds_the_values_of_all_files(clicks, tmp_path, of_files, expected):
    predictor, path, _ = clicks
    files = [tmp_path / f"{part}.parquet" for part in range(2)]
    for file, ids in zip(files, of_files, strict=True):
        pq.write_table(as_table(path).append_column("id", ids), file)

    predict_files(predictor, files, tmp_path / "out.parquet", kept=["id"])

    assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == expected


def test_a_csv_file_with_a_header_may_have_its_columns_in_any_order(clicks, tmp_path):
    predictor, path, probabilities = clicks
    table = as_table(path)
    pa_csv.write_csv(table.select(table.column_names[:0:-1]), tmp_path / "in.csv")

    predict_files(predictor, [tmp_path / "in.csv"], tmp_path / "out.parquet")

    np.testing.assert_allclose(
        pq.read_table(tmp_path / "out.parquet")["probability"], probabilities, atol=1e-7
    )


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/out.csv", "must be a file that can be written, but: .*No such file or directory"),
        ("folder.csv", "must be a file that can be written, but: Is a directory"),
        ("rows.parquet", "must be another file than the rows"),
    ],
)
def test_an_output_that_cannot_be_written_is_named(clicks, tmp_path, output, message):
    predictor, path, _ = clicks
    (tmp_path / "folder.csv").mkdir()
    rows = tmp_path / "rows.parquet"
    pq.write_table(as_table(path), rows)

    with pytest.raises(ConfigurationError, match=message) as error:
        predict_files(predictor, [rows], tmp_path / output)

    assert "\n" not in str(error.value)
    assert pq.read_table(rows).num_rows == NUM_ROWS


def test_kept_columns_that_a_text_file_cannot_hold_are_refused(clicks, tmp_path):
    predictor, path, _ = clicks
    table = as_table(path)
    table = table.append_column("tags", pa.array([[1]] * len(table)))
    pq.write_table(table, tmp_path / "rows.parquet")

    with pytest.raises(ConfigurationError, match=r"types that a .csv file can hold, but: .*write .parquet"):
        predict_files(predictor, [tmp_path / "rows.parquet"], tmp_path / "out.csv", kept=["tags"])
    assert predict_files(predictor, [tmp_path / "rows.parquet"], tmp_path / "out.parquet", kept=["tags"])


@pytest.mark.parametrize(
    "values",
    [
        pa.array([["a"], ["b"]]),
        pa.array([{"a": 1}, None]),
        pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())),
        pa.array([b"\xff", b"a"]),
        pa.array([2.0**60, 1.0]),
    ],
    ids=lambda values: str(values.type),
)
def test_a_column_of_another_kind_is_named_in_one_line(clicks, tmp_path, values):
    predictor, path, _ = clicks
    table = as_table(path).slice(0, 2)
    for name in ("I1", "C1"):
        other = table.set_column(table.column_names.index(name), name, values)
        pq.write_table(other, tmp_path / "rows.parquet")
        if name == "I1" and pa.types.is_floating(values.type):
            continue
        with pytest.raises(DataError, match=rf"rows.parquet: row 1: column {name} must hold") as error:
            predict_files(predictor, [tmp_path / "rows.parquet"], tmp_path / "out.parquet")
        assert "\n" not in str(error.value)
