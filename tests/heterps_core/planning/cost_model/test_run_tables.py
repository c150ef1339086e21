from dataclasses import replace

import numpy as np
import pytest

from heterps_core.planning.cost_model.run_tables import (
    segment_layers,
    segment_row,
    segment_table,
)
from tests.builders import make_problem

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
    problem = make_problem(0, num_layers=2, num_types=1)
    whole, table = problem.layers
    layers = (
        replace(whole, is_sharded=False, state_bytes=float(replicated)),
        replace(table, is_sharded=True, state_bytes=float(sharded)),
    )
    units = {"cpu": replace(problem.device_types["cpu"], memory_bytes=10.0)}

    found = segment_table(replace(problem, layers=layers, device_types=units)).memory_replicas[1, 0]

    # A limit that is kept up to rounding alone may be used to the last byte, and a hair beyond.
    assert found == replicas or (np.isinf(replicas) and found > 1e9)
