import itertools
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from heterps_core.models.model_graph import Layer, LayerKind, ModelGraph
from heterps_core.planning.provisioning.node_order import near_order, network_hops, plan_traffic
from heterps_core.plans.scheduling_plan import Stage


def layer(name, *, is_sharded, parameter_bytes, output_bytes_per_sample, looked_up_bytes_per_sample=0):
    return Layer(
        name=name,
        kind=LayerKind.EMBEDDING if is_sharded else LayerKind.FULLY_CONNECTED,
        is_sharded=is_sharded,
        parameter_bytes=parameter_bytes,
        optimizer_state_bytes=parameter_bytes,
        input_bytes_per_sample=0,
        output_bytes_per_sample=output_bytes_per_sample,
        forward_flops_per_sample=1.0,
        looked_up_bytes_per_sample=looked_up_bytes_per_sample,
    )


GRAPH = ModelGraph(
    name="small",
    layers=(
        layer(
            "embedding",
            is_sharded=True,
            parameter_bytes=10**6,
            output_bytes_per_sample=10,
            looked_up_bytes_per_sample=18,
        ),
        layer("tower", is_sharded=False, parameter_bytes=600, output_bytes_per_sample=4),
    ),
)

PORT = 29_400


def make_cluster(num_workers_per_stage, markets=None):
    """Nodes of each stage with these numbers of workers; all are on spot unless told otherwise."""
    nodes = [
        Node(
            node_id=f"stage{stage}-node{index}",
            address=f"10.0.{stage}.{index}",
            device_type="cpu-c7i",
            instance_type="c7i.large",
            market=(markets or {}).get((stage, index), Market.SPOT),
            stage=stage,
            num_workers=num_workers,
            price_usd_per_hour=0.1,
            provider_instance_id=f"i-{stage}{index}",
        )
        for stage, counts in enumerate(num_workers_per_stage)
        for index, num_workers in enumerate(counts)
    ]
    return Cluster(
        run_id="r1",
        provider="aws",
        nodes=tuple(nodes),
        rendezvous=f"{nodes[0].address}:{PORT}",
        created_at="2026-11-22T00:00:00+00:00",
    )


def traffic_of(cluster):
    workers = [sum(n.num_workers for n in cluster.nodes if n.stage == stage) for stage in (0, 1)]
    stages = [Stage(0, 0, "cpu-c7i", workers[0]), Stage(1, 1, "gpu-t4", workers[1])]
    return plan_traffic(GRAPH, stages, batch_size=120, num_microbatches=2)


def paths_of(cluster, switches):
    """Put nodes below switches of one spine, in the order of launch."""
    return {n.node_id: ("core", "spine", s) for n, s in zip(cluster.nodes, switches, strict=True)}


def bytes_times_hops(cluster, paths, traffic):
    """Rank by rank, from the numbers that the cluster gives its nodes."""
    firsts = (0, sum(node.num_workers for node in cluster.nodes if node.stage == 0))
    node_of = {
        firsts[node.stage] + replica: node for node in cluster.nodes for replica in cluster.replicas_of(node)
    }
    total = 0.0
    for a, b in itertools.permutations(node_of, 2):
        first, second = paths[node_of[a].node_id], paths[node_of[b].node_id]
        if node_of[a] is not node_of[b]:
            shared = [x == y for x, y in zip(first, second, strict=True)]
            total += traffic[a, b] * (4 - [*shared, False].index(False))
    return total


def orders(cluster):
    """Every order that keeps each place's stage and number of workers."""
    for nodes in itertools.permutations(cluster.nodes):
        kinds = [(node.stage, node.num_workers) for node in nodes]
        if kinds == [(node.stage, node.num_workers) for node in cluster.nodes]:
            yield replace(cluster, nodes=nodes)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_order_of_the_nodes_of_a_stage_is_nearer(seed):
    random = np.random.default_rng(seed)
    cluster = make_cluster([[2, 1, 1], [1, 1, 1, 1]] if seed % 2 else [[1, 1, 1], [2, 2, 2]])
    paths = paths_of(cluster, random.choice(list("abc"), len(cluster.nodes)).tolist())
    traffic = traffic_of(cluster)

    ordered = near_order(cluster, paths, traffic)

    best = min(bytes_times_hops(other, paths, traffic) for other in orders(cluster))
    assert bytes_times_hops(ordered, paths, traffic) == pytest.approx(best)
    assert [(n.stage, n.num_workers) for n in ordered.nodes] == [
        (n.stage, n.num_workers) for n in cluster.nodes
    ]


def test_replicas_of_adjacent_stages_that_exchange_rows_stand_below_one_switch():
    cluster = make_cluster([[1, 1, 1], [1, 1, 1]])
    paths = paths_of(cluster, "abccab")

    ordered = near_order(cluster, paths, traffic_of(cluster))

    for replica in range(3):
        sender, receiver = ordered.node_of(0, replica), ordered.node_of(1, replica)
        assert paths[sender.node_id] == paths[receiver.node_id]


def test_the_rendezvous_is_the_most_central_machine_that_is_not_on_spot():
    on_demand = dict.fromkeys([(0, 1), (1, 0)], Market.ON_DEMAND)
    cluster = make_cluster([[1, 1, 1], [1, 1, 1]], on_demand)

    ordered = near_order(cluster, paths_of(cluster, "aabbbb"), traffic_of(cluster))

    assert ordered.rendezvous == f"10.0.1.0:{PORT}"


def test_where_no_machine_is_on_demand_the_most_central_one_is_taken():
    cluster = make_cluster([[1, 1], [1]])

    assert near_order(cluster, paths_of(cluster, "abb"), traffic_of(cluster)).rendezvous == f"10.0.0.1:{PORT}"


def test_an_order_that_nothing_betters_stays():
    cluster = make_cluster([[1, 1, 1], [1, 1, 1]], {(0, 0): Market.ON_DEMAND})

    for switches in ("aaaaaa", "abcabc"):
        assert near_order(cluster, paths_of(cluster, switches), traffic_of(cluster)) == cluster


def test_a_machine_of_which_nothing_is_known_is_far_from_all():
    assert network_hops([("core", "a"), (), ("core", "a"), ()]).tolist() == [
        [0, 3, 1, 3],
        [3, 0, 3, 3],
        [1, 3, 0, 3],
        [3, 3, 3, 0],
    ]


def test_counts_boundary_ring_and_exchange_by_hand():
    stages = [Stage(0, 0, "cpu", 2), Stage(1, 1, "gpu", 3)]

    traffic = plan_traffic(GRAPH, stages, batch_size=12, num_microbatches=2)

    # Of 6 rows in a micro-batch a core has 3 and a card 2: 0-1 | 2 3 | 4-5. Two micro-batches, 10 bytes a row.
    assert traffic[:2, 2:].tolist() == [[40, 20, 0], [0, 20, 40]]
    assert (traffic[2:, :2] == traffic[:2, 2:].T).all()
    # Each core looks 6 of 12 samples up, half of whose 18 bytes the other owns; gradients go the other way.
    assert traffic[:2, :2].tolist() == [[0, 108], [108, 0]]
    # A ring of three: 2 * 2/3 * 600 from each to the next.
    assert traffic[2:, 2:].tolist() == [[0, 800, 0], [0, 0, 800], [800, 0, 0]]


def test_a_ring_of_two_carries_the_tensor_each_way_and_one_rank_nothing():
    pair = plan_traffic(GRAPH, [Stage(0, 1, "gpu", 2)], batch_size=1, num_microbatches=1)
    alone = plan_traffic(GRAPH, [Stage(0, 1, "gpu", 1)], batch_size=1, num_microbatches=1)

    exchanged_bytes = 2 * 18 / 4
    assert pair.tolist() == [[0, 600 + exchanged_bytes], [600 + exchanged_bytes, 0]]
    assert alone.tolist() == [[0]]


@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(512, 4), (7, 3), (100, 1)])
def test_all_rows_cross_the_boundary_once_each_way(batch_size, num_microbatches):
    stages = [Stage(0, 0, "cpu", 5), Stage(1, 1, "gpu", 3)]

    traffic = plan_traffic(GRAPH, stages, batch_size=batch_size, num_microbatches=num_microbatches)

    assert np.sum(traffic[:5, 5:]) == 10 * batch_size


def test_refuses_stages_that_leave_layers_out():
    with pytest.raises(ConfigurationError, match="end at 0"):
        plan_traffic(GRAPH, [Stage(0, 0, "cpu", 1)], batch_size=1, num_microbatches=1)
