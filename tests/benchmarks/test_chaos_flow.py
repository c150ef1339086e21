import pytest

from tests.benchmarks.chaos_flow import rows_wrong


@pytest.mark.parametrize(
    ("attempts", "wrong"),
    [
        ([[1, 2, 3, 4]], []),
        ([[1, 2, 3], [3, 4]], []),  # from a checkpoint of step 2
        ([[1, 2], [4]], ["generation 2 trained steps 4 to 4 behind 2"]),
        ([[1, 3, 4]], ["generation 1 trained steps 1 to 4 behind 0"]),
        ([[1, 2, 2, 3, 4]], ["generation 1 trained steps 1 to 4 behind 0"]),
        ([[1, 2, 3]], ["3 of 4 steps were trained"]),
        ([], ["0 of 4 steps were trained"]),
    ],
)
def test_steps_that_are_left_out_or_trained_twice_are_found(attempts, wrong):
    assert rows_wrong(attempts, num_steps=4) == wrong
