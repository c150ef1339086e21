import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.proposal.day_check import check_day
from heterps_core.data.schema import DataSchema, MultiHotColumn

SCHEMA = DataSchema(
    name="shop",
    label_column="clicked",
    numeric_columns=("price",),
    categorical_columns=("site",),
    multi_hot_columns=(MultiHotColumn(name="tags"),),
)
ROWS = 4_000


@pytest.fixture
def day(tmp_path):
    def write(name, seed, **changed):
        generator = np.random.default_rng(seed)
        columns = {
            "clicked": (generator.random(ROWS) < 0.2).astype(int),
            "price": generator.normal(10, 2, ROWS),
            "site": [f"s{site}" for site in generator.integers(0, 30, ROWS)],
            "tags": [[f"t{tag}" for tag in generator.integers(0, 9, 2)] for _ in range(ROWS)],
            "at": pa.array(range(ROWS), pa.timestamp("s")),
        }
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table(columns | changed), path)
        return [path]

    return write


def test_a_day_that_is_drawn_alike_has_no_finding(day):
    check = check_day(day("today", 1), SCHEMA, before=day("before", 0))

    assert check.findings == []
    assert check.num_rows == ROWS
    assert [column.num_values for column in check.columns] == [ROWS, 30, 9]


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ({"clicked": [1, 0] * (ROWS // 2)}, "clicked: 50.00% of the rows are clicks"),
        ({"clicked": [0] * ROWS}, "clicked is the same in all rows"),
        ({"price": [2.0] * ROWS}, "price has one value at most"),
        (
            {"price": [None, 9.5] * (ROWS // 2)},
            "price has one value at most; is missing in 50% of the rows, 0% before",
        ),
        ({"price": np.linspace(18, 26, ROWS)}, "price is distributed otherwise than before"),
        ({"site": [f"s{row % 60}" for row in range(ROWS)]}, "site has 50% values that are new, 0% are usual"),
        ({"site": ["s1", "s2"] * (ROWS // 2)}, "site lacks values that"),
        ({"site": [f"s{min(row % 300, 29)}" for row in range(ROWS)]}, "site is distributed otherwise"),
        (
            {"tags": [None, ["t1"]] * (ROWS // 2)},
            "tags has one value at most; is missing in 50% of the rows, 0% before",
        ),
    ],
)
def test_what_changed_is_reported_with_its_column(day, changed, finding):
    check = check_day(day("today", 1, **changed), SCHEMA, before=day("before", 0))

    assert any(said.startswith(finding) for said in check.findings), check.findings


def test_without_a_day_before_it_tells_what_is_wrong_in_itself(day):
    check = check_day(day("today", 1, site=["s1"] * ROWS), SCHEMA)

    assert check.findings == ["site has one value at most"]
    assert check.click_share_before is None


def test_ids_of_which_every_row_has_a_new_one_are_as_usual(day):
    ids = [[f"{name}{row}" for row in range(ROWS)] for name in ("a", "b")]

    check = check_day(day("today", 1, site=ids[1]), SCHEMA, before=day("before", 0, site=ids[0]))

    assert check.findings == []


def test_the_index_is_that_of_shares_by_hand(day):
    sites = [["a"] * 3_000 + ["b"] * 1_000, ["a"] * 2_000 + ["b"] * 2_000]

    check = check_day(day("today", 1, site=sites[1]), SCHEMA, before=day("before", 0, site=sites[0]))

    # (0.5 - 0.75) ln(0.5 / 0.75) + (0.5 - 0.25) ln(0.5 / 0.25) = 0.25 ln 3; a half is added to each count.
    assert check.columns[1].shift == pytest.approx(0.25 * math.log(3), rel=2e-2)


def test_a_column_that_tells_the_label_alone_is_reported(day):
    is_click = np.random.default_rng(0).random(ROWS) < 0.2
    leaking = {"clicked": is_click.astype(int), "site": np.where(is_click, "s1", "s2")}

    assert check_day(day("today", 1, **leaking), SCHEMA).findings == [
        "site tells the label alone (AUC 1.000)"
    ]


def test_an_odd_name_of_a_column_is_shown_in_one_line(tmp_path):
    schema = DataSchema(name="odd", label_column="click", categorical_columns=("a\nb\x1b[2J",))
    pq.write_table(pa.table({"click": [0, 1], "a\nb\x1b[2J": ["x", "x"]}), tmp_path / "rows.parquet")

    check = check_day([tmp_path / "rows.parquet"], schema)

    assert check.table().rows[0][0] == r"'a\nb\x1b[2J'"
    assert check.findings == [r"'a\nb\x1b[2J' has one value at most"]
