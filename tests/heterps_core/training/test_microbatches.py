import pytest

from heterps_core.training.microbatches import (
    LEAST_MICROBATCH_ROWS,
    MOST_MICROBATCHES,
    default_microbatches,
)


@pytest.mark.parametrize("batch_size", [1, 63, 64, 127, 128, 150, 256, 258, 512, 1000, 4096, 10**6])
def test_microbatches_are_of_one_size_and_not_too_small(batch_size):
    count = default_microbatches(batch_size, num_stages=3)

    assert batch_size % count == 0
    assert count == 1 or batch_size // count >= LEAST_MICROBATCH_ROWS
    assert count <= MOST_MICROBATCHES


def test_a_large_batch_is_cut_most():
    assert default_microbatches(4096, num_stages=2) == MOST_MICROBATCHES


def test_a_single_stage_has_nothing_to_overlap():
    assert default_microbatches(4096, num_stages=1) == 1
