"""What is done with lists of rows in C++ and by NumPy is what Python's sets and loops do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from heterps_core.data.features import NO_ID
from heterps_core.embeddings.row_lists import RowSet, copy_records, distinct_rows, union_of, values_at

pytestmark = pytest.mark.usefixtures("compiled_or_numpy")


@pytest.mark.parametrize("num_rows", [1, 7, 2_048, 2_049, 5_000_000, 2**32, 2**40])
def test_distinct_rows_ascend_and_each_row_is_found_at_its_position(num_rows):
    rows = np.random.default_rng(0).integers(0, num_rows, (70, 9))
    rows[0, :2] = 0, num_rows - 1

    found, inverse = distinct_rows(rows, num_rows=num_rows)

    assert found.tolist() == sorted(set(rows.reshape(-1).tolist()))
    assert (found[inverse] == rows).all()


def test_what_is_no_row_is_passed_over_where_bags_are_filled():
    rows = np.array([[5, 3, NO_ID], [3, NO_ID, NO_ID]])

    found, inverse = distinct_rows(rows, num_rows=6, allows_none=True)

    assert found.tolist() == [3, 5]
    assert inverse.tolist() == [[1, 0, NO_ID], [0, NO_ID, NO_ID]]


@pytest.mark.parametrize("allows_none", [False, True])
def test_no_rows_have_no_distinct_ones(allows_none):
    found, inverse = distinct_rows(np.empty((0, 4), dtype=np.int64), num_rows=6, allows_none=allows_none)

    assert len(found) == 0
    assert inverse.shape == (0, 4)


@pytest.mark.parametrize("bad", [NO_ID, 6, 2**33, -(2**33)])
def test_a_row_outside_of_the_table_is_reported(bad):
    with pytest.raises(IndexError, match=rf"rows must lie in 0\.\.5, got {bad}$"):
        distinct_rows(np.array([[5, bad], [0, 1]]), num_rows=6)


def test_a_union_has_each_row_once():
    generator = np.random.default_rng(1)
    lists = [
        np.unique(generator.integers(0, 2**32, size).astype(np.uint32) % 3_000_017)
        for size in (900, 0, 4_000)
    ]

    assert union_of(lists).tolist() == sorted(set().union(*(own.tolist() for own in lists)))
    assert union_of(lists[:1]).tolist() == lists[0].tolist()
    assert union_of([np.array([4, 2, 4], dtype=np.uint32)]).tolist() == [2, 4]
    assert union_of([]).tolist() == []


def test_values_are_those_of_a_dictionary_also_where_rows_do_not_ascend():
    generator = np.random.default_rng(2)
    listed = np.unique(generator.integers(0, 2**32 - 1, 5_000)).astype(np.uint32)
    values = generator.permutation(len(listed)).astype(np.int32)
    by_row = dict(zip(listed.tolist(), values.tolist(), strict=True))
    ascending = np.sort(generator.choice(listed, 3_000)).astype(np.int64)

    for rows in (
        ascending,
        np.concatenate([ascending, ascending[:100]]),
        ascending[::-1],
        listed.astype(np.int64),
    ):
        assert values_at(rows, listed=listed, values=values).tolist() == [
            by_row[row] for row in rows.tolist()
        ]


@pytest.mark.parametrize("missing", [0, 4, 9, 2**33])
def test_a_row_that_is_not_listed_is_refused(missing):
    with pytest.raises(IndexError, match="of 2 rows some are not among the 2"):
        values_at(
            np.array([3, missing]),
            listed=np.array([3, 8], dtype=np.uint32),
            values=np.zeros(2, dtype=np.int32),
        )


def test_a_set_counts_by_part_what_it_does_not_have_yet():
    parts = np.array([0, 13, 13, 600, 1_001])
    generator = np.random.default_rng(3)
    seen: set[int] = set()
    rows_seen = RowSet(parts)
    for number in range(20):
        rows = np.unique(generator.integers(0, 1_001, 60)).astype(np.uint32)
        new = set(rows.tolist()) - seen
        expected = [sum(first <= row < stop for row in new) for first, stop in itertools.pairwise(parts)]

        assert rows_seen.count_new(rows).tolist() == expected
        if number % 2:
            assert rows_seen.count_new(rows, adds=True).tolist() == expected
            seen |= new
    rows_seen.clear()
    assert rows_seen.count_new(np.arange(1_001, dtype=np.uint32)).tolist() == [13, 0, 587, 401]


def test_records_go_to_their_places_in_a_block_and_back():
    generator = np.random.default_rng(4)
    matrices = [generator.random((50, width), dtype=np.float32) for width in (4, 1)]
    block = generator.random((30, 5), dtype=np.float32)
    slots, places = generator.permutation(50)[:20], generator.permutation(30)[:20]
    expected = block.copy()
    for slot, place in zip(slots, places, strict=True):
        expected[place] = [*matrices[0][slot], *matrices[1][slot]]

    copy_records(matrices, slots, block, places, to_block=True)
    assert (block == expected).all()

    empty = [np.zeros_like(values) for values in matrices]
    copy_records(empty, slots, block, places, to_block=False)
    for values, own in zip(matrices, empty, strict=True):
        assert (own[slots] == values[slots]).all()
        assert (np.delete(own, slots, axis=0) == 0).all()
