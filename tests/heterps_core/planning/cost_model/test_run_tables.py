import numpy as np
import pytest

from heterps_core.planning.cost_model.run_tables import (
    least_memory_replicas,
    segment_layers,
    segment_row,
)

ALL_RUNS = [(first, last) for last in range(5) for first in range(last + 1)]


def test_rows_and_runs_are_each_others_inverse():
    rows = [segment_row(first, last) for first, last in ALL_RUNS]

    assert rows == list(range(15))
    assert [segment_layers(row) for row in rows] == ALL_RUNS


@pytest.mark.parametrize(
    ("replicated", "sharded", "replicas"),
    [(0, 30, 3), (0, 31, 4), (4, 12, 2), (10, 0, 1), (10, 1, np.inf), (11, 0, np.inf), (0, 0, 1)],
)
def test_memory_replicas_worked_by_hand_for_ten_bytes(replicated, sharded, replicas):
    found = least_memory_replicas(np.array([float(replicated)]), np.array([float(sharded)]), 10)

    # A limit that is kept up to rounding alone may be used to the last byte, and a hair beyond.
    assert found[0] == replicas or (np.isinf(replicas) and found[0] > 1e9)
