from itertools import combinations, permutations

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.search.pipe_torch import balanced_cut


def slowest_stage(assignment, layer_seconds, cut_seconds):
    """Time of the slowest stage, by adding up what stands in the assignment."""
    seconds = {}
    for layer, device in enumerate(assignment):
        seconds[device] = seconds.get(device, 0.0) + layer_seconds[layer, device]
        if layer + 1 < len(assignment) and assignment[layer + 1] != device:
            seconds[device] += cut_seconds[layer]
            following = assignment[layer + 1]
            seconds[following] = seconds.get(following, 0.0) + cut_seconds[layer]
    return max(seconds.values())


def all_cuts(num_layers, num_devices):
    """Yield every partition into runs of layers on distinct devices."""
    for num_stages in range(1, min(num_layers, num_devices) + 1):
        for inner in combinations(range(1, num_layers), num_stages - 1):
            edges = [0, *inner, num_layers]
            for devices in permutations(range(num_devices), num_stages):
                yield [
                    device
                    for device, first, stop in zip(devices, edges, edges[1:], strict=False)
                    for _ in range(first, stop)
                ]


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_has_a_faster_slowest_stage(seed):
    random = np.random.default_rng(seed)
    num_layers, num_devices = int(random.integers(1, 8)), int(random.integers(1, 5))
    layer_seconds = random.uniform(0.1, 1.0, (num_layers, num_devices)) * random.uniform(1, 4, num_devices)
    cut_seconds = random.uniform(0.0, 0.5, num_layers - 1)

    found = balanced_cut(layer_seconds, cut_seconds)

    best = min(slowest_stage(cut, layer_seconds, cut_seconds) for cut in all_cuts(num_layers, num_devices))
    assert found.slowest_seconds == pytest.approx(best)
    assert slowest_stage(found.assignment, layer_seconds, cut_seconds) == pytest.approx(best)


def test_a_device_that_would_slow_the_others_down_stays_idle():
    # Layers of 1 s on the first device and 10 s on the second: any cut is slower than 3 s.
    found = balanced_cut(np.array([[1.0, 10.0]] * 3), np.zeros(2))

    assert found == ((0, 0, 0), 3.0)


def test_equal_partitions_take_the_fewest_devices():
    # One layer of 2 s, and one that takes no time wherever it is.
    found = balanced_cut(np.array([[2.0, 2.0], [0.0, 0.0]]), np.zeros(1))

    assert len(set(found.assignment)) == 1


def test_too_many_devices_are_refused_with_the_way_out():
    with pytest.raises(ConfigurationError, match="at most 10 devices, got 11; use the scheduler 'exact'"):
        balanced_cut(np.ones((2, 11)), np.zeros(1))
