import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import UnknownNameError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.profiling.profiles.layer_profile import Link
from heterps_core.topology.device_paths import device_paths
from heterps_core.topology.machine_topology import LinkType, TopologyDevice
from heterps_core.topology.published_topology import topology_of_cluster, topology_of_plan
from heterps_core.topology.topology_file import topology_from_json, topology_to_json

CORES, CARDS = DEVICE_TYPES["cpu-r6in"], DEVICE_TYPES["gpu-t4"]


def node(node_id, *, stage, device_type, num_workers):
    return Node(
        node_id=node_id,
        address=f"10.0.0.{stage}",
        device_type=device_type,
        instance_type="some.large",
        market=Market.SPOT,
        stage=stage,
        num_workers=num_workers,
        price_usd_per_hour=1.0,
        provider_instance_id=f"i-{node_id}",
    )


def cluster(*nodes):
    return Cluster(
        run_id="r", provider="local", nodes=nodes, rendezvous="h:1", created_at="2026-07-20T00:00:00+00:00"
    )


TWO_STAGES = cluster(
    node("a", stage=0, device_type="cpu-r6in", num_workers=3),
    node("b", stage=1, device_type="gpu-t4", num_workers=2),
)


def test_each_worker_of_a_run_is_a_device_and_each_node_a_machine():
    first, second = topology_of_cluster(TWO_STAGES).machines

    assert (first.hostname, first.address) == ("a", "10.0.0.0")
    assert [device.type for device in first.devices] == [TopologyDevice.CPU] * 3 + [TopologyDevice.NIC]
    assert [device.global_id for device in second.devices] == [4, 5, 6]
    assert [device.model for device in second.devices] == ["gpu-t4", "gpu-t4", ""]
    assert second.devices[0].single_precision_flops_per_s == CARDS.peak_fp32_flops_per_s


def test_published_bandwidths_stand_where_nothing_was_measured():
    paths = device_paths(topology_of_cluster(TWO_STAGES))

    assert paths.bandwidth_bytes_per_s[0, 1] == CORES.memory_bandwidth_bytes_per_s / 2
    assert paths.bandwidth_bytes_per_s[3, 4] == 12e9
    # A core has less of the network than a card.
    assert paths.bandwidth_bytes_per_s[0, 3] == CORES.network_bandwidth_bytes_per_s
    assert paths.latency_seconds[0, 3] == 28e-6


def test_measured_links_go_before_published_ones():
    topology = topology_of_cluster(
        TWO_STAGES,
        machine_link=Link(latency_seconds=1e-6, bandwidth_bytes_per_s=7e9),
        network_link=Link(latency_seconds=2e-6, bandwidth_bytes_per_s=3e9),
    )

    paths = device_paths(topology)
    assert (paths.bandwidth_bytes_per_s[0, 1], paths.latency_seconds[0, 1]) == (7e9, 1e-6)
    assert (paths.bandwidth_bytes_per_s[0, 4], paths.latency_seconds[0, 4]) == (3e9, 2e-6)
    network = [found for found in topology.links() if found.type is LinkType.NET]
    # The NIC carries the two workers of the smaller machine at once.
    assert [found.bandwidth_bytes_per_s for found in network] == [6e9, 6e9]


def test_a_plan_and_the_run_that_it_becomes_have_the_same_topology():
    offer = InstanceOffer(
        instance_type=InstanceType(
            name="some.large",
            vcpus=4,
            memory_bytes=1,
            accelerator_name=None,
            accelerator_count=0,
            accelerator_memory_bytes_each=0,
            network_bandwidth_bytes_per_s=0.0,
        ),
        region="r",
        zone=None,
        market=Market.SPOT,
        price_usd_per_hour=1.0,
        price_as_of="2026-07-20",
        price_source="made up",
    )
    plan = ProvisioningPlan(
        replicas=(3,),
        groups=(InstanceGroup(stage=0, device_type="cpu-r6in", offer=offer, count=2, units_per_instance=2),),
        planned_price_usd_per_hour=1.0,
    )

    planned = topology_of_plan(plan)

    assert [len(machine.devices) for machine in planned.machines] == [3, 2]
    launched = topology_of_cluster(
        cluster(
            node("stage0-node0", stage=0, device_type="cpu-r6in", num_workers=2),
            node("stage0-node1", stage=0, device_type="cpu-r6in", num_workers=1),
        )
    )
    assert list(planned.devices()) == list(launched.devices())
    assert list(planned.links()) == list(launched.links())


def test_goes_through_the_file():
    topology = topology_of_cluster(TWO_STAGES)

    document = topology_to_json(topology)

    assert topology_to_json(topology_from_json(document)) == document


def test_refuses_a_type_without_figures():
    with pytest.raises(UnknownNameError, match="tpu"):
        topology_of_cluster(cluster(node("a", stage=0, device_type="tpu", num_workers=1)))
