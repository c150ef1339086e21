from itertools import pairwise

import numpy as np
import pytest

from heterps_core.planning.cost_model.run_tables import segment_layers
from heterps_core.planning.search.chain_partition import cheapest_partitions


def all_partitions(num_layers, num_types, first=0, last_type=-1):
    """Yield every partition of layers first.. as a list of flat rows, no neighbours of one type."""
    if first == num_layers:
        yield []
        return
    for last in range(first, num_layers):
        for device_type in range(num_types):
            if device_type != last_type:
                row = (last * (last + 1) // 2 + first) * num_types + device_type
                for rest in all_partitions(num_layers, num_types, last + 1, device_type):
                    yield [row, *rest]


@pytest.mark.parametrize(("num_layers", "num_types"), [(1, 1), (4, 1), (1, 3), (5, 2), (5, 3)])
def test_equals_trying_all_partitions(num_layers, num_types):
    random = np.random.default_rng(num_layers * 10 + num_types)
    prices = random.random((4, num_layers * (num_layers + 1) // 2, num_types))
    prices[1:][random.random(prices[1:].shape) < 0.4] = np.inf

    found = cheapest_partitions(prices)

    for case in range(4):
        flat = prices[case].reshape(-1)
        expected = min(flat[rows].sum() for rows in all_partitions(num_layers, num_types))
        assert found.prices[case] == pytest.approx(expected)
        rows = found.rows[case][found.rows[case] >= 0]
        assert flat[rows].sum() == (pytest.approx(expected) if np.isfinite(expected) else 0)


def test_stages_come_last_first_and_cover_the_chain():
    prices = np.random.default_rng(1).random((1, 21, 3))

    rows = cheapest_partitions(prices).rows[0]
    runs = [segment_layers(row // 3) for row in rows[rows >= 0].tolist()][::-1]

    assert runs[0][0] == 0
    assert runs[-1][1] == 5
    assert all(left[1] + 1 == right[0] for left, right in pairwise(runs))
