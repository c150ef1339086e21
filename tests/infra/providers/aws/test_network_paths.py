from types import SimpleNamespace

from tests.infra.builders import offer, plan


def cluster_of(num_nodes):
    return SimpleNamespace(
        nodes=[SimpleNamespace(node_id=f"n{i}", provider_instance_id=f"i-{i}") for i in range(num_nodes)]
    )


def test_network_nodes_of_launched_machines_are_given_from_the_top_down(provider, wire, launch):
    cluster = launch(plan(offer(), offer(), offer()))
    first, second, _ = (node.provider_instance_id for node in cluster.nodes)
    # EC2 tells nothing of some types of instances, or an empty list.
    wire.network_nodes = {first: ["nn-1", "nn-2", "nn-3"], second: []}

    assert provider.network_paths(cluster) == {"stage0-node0": ("nn-1", "nn-2", "nn-3")}


def test_no_more_than_a_hundred_machines_are_asked_for_at_once(provider, wire):
    wire.network_nodes = {f"i-{index}": ["nn-1"] for index in range(101)}

    assert len(provider.network_paths(cluster_of(101))) == 101
    asked = wire.of("DescribeInstanceTopology")
    assert [sum(name.startswith("InstanceId.") for name in request) for request in asked] == [100, 1]
