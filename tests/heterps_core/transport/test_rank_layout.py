"""Ranks find their stage by the node that they run on."""

import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from heterps_core.transport.rank_layout import WorkerPlace, fingerprint, layout_from_places


def make_node(node_id: str, stage: int, num_workers: int) -> Node:
    return Node(
        node_id=node_id,
        address="127.0.0.1",
        device_type="cpu",
        instance_type="local",
        market=Market.ON_DEMAND,
        stage=stage,
        num_workers=num_workers,
        price_usd_per_hour=0.1,
        provider_instance_id="1",
    )


CLUSTER = Cluster(
    run_id="r",
    provider="local",
    nodes=(make_node("a", 0, 2), make_node("b", 0, 1), make_node("c", 1, 1)),
    rendezvous="127.0.0.1:1",
    created_at="2026-11-21T00:00:00+00:00",
)


def come(*places: tuple[str, int]) -> list[WorkerPlace]:
    return [WorkerPlace(node_id, slot, "0123456789ab") for node_id, slot in places]


def test_workers_may_have_ranks_in_any_order():
    places = come(("c", 0), ("a", 1), ("b", 0), ("a", 0))

    layout = layout_from_places(CLUSTER, places, (3, 1))

    assert layout.ranks == ((3, 1, 2), (0,))
    assert layout.position(2) == (0, 2)
    assert layout.position(0) == (1, 0)


@pytest.mark.parametrize("replicas", [(2, 1), (3, 2)])
def test_workers_that_do_not_fit_the_plan_are_refused(replicas):
    with pytest.raises(ConfigurationError, match="must be those of the plan"):
        layout_from_places(CLUSTER, come(("c", 0), ("a", 1), ("b", 0), ("a", 0)), replicas)


def test_a_missing_worker_is_noticed():
    with pytest.raises(ConfigurationError, match="3 workers joined"):
        layout_from_places(CLUSTER, come(("c", 0), ("a", 1), ("b", 0)), (3, 1))


def test_workers_with_different_jobs_are_named_with_what_each_has():
    first, second = ({"batch_size": size, "seed": 0} for size in (64, 128))
    places = come(("c", 0), ("a", 1), ("b", 0), ("a", 0))
    places = [place._replace(fingerprint=fingerprint(first)) for place in places]
    places[2] = places[2]._replace(fingerprint=fingerprint(second))

    with pytest.raises(ConfigurationError) as refusal:
        layout_from_places(CLUSTER, places, (3, 1))

    assert f"worker 0 on node c has {fingerprint(first)}" in str(refusal.value)
    assert f"worker 2 on node b has {fingerprint(second)}" in str(refusal.value)


def test_a_fingerprint_does_not_depend_on_the_order_of_fields():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
