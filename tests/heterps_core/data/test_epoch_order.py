import tracemalloc
from collections import Counter

import numpy as np
import pytest

from heterps_core.data.epoch_order import EpochOrder, _permute
from heterps_core.errors import ConfigurationError
from heterps_core.training.pipeline.stage_exchange import replica_slice


def starts_of(sizes):
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def uneven_starts(num_groups, seed=0):
    return starts_of(np.random.default_rng(seed).integers(0, 400, num_groups))


def rows_of_epoch(order, batch_size):
    return np.concatenate([order.rows(step, np.arange(batch_size)) for step in range(order.num_batches)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_a_keyed_permutation_takes_each_number_to_one_of_its_own(size):
    for key in range(20):
        assert sorted(_permute(np.arange(size), size, np.uint64(key)).tolist()) == list(range(size))


def test_permutations_of_different_sizes_and_keys_stand_side_by_side():
    sizes, keys = np.array([5, 9, 9]), np.array([1, 2, 3], dtype=np.uint64)

    together = _permute(np.array([3, 3, 3]), sizes, keys)

    alone = [_permute(np.array([3]), int(n), key)[0] for n, key in zip(sizes, keys, strict=True)]
    assert together.tolist() == alone


def test_over_many_keys_a_number_goes_everywhere_equally_often():
    keys = np.random.default_rng(0).integers(0, 2**63, 60_000).astype(np.uint64)

    for size in (2, 60, 1_000):
        for value in (0, 1, size - 1):
            counts = np.bincount(_permute(np.full(len(keys), value), size, keys), minlength=size)
            expected = len(keys) / size
            chi_square = ((counts - expected) ** 2 / expected).sum()
            assert chi_square < size - 1 + 5 * (2 * size) ** 0.5


def test_neighbours_do_not_stay_neighbours():
    taken = _permute(np.arange(5_000), 5_000, np.uint64(7)).astype(float)

    for lag in (1, 2, 64):
        assert abs(np.corrcoef(taken[:-lag], taken[lag:])[0, 1]) < 5 / 5_000**0.5


@pytest.mark.parametrize("seed", [None, 4])
def test_several_batches_have_the_rows_that_each_has_alone(seed):
    order = EpochOrder(uneven_starts(20), batch_size=32, seed=seed, epoch=1)
    positions, steps = np.array([0, 31, 7]), np.array([2, 3, 9])

    together = order.rows(np.repeat(steps, 3), np.tile(positions, 3))

    assert together.tolist() == [row for step in steps for row in order.rows(int(step), positions).tolist()]


@pytest.mark.parametrize("batch_size", [5, 7, 64, 1000, 2500])
@pytest.mark.parametrize("num_groups", [1, 3, 90])
def test_each_row_is_met_once_but_for_the_tail(batch_size, num_groups):
    starts = uneven_starts(num_groups, seed=num_groups)
    order = EpochOrder(starts, batch_size=batch_size, seed=3)

    met = Counter(rows_of_epoch(order, batch_size).tolist())

    num_rows = int(starts[-1])
    if num_rows >= batch_size:
        assert set(met.values()) == {1}
        assert len(met) == num_rows - num_rows % batch_size
    else:
        assert set(met) == set(range(num_rows))
        assert max(met.values()) - min(met.values()) <= 1


@pytest.mark.parametrize("max_lanes", [1, 10, 1024])
def test_the_number_of_lanes_loses_no_row(max_lanes):
    order = EpochOrder(uneven_starts(40), batch_size=100, seed=1, max_lanes=max_lanes)

    rows = rows_of_epoch(order, 100)

    assert len(np.unique(rows)) == len(rows) == order.num_batches * 100


def test_replicas_that_change_in_mid_epoch_meet_each_row_once():
    starts, batch_size = uneven_starts(60), 130
    order = EpochOrder(starts, batch_size=batch_size, seed=5)
    met = []
    for step in range(order.num_batches):
        num_replicas = (31, 30, 8)[step * 3 // order.num_batches]
        for replica in range(num_replicas):
            mine = replica_slice(batch_size, num_replicas, replica)
            # As a worker that has just joined.
            fresh = EpochOrder(starts, batch_size=batch_size, seed=5)
            met.append(fresh.rows(step, np.arange(mine.first, mine.stop)))

    assert sorted(np.concatenate(met).tolist()) == sorted(rows_of_epoch(order, batch_size).tolist())


def test_a_replica_meets_its_own_row_groups_and_few_others():
    starts, batch_size, num_replicas = starts_of([50] * 4_000), 1_000, 8
    order = EpochOrder(starts, batch_size=batch_size, seed=0)
    groups = []
    for replica in range(num_replicas):
        mine = replica_slice(batch_size, num_replicas, replica)
        positions = np.arange(mine.first, mine.stop)
        rows = np.concatenate([order.rows(step, positions) for step in range(order.num_batches)])
        groups.append(len(np.unique(rows // 50)))

    # At each of the seven cuts between replicas one row group may be shared.
    assert 4_000 <= sum(groups) <= 4_000 + 7


def test_a_batch_takes_rows_from_everywhere_even_of_a_sorted_file():
    starts = starts_of([100] * 640)

    means = [
        EpochOrder(starts, batch_size=64, seed=seed).rows(0, np.arange(64)).mean() for seed in range(400)
    ]

    # Of 64 rows at random: deviation of their mean is that of one row by 8.
    deviation = 64_000 / 12**0.5 / 8
    assert np.std(means) == pytest.approx(deviation, rel=0.15)
    assert abs(np.mean(means) - 32_000) < 4 * deviation / len(means) ** 0.5


def test_seed_and_epoch_alone_decide_the_order():
    starts = uneven_starts(20)
    orders = [
        tuple(rows_of_epoch(EpochOrder(starts, batch_size=32, seed=seed, epoch=epoch), 32).tolist())
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]
    ]

    assert len(set(orders)) == 3
    assert orders[0] == orders[3]


def test_without_a_seed_rows_keep_their_order_in_each_lane():
    order = EpochOrder(starts_of([10, 10]), batch_size=5, seed=None, max_lanes=2)

    # Two lanes of 2 and 3 positions: rows 0..7, and 8..19 from the end.
    assert order.rows(0, np.arange(5)).tolist() == [0, 1, 17, 18, 19]
    assert order.rows(3, np.arange(5)).tolist() == [6, 7, 8, 9, 10]


def test_a_billion_rows_are_ordered_within_a_megabyte():
    starts = starts_of(np.full(200_000, 5_000))
    tracemalloc.start()
    order = EpochOrder(starts, batch_size=4096, seed=0)
    order.rows(100_000, np.arange(132))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 1.5e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"starts": [0, 0]}, "there must be a row to train on, got 0"),
        ({"batch_index": 2}, r"batch_index must be in 0\.\.1 for 20 rows in batches of 10, got 2"),
        ({"positions": [3, 10]}, r"positions must be in 0\.\.9, got 3 to 10"),
    ],
)
def test_what_lies_outside_is_refused(arguments, message):
    parameters = {"batch_size": 10, "starts": [0, 20], "batch_index": 0, "positions": [0]} | arguments

    def ask():
        order = EpochOrder(np.array(parameters["starts"]), batch_size=parameters["batch_size"], seed=0)
        order.rows(parameters["batch_index"], np.array(parameters["positions"]))

    with pytest.raises(ConfigurationError, match=message):
        ask()


@pytest.mark.parametrize(("num_groups", "num_replicas"), [(900, 31), (2_000, 1), (300, 31)])
def test_a_row_group_at_the_border_of_lanes_is_read_once_by_a_replica(num_groups, num_replicas):
    """Counted step by step, with the row groups of the last batch held; a cut between replicas shares one lane."""
    starts, batch_size = uneven_starts(num_groups), 1_000
    order = EpochOrder(starts, batch_size=batch_size, seed=2, max_lanes=200)
    num_reads = 0
    for replica in range(num_replicas):
        mine = replica_slice(batch_size, num_replicas, replica)
        held = set()
        for step in range(order.num_batches):
            rows = order.rows(step, np.arange(mine.first, mine.stop))
            needed = set((np.searchsorted(starts, rows, side="right") - 1).tolist())
            num_reads += len(needed - held)
            held = needed

    groups_of_a_lane = num_groups / 200 + 1
    assert num_reads <= num_groups + (num_replicas - 1) * (groups_of_a_lane + 1)
