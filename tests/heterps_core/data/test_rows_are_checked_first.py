"""Rows that break the schema are found while data is prepared, wherever they lie, by the name of their own file."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data import training_rows
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.group_statistics import unproven_groups
from heterps_core.data.row_groups import RowGroups
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError

NUM_ROWS, GROUP_ROWS = 1_000, 20
SCHEMA = DataSchema(
    name="clicks",
    label_column="click",
    weight_column="weight",
    numeric_columns=("price", "visits"),
    categorical_columns=("site",),
)


def good_columns():
    return {
        "click": [row % 2 for row in range(NUM_ROWS)],
        "weight": [1] * NUM_ROWS,
        "price": [row / 7 for row in range(NUM_ROWS)],
        "visits": list(range(NUM_ROWS)),
        "site": [f"s{row % 5}" for row in range(NUM_ROWS)],
    }


def write(path, *, with_statistics=True, bad=None):
    columns = good_columns()
    for name, row, value in [bad] if bad else []:
        columns[name] = [value if number == row else each for number, each in enumerate(columns[name])]
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS, write_statistics=with_statistics)
    return path


@pytest.fixture
def short_sample(monkeypatch):
    monkeypatch.setattr(training_rows, "SAMPLED_ROWS", 40)
    monkeypatch.setattr(training_rows, "SAMPLED_RUNS", 2)


BAD = {
    "price": (math.inf, "column price must be a finite number or empty, got 'inf'"),
    "click": (None, r"the label \(column click\) must be 1"),
    "weight": (-1, "column weight must be the row's weight"),
}


@pytest.mark.parametrize("column", BAD)
@pytest.mark.parametrize("row", [0, 333, 801, 999])
@pytest.mark.parametrize("with_statistics", [True, False])
@pytest.mark.parametrize("is_own_file", [True, False])
def test_a_bad_value_is_found_before_training_among_rows_to_train_on_and_held_out(
    tmp_path, short_sample, column, row, with_statistics, is_own_file
):
    value, said = BAD[column]
    bad = write(tmp_path / "in" / "b.parquet", with_statistics=with_statistics, bad=(column, row, value))
    good = write(tmp_path / "good" / "a.parquet")

    with pytest.raises(DataError, match=rf"^{bad}: row {row + 1}: {said}"):
        prepare_dataset(
            good if is_own_file else bad,
            schema=SCHEMA,
            eval_source=bad if is_own_file else None,
            out_dir=tmp_path / "out",
        )


def test_of_good_rows_statistics_suffice_and_only_the_sample_is_read(tmp_path, short_sample, monkeypatch):
    read = []
    monkeypatch.setattr(
        RowGroups,
        "read",
        lambda groups, group, read_it=RowGroups.read: read.append(group) or read_it(groups, group),
    )

    prepare_dataset(write(tmp_path / "rows.parquet"), schema=SCHEMA, out_dir=tmp_path / "out")

    assert read == [0, 20]


def groups_to_read(tmp_path, **columns):
    table = pa.table(good_columns() | columns)
    pq.write_table(table, tmp_path / "rows.parquet")
    return unproven_groups(pq.read_metadata(tmp_path / "rows.parquet"), SCHEMA)


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"click": [row % 2 == 0 for row in range(NUM_ROWS)]},
        {"click": pa.array([1] * NUM_ROWS, pa.int8())},
        {"price": pa.nulls(NUM_ROWS), "site": pa.nulls(NUM_ROWS)},
        {"price": pa.nulls(NUM_ROWS, pa.float32())},
        {"price": [math.nan, *[1.5] * (NUM_ROWS - 1)]},
        {"site": pa.array(["a", None] * (NUM_ROWS // 2)).dictionary_encode()},
        {"site": pa.array(range(NUM_ROWS), pa.uint64())},
        {"site": np.arange(NUM_ROWS) / 2},
    ],
)
def test_values_that_statistics_show_need_not_be_read(tmp_path, columns):
    assert groups_to_read(tmp_path, **columns) == {}


@pytest.mark.parametrize(
    ("columns", "suffice_targets"),
    [
        ({"click": [float(row % 2) for row in range(NUM_ROWS)]}, True),
        ({"click": [row % 3 for row in range(NUM_ROWS)]}, True),
        ({"click": [None, *[1] * (NUM_ROWS - 1)]}, True),
        ({"click": ["0", "1"] * (NUM_ROWS // 2)}, True),
        ({"weight": [1.0] * NUM_ROWS}, True),
        ({"price": [-math.inf, *[1.0] * (NUM_ROWS - 1)]}, False),
        ({"price": [1e39, *[1.0] * (NUM_ROWS - 1)]}, False),
        ({"price": ["1.5"] * NUM_ROWS}, False),
        ({"site": [b"a"] * NUM_ROWS}, False),
        ({"site": [1e17] * NUM_ROWS, "weight": [1.0] * NUM_ROWS}, False),
    ],
)
def test_values_that_statistics_do_not_show_are_read(tmp_path, columns, suffice_targets):
    assert groups_to_read(tmp_path, **columns) == {0: suffice_targets}
