import pytest

from heterps_core.data.features import buckets_for_rows, outgrown_tables


@pytest.mark.parametrize(
    ("num_rows", "buckets"),
    [(0, 1_024), (16 * 2_048 - 1, 1_024), (16 * 2_048, 2_048), (16 * 4_095, 2_048), (10**12, 131_072)],
)
def test_a_table_has_the_largest_power_of_two_that_sixteen_rows_each_fill(num_rows, buckets):
    assert buckets_for_rows(num_rows) == buckets


@pytest.mark.parametrize(
    ("buckets_per_slot", "num_rows", "is_told"),
    [
        (1_024, 16 * 4_096 - 1, False),
        (1_024, 16 * 4_096, True),
        (131_072, 10**12, False),  # there are no larger tables
        (4_096, 1_000, False),
    ],
)
def test_tables_are_outgrown_where_new_ones_would_have_four_times_their_rows(
    buckets_per_slot, num_rows, is_told
):
    assert (outgrown_tables(buckets_per_slot, num_rows=num_rows) is not None) == is_told
