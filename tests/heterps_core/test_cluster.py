import json
from dataclasses import replace

import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market


def node(node_id: str, *, stage: int, num_workers: int, price_usd_per_hour: float = 0.5) -> Node:
    return Node(
        node_id=node_id,
        address="127.0.0.1",
        device_type="cpu-c7i",
        instance_type="c7i.xlarge",
        market=Market.ON_DEMAND,
        stage=stage,
        num_workers=num_workers,
        price_usd_per_hour=price_usd_per_hour,
        provider_instance_id=f"i-{node_id}",
    )


def cluster(*nodes: Node) -> Cluster:
    return Cluster(
        run_id="r1",
        provider="local",
        nodes=nodes,
        rendezvous="127.0.0.1:1",
        created_at="2026-07-20T00:00:00+00:00",
    )


def test_the_price_is_that_of_all_nodes():
    described = cluster(
        node("a", stage=0, num_workers=2),
        node("b", stage=0, num_workers=1),
        node("c", stage=1, num_workers=4),
    )

    assert described.price_usd_per_hour == 1.5


def test_comes_back_from_its_json_form():
    written = cluster(node("a", stage=0, num_workers=2))

    assert Cluster.from_json(json.loads(json.dumps(written.to_json()))) == written


def test_refuses_another_schema_version():
    document = cluster(node("a", stage=0, num_workers=2)).to_json() | {"schema_version": 2}

    with pytest.raises(ConfigurationError, match="schema_version: must be 1, got 2"):
        Cluster.from_json(document)


def test_refuses_two_nodes_of_one_name():
    with pytest.raises(ConfigurationError, match="node ids must be unique"):
        cluster(node("a", stage=0, num_workers=1), node("a", stage=1, num_workers=1))


def test_refuses_a_stage_on_cards_and_cores():
    card = replace(node("b", stage=1, num_workers=1), device_type="gpu-t4")

    cluster(node("a", stage=0, num_workers=1), card)
    with pytest.raises(ConfigurationError, match="all on cores, got cpu-c7i, gpu-t4 for stage 1"):
        cluster(node("a", stage=1, num_workers=1), card)


def test_refuses_no_nodes():
    with pytest.raises(ConfigurationError, match="at least one node"):
        cluster()


def test_the_next_generation_keeps_the_order_of_nodes_and_counts_replicas_anew():
    following = cluster(
        node("b", stage=0, num_workers=1),
        node("c", stage=1, num_workers=4),
    ).next_generation({"b": node("d", stage=0, num_workers=1)})

    assert [each.node_id for each in following.nodes] == ["d", "c"]
    assert following.replicas_of(following.nodes[0]) == range(1)
    assert following.generation == 2
