import numpy as np
import pyarrow as pa
import pytest

from heterps_core.data.proposal.column_checks import leak_remark, order_remark

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
def test_a_column_that_is_filled_after_the_click_is_told(leaking, is_click):
    assert "tells the label alone (AUC 1.000)" in leak_remark(leaking(is_click), is_click)


def test_columns_that_say_something_or_nothing_of_the_click_are_no_leak(is_click):
    random = np.random.default_rng(1)
    better = np.where(is_click, random.integers(0, 6, NUM_ROWS), random.integers(3, 10, NUM_ROWS))

    for column in (better.astype(str), random.normal(size=NUM_ROWS), np.arange(NUM_ROWS)):
        assert leak_remark(pa.array(column), is_click) == ""


def test_an_id_of_its_own_for_each_row_is_no_leak_though_it_tells_the_rows_it_was_seen_in(is_click):
    assert leak_remark(pa.array([f"row {number}" for number in range(NUM_ROWS)]), is_click) == ""


def test_too_few_clicks_say_nothing(is_click):
    few = is_click & (np.arange(NUM_ROWS) < 60)

    assert leak_remark(pa.array(few.astype(str)), few) == ""


def test_rows_out_of_the_order_of_time_are_told_with_their_share():
    in_order = pa.array([1, 2, 2, None, 3, 5], pa.timestamp("s"))
    shuffled = pa.array([1, 3, 2, None, 5, 4], pa.timestamp("s"))

    assert order_remark(in_order).startswith("a time")
    # Of four steps between five known times two go back.
    assert "not in its order (50% are before their neighbour)" in order_remark(shuffled)
    assert order_remark(pa.array([], pa.timestamp("s"))).startswith("a time")
