import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.topology.device_paths import device_paths
from heterps_core.topology.machine_topology import Machine, MachineTopology
from tests.heterps_core.topology.builders import device, link, make_topology


def test_a_way_is_as_wide_as_its_narrowest_link():
    topology = make_topology(
        [["cpu", "cpu"], ["gpu"]], inside_bytes_per_s=[12.0, 3.0], network_bytes_per_s=[5.0, 7.0]
    )

    paths = device_paths(topology)

    assert [found.global_id for found in paths.devices] == [0, 1, 3]
    assert paths.bandwidth_bytes_per_s.tolist() == [
        [np.inf, 12.0, 3.0],
        [12.0, np.inf, 3.0],
        [3.0, 3.0, np.inf],
    ]
    assert paths.seconds_per_byte[0].tolist() == [0.0, 1 / 12, 1 / 3]


def test_a_direct_link_is_taken_and_no_computing_device_passes_on():
    def one_machine(*links):
        devices = tuple(device(index, index, "gpu") for index in range(3))
        return MachineTopology(machines=(Machine(hostname="a", devices=devices, links=links),))

    both_ways = [(0, 1, 40.0), (1, 0, 40.0), (1, 2, 40.0), (2, 1, 40.0)]
    chain = [link(a, b, width) for a, b, width in both_ways]
    direct = [link(0, 2, 1.0), link(2, 0, 2.0)]

    paths = device_paths(one_machine(*chain, *direct))

    assert paths.bandwidth_bytes_per_s[0, 2] == 1.0
    assert paths.bandwidth_bytes_per_s[2, 0] == 2.0
    with pytest.raises(ConfigurationError, match="no way from device 0 to device 2"):
        device_paths(one_machine(*chain))
