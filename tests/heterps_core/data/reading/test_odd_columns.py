"""A column of any type, in any role that a schema gives it, is read or refused in one line that names it."""

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.reading.readers import check_columns, read_columns, read_rows
from heterps_core.data.reading.time_order import check_time_order
from heterps_core.data.schema import DataSchema, MultiHotColumn, SequenceColumn
from heterps_core.errors import DataError
from tests.heterps_core.data.odd_tables import NUM_ROWS, ODD_COLUMNS, clicks

PLAIN = DataSchema(name="odd", label_column="label", categorical_columns=("site",))
ROLES = {
    "label": replace(PLAIN, label_column="odd"),
    "weight": replace(PLAIN, weight_column="odd"),
    "time": replace(PLAIN, time_column="odd"),
    "numeric": replace(PLAIN, numeric_columns=("odd",), missing_markers=("7",)),
    "categorical": replace(PLAIN, categorical_columns=("odd",), missing_markers=("7",)),
    "multi-hot": replace(PLAIN, multi_hot_columns=(MultiHotColumn(name="odd"),)),
    "sequence": replace(PLAIN, sequence_columns=(SequenceColumn(name="odd"),)),
}


def read(file, schema):
    check_columns(file, schema)
    check_time_order([file], schema)
    return sum(len(batch.labels) for batch in read_rows([file], schema))


def problem_of(file, schema) -> str | None:
    try:
        assert read(file, schema) == NUM_ROWS
    except DataError as error:
        return error.problem
    return None


@pytest.fixture(params=ODD_COLUMNS)
def odd(request, tmp_path):
    pq.write_table(clicks(odd=ODD_COLUMNS[request.param]), tmp_path / "x.parquet", row_group_size=100)
    return tmp_path / "x.parquet"


def test_a_column_of_any_type_is_read_or_refused_in_one_line_that_names_it(odd):
    assert read(odd, PLAIN) == NUM_ROWS
    for role, schema in ROLES.items():
        said = problem_of(odd, schema)
        assert said is None or re.search(r"\bodd\b|lists to be of size=2|Nested data conversions", said), role
        assert said is None or "\n" not in said, role


@pytest.mark.parametrize("role", ROLES)
def test_a_column_that_stands_twice_is_refused_where_a_schema_names_it(tmp_path, role):
    table = clicks(odd=["a", "b"] * (NUM_ROWS // 2))
    pq.write_table(table.append_column("odd", pa.array(range(NUM_ROWS))), tmp_path / "x.parquet")

    assert read(tmp_path / "x.parquet", PLAIN) == NUM_ROWS
    with pytest.raises(DataError, match=r"must name each column once, but has 'odd' twice"):
        read(tmp_path / "x.parquet", ROLES[role])
    with pytest.raises(DataError, match=r"must name each column once, but has 'odd' twice"):
        list(read_columns(tmp_path / "x.parquet", PLAIN, ["odd"]))


@pytest.mark.parametrize(
    "name", ["binary", "string that is no UTF-8", "list of bytes", "dictionary of bytes"]
)
def test_bytes_that_are_no_text_are_refused_with_column_and_way_out(tmp_path, name):
    pq.write_table(clicks(odd=ODD_COLUMNS[name]), tmp_path / "x.parquet")
    role = "multi-hot" if name.startswith("list") else "categorical"

    with pytest.raises(DataError, match=r"in column odd, of type .*UTF8.*or leave it out of the schema"):
        read(tmp_path / "x.parquet", ROLES[role])


@pytest.mark.parametrize(
    ("name", "numbers"), [("decimal32", [1.25, 2.5, None]), ("half float", [0.5, None, None, 65_504.0])]
)
def test_short_numbers_keep_their_values(tmp_path, name, numbers):
    pq.write_table(clicks(odd=ODD_COLUMNS[name]), tmp_path / "x.parquet")

    (batch,) = read_rows([tmp_path / "x.parquet"], ROLES["numeric"])

    found = [None if np.isnan(each) else each for each in batch.numbers[: len(numbers), 0].tolist()]
    assert found == numbers
