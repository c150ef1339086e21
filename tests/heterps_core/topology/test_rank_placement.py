import itertools

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.topology.device_paths import device_paths
from heterps_core.topology.rank_placement import place_ranks
from heterps_core.topology.rank_traffic import RankTraffic
from tests.heterps_core.topology.builders import make_topology


def ranks(bytes_per_step, *, device_types, replicas_per_stage):
    return RankTraffic(
        replicas_per_stage=replicas_per_stage,
        device_types=device_types,
        bytes_per_step=np.array(bytes_per_step, dtype=float),
    )


def draw_case(seed):
    """Return a two-stage plan's traffic, and 2 to 4 heterogeneous machines of 1 to 3 cores and cards."""
    random = np.random.default_rng(seed)
    num_machines = int(random.integers(2, 5))
    models = [random.choice(["cpu", "gpu"], int(random.integers(1, 4))).tolist() for _ in range(num_machines)]
    topology = make_topology(
        models,
        inside_bytes_per_s=random.choice([5e9, 12e9, 42e9], num_machines).tolist(),
        network_bytes_per_s=random.choice([0.6e9, 1.25e9, 3e9, 12e9], num_machines).tolist(),
    )
    there = [model for row in models for model in row]
    used = sorted(
        random.choice(there, int(random.integers(2, min(len(there), 7) + 1)), replace=False).tolist()
    )
    k, n = used.count("cpu"), len(used)
    traffic = np.zeros((n, n))
    traffic[:k, :k] += random.uniform(1e5, 1e7)
    for first, second in itertools.product(range(k), range(k, n)):
        overlap = min((first + 1) / k, (second - k + 1) / (n - k)) - max(first / k, (second - k) / (n - k))
        traffic[first, second] = traffic[second, first] = max(0.0, overlap) * random.uniform(1e6, 1e8)
    for card in range(n - k):
        traffic[k + card, k + (card + 1) % (n - k)] += random.uniform(1e5, 1e8)
    np.fill_diagonal(traffic, 0.0)
    counts = tuple(count for count in (k, n - k) if count)
    return ranks(traffic, device_types=tuple(used), replicas_per_stage=counts), topology


def least_seconds(traffic, topology):
    """Try every placement."""
    paths = device_paths(topology)
    places = {
        name: [index for index, device in enumerate(paths.devices) if device.model == name]
        for name in ("cpu", "gpu")
    }
    num_cpu = traffic.device_types.count("cpu")
    num_gpu = len(traffic.device_types) - num_cpu
    tried = np.array(
        [
            (*cpus, *gpus)
            for cpus in itertools.permutations(places["cpu"], num_cpu)
            for gpus in itertools.permutations(places["gpu"], num_gpu)
        ]
    )
    seconds = np.zeros(len(tried))
    for sender, receiver in np.argwhere(traffic.bytes_per_step):
        widths = paths.bandwidth_bytes_per_s[tried[:, sender], tried[:, receiver]]
        seconds += traffic.bytes_per_step[sender, receiver] / widths
    return seconds.min()


@pytest.mark.parametrize("seed", range(40))
def test_is_near_the_best_of_all_placements(seed):
    traffic, topology = draw_case(seed)

    placement = place_ranks(traffic, topology)

    best_seconds = least_seconds(traffic, topology)
    assert best_seconds * (1 - 1e-9) <= placement.seconds_per_step <= best_seconds * 1.05
    assert placement.seconds_per_step <= placement.plain_order_seconds_per_step


@pytest.mark.parametrize("seed", range(10))
def test_every_rank_has_a_device_of_its_own_and_of_its_type(seed):
    traffic, topology = draw_case(seed)

    ids = [device for stage in place_ranks(traffic, topology).device_ids for device in stage]

    models = {device.global_id: device.model for device in topology.devices()}
    assert len(set(ids)) == len(ids)
    assert tuple(models[device] for device in ids) == traffic.device_types


def test_the_seconds_are_those_of_the_devices_that_are_named():
    traffic, topology = draw_case(3)
    placement = place_ranks(traffic, topology)

    paths = device_paths(topology)
    index_of = {device.global_id: index for index, device in enumerate(paths.devices)}
    places = [index_of[device] for stage in placement.device_ids for device in stage]
    pairs = itertools.permutations(range(len(places)), 2)
    seconds = sum(
        traffic.bytes_per_step[a, b] / paths.bandwidth_bytes_per_s[places[a], places[b]] for a, b in pairs
    )
    assert placement.seconds_per_step == pytest.approx(seconds)


def test_heavy_pairs_share_a_machine():
    # Ranks 0 and 2 talk much, and 1 and 3; neighbours in number talk little.
    talk = [[0, 1, 9, 0], [1, 0, 1, 9], [9, 1, 0, 1], [0, 9, 1, 0]]
    topology = make_topology(
        [["cpu", "cpu"], ["cpu", "cpu"]], inside_bytes_per_s=[10.0, 10.0], network_bytes_per_s=[1.0, 1.0]
    )

    placement = place_ranks(ranks(talk, device_types=("cpu",) * 4, replicas_per_stage=(4,)), topology)

    machines = [topology.machine_of()[device] for device in placement.device_ids[0]]
    assert machines[0] == machines[2] != machines[1] == machines[3]


def test_in_plain_order_each_rank_takes_the_first_free_device_of_its_type():
    topology = make_topology(
        [["cpu", "gpu"], ["cpu"]], inside_bytes_per_s=[100.0, 100.0], network_bytes_per_s=[10.0, 10.0]
    )
    traffic = ranks(
        [[0, 1, 2], [3, 0, 5], [6, 7, 0]], device_types=("cpu", "gpu", "cpu"), replicas_per_stage=(3,)
    )

    # The cores are on machines 0 and 1, the card on 0; bytes: 0-1 1 and 3, 0-2 2 and 6, 1-2 5 and 7.
    found = place_ranks(traffic, topology).plain_order_seconds_per_step
    assert found == pytest.approx((1 + 3) / 100 + (2 + 6 + 5 + 7) / 10)


def test_leaves_the_machine_with_the_slow_network_out():
    talk = [[0, 5], [5, 0]]
    topology = make_topology(
        [["cpu"], ["cpu"], ["cpu"]], inside_bytes_per_s=[9.0] * 3, network_bytes_per_s=[0.1, 8.0, 8.0]
    )

    placement = place_ranks(ranks(talk, device_types=("cpu", "cpu"), replicas_per_stage=(2,)), topology)

    assert {topology.machine_of()[device] for device in placement.device_ids[0]} == {1, 2}


def test_refuses_a_plan_that_needs_more_devices():
    topology = make_topology([["cpu", "gpu"]], inside_bytes_per_s=[1.0], network_bytes_per_s=[1.0])
    traffic = ranks([[0, 1], [1, 0]], device_types=("cpu", "cpu"), replicas_per_stage=(2,))

    with pytest.raises(ConfigurationError, match="2 ranks for cpu, the topology has 1"):
        place_ranks(traffic, topology)
