import pytest

from heterps_core.training.job import (
    LEAST_MICROBATCH_ROWS,
    ROWS_OF_FIXED_COST,
    default_microbatches,
)


@pytest.mark.parametrize("num_stages", [2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 63, 64, 127, 128, 150, 256, 258, 512, 1000, 4096, 10**6])
def test_microbatches_are_of_one_size_and_not_too_small(batch_size, num_stages):
    count = default_microbatches(batch_size, num_stages=num_stages)

    assert batch_size % count == 0
    assert count == 1 or batch_size // count >= LEAST_MICROBATCH_ROWS


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [1024, 4096, 16384])
def test_no_power_of_two_makes_a_step_much_shorter(batch_size, num_stages):
    def step_rows(count):
        return (batch_size + count * ROWS_OF_FIXED_COST) * (1 + (num_stages - 1) / (3 * count))

    shortest = min(step_rows(2**power) for power in range(10))

    assert step_rows(default_microbatches(batch_size, num_stages=num_stages)) < 1.08 * shortest


@pytest.mark.parametrize("num_stages", [2, 3, 7])
@pytest.mark.parametrize("batch_size", [128, 256, 512])
def test_stages_never_take_turns_with_a_whole_batch_that_can_be_cut(batch_size, num_stages):
    assert default_microbatches(batch_size, num_stages=num_stages) >= 2


def test_a_single_stage_has_nothing_to_overlap():
    assert default_microbatches(4096, num_stages=1) == 1
