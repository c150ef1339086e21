import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.topology.plain_order import plain_order_seconds
from heterps_core.topology.rank_traffic import RankTraffic
from tests.heterps_core.topology.builders import make_topology

TOPOLOGY = make_topology(
    [["cpu", "gpu"], ["cpu"]], inside_bytes_per_s=[100.0, 100.0], network_bytes_per_s=[10.0, 10.0]
)


def traffic(*device_types):
    count = len(device_types)
    num_bytes = np.arange(count * count, dtype=float).reshape(count, count)
    np.fill_diagonal(num_bytes, 0.0)
    return RankTraffic(replicas_per_stage=(count,), device_types=device_types, bytes_per_step=num_bytes)


def test_each_rank_takes_the_first_free_device_of_its_type():
    # The cores are on machines 0 and 1, the card on 0; bytes: 0-1 1 and 3, 0-2 2 and 6, 1-2 5 and 7.
    found = plain_order_seconds(traffic("cpu", "gpu", "cpu"), TOPOLOGY)

    assert found == pytest.approx((1 + 3) / 100 + (2 + 6 + 5 + 7) / 10)


def test_refuses_more_ranks_than_devices():
    with pytest.raises(ConfigurationError, match="all gpu devices are taken"):
        plain_order_seconds(traffic("gpu", "gpu"), TOPOLOGY)
