import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.proposal.column_checks import leak_auc, leak_remark, leaks_of, order_remark
from heterps_core.data.schema import DataSchema, MultiHotColumn

NUM_ROWS = 2_000


@pytest.fixture
def is_click():
    return np.random.default_rng(0).random(NUM_ROWS) < 0.2


@pytest.mark.parametrize(
    "leaking",
    [
        lambda is_click: pa.array(np.where(is_click, "landing page", "none")),
        lambda is_click: pa.array(np.where(is_click, 4.5, None), pa.float64()),
        lambda is_click: pa.array(-1.0 * is_click + np.linspace(0, 0.5, NUM_ROWS)),
        lambda is_click: pa.array(2 * is_click.astype(int)),
    ],
)
def test_a_column_that_is_filled_after_the_click_is_reported(leaking, is_click):
    assert "tells the label alone (AUC 1.000)" in leak_remark(leak_auc(leaking(is_click), is_click))


def test_columns_that_say_something_or_nothing_of_the_click_are_no_leak(is_click):
    random = np.random.default_rng(1)
    better = np.where(is_click, random.integers(0, 6, NUM_ROWS), random.integers(3, 10, NUM_ROWS))

    for column in (better.astype(str), random.normal(size=NUM_ROWS), np.arange(NUM_ROWS)):
        assert leak_remark(leak_auc(pa.array(column), is_click)) == ""


def test_an_id_of_its_own_for_each_row_is_no_leak_though_it_tells_the_rows_it_was_seen_in(is_click):
    assert leak_auc(pa.array([f"row {number}" for number in range(NUM_ROWS)]), is_click) == 0.5


def test_too_few_clicks_say_nothing(is_click):
    few = is_click & (np.arange(NUM_ROWS) < 60)

    assert leak_auc(pa.array(few.astype(str)), few) == 0.5


def test_rows_out_of_the_order_of_time_are_reported_with_their_share():
    in_order = pa.array([1, 2, 2, None, 3, 5], pa.timestamp("s"))
    shuffled = pa.array([1, 3, 2, None, 5, 4], pa.timestamp("s"))

    assert order_remark(in_order).startswith("a time")
    # Of four steps between five known times two go back.
    assert "not in its order (50% are before their neighbour)" in order_remark(shuffled)
    assert order_remark(pa.array([], pa.timestamp("s"))).startswith("a time")


@pytest.mark.parametrize("eval_fraction", [0.0, 0.5])
def test_the_leaks_of_a_prepared_data_set_are_named(tmp_path, is_click, eval_fraction):
    random = np.random.default_rng(1)
    columns = {
        "label": is_click.astype(int),
        "price": random.normal(size=NUM_ROWS),
        "dwell": np.where(is_click, random.random(NUM_ROWS), None).astype(float),
        "site": [f"s{each}" for each in random.integers(0, 30, NUM_ROWS)],
        "user": [f"u{each}" for each in random.integers(0, NUM_ROWS, NUM_ROWS)],
        "page": np.where(is_click, "landing", "none"),
        "tags": [["a"]] * NUM_ROWS,
    }
    schema = DataSchema(
        name="x",
        label_column="label",
        numeric_columns=("price", "dwell"),
        categorical_columns=("site", "user", "page"),
        multi_hot_columns=(MultiHotColumn(name="tags"),),
    )
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    dataset = prepare_dataset(
        tmp_path / "x.parquet", schema=schema, eval_fraction=eval_fraction, out_dir=tmp_path / "o"
    )

    assert leaks_of(dataset) == [
        "dwell tells the label alone (AUC 1.000)",
        "page tells the label alone (AUC 1.000)",
    ]


def test_one_sighting_of_a_value_says_less_than_many():
    first_half = [("often", row < 50) for row in range(60)] + [(f"rare {row}", row < 15) for row in range(30)]
    second_half = [("often", True)] * 60 + [(f"rare {row}", False) for row in range(30)]
    values, is_click = zip(*first_half, *second_half, strict=True)

    # Fifteen rare values were clicked once of once, often 50 times of 60.
    assert leak_auc(pa.array(values), np.array(is_click)) == 1.0
