from dataclasses import replace
from datetime import UTC, datetime

import pytest
from botocore.exceptions import ReadTimeoutError

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from infra.billing.bill import bill_for_run
from infra.ledger.ledger import EndReason, EntryState
from infra.providers.aws import queries
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.provider import AwsEc2Provider
from tests.infra.builders import offer, plan
from tests.infra.faults import unlike_plan
from tests.infra.moto_ec2 import Wire

ZONES = 6
"""Of moto's default network in us-east-1."""


def values(request, ending):
    return [value for key, value in request.items() if key.endswith(ending)]


def tags_of(instance):
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}


def test_equal_nodes_are_one_request_that_is_all_or_nothing_in_one_zone(launch, wire):
    cluster = launch(unlike_plan(Market.ON_DEMAND))

    assert len(cluster.nodes) == 4
    cards, processors = wire.of("CreateFleet")
    assert (cards["Type"], cards["TargetCapacitySpecification.TotalTargetCapacity"]) == ("instant", "2")
    assert cards["OnDemandOptions.MinTargetCapacity"] == "2"
    assert cards["OnDemandOptions.SingleInstanceType"] == "true"
    assert cards["OnDemandOptions.SingleAvailabilityZone"] == "true"
    assert cards["ClientToken"] != processors["ClientToken"]
    # The scarce one goes first, to any zone; the other has two types to choose from, in the zone of the first.
    assert values(cards, ".InstanceType") == ["g4dn.xlarge"] * ZONES
    assert values(processors, ".InstanceType") == ["c7i.large", "m7i.large"]
    assert len(set(values(cards, "SubnetId"))) == ZONES
    assert len(set(values(processors, "SubnetId"))) == 1


def test_spot_is_asked_for_by_price_and_capacity_without_a_highest_price(launch, wire):
    launch(plan(offer(market=Market.SPOT)))

    (request,) = wire.of("CreateFleet")
    assert request["SpotOptions.AllocationStrategy"] == "price-capacity-optimized"
    assert request["SpotOptions.MinTargetCapacity"] == "1"
    assert request["TargetCapacitySpecification.DefaultTargetCapacityType"] == "spot"
    assert not [key for key in request if "Price" in key]


def test_each_of_many_machines_is_one_node_one_entry_and_few_calls(launch, wire, ledger, server):
    group = InstanceGroup(stage=0, device_type="cpu-c7i", offer=offer(), count=40, units_per_instance=1)
    many = ProvisioningPlan(replicas=(40,), groups=(group,), planned_price_usd_per_hour=3.6)

    cluster = launch(many)

    ids = [node.provider_instance_id for node in cluster.nodes]
    assert ids == sorted(instance["InstanceId"] for instance in server.instances())
    entries = {entry.node_id: entry.provider_instance_id for entry in ledger.entries()}
    assert entries == {node.node_id: node.provider_instance_id for node in cluster.nodes}
    assert len(wire.requests) < 10


def test_a_machine_carries_all_that_a_bill_needs(launch, server):
    launch(unlike_plan(Market.SPOT))

    tags = [tags_of(instance) for instance in server.instances()]

    processor = next(t for t in tags if t["heterps:stage"] == "0")
    assert processor["heterps:price/c7i.large"] == "0.09 2026-07-20 test"
    assert processor["heterps:price/m7i.large"] == "0.1 2026-07-20 test"
    assert (processor["heterps:device-type"], processor["heterps:market"]) == ("cpu-c7i", "spot")
    assert {t["heterps:run-id"] for t in tags} == {"r1"}
    assert all(t["heterps:intended-at"] and t["heterps:lease-until"] for t in tags)


def test_where_an_alternative_is_had_its_price_is_frozen(launch, wire, client, ledger):
    """moto takes the first override, so the plan's own offer is hidden from it."""

    def only_the_alternative(params, **_):
        (config,) = params["LaunchTemplateConfigs"]
        config["Overrides"] = [o for o in config["Overrides"] if o["InstanceType"] != "c7i.large"]

    client.meta.events.register("provide-client-params.ec2.CreateFleet", only_the_alternative)
    cluster = launch(unlike_plan(Market.ON_DEMAND))

    had = {(n.stage, n.instance_type, n.price_usd_per_hour) for n in cluster.nodes}
    assert had == {(0, "m7i.large", 0.1), (1, "g4dn.xlarge", 0.526)}
    frozen = {(e.stage, e.instance_type, e.price_usd_per_hour) for e in ledger.entries()}
    assert frozen == had


def test_the_same_plan_under_one_run_id_is_bought_once(launch, wire, client, ledger):
    first = launch()
    again = launch(provider=AwsEc2Provider(client))

    # moto ignores client tokens: not even a second request may go out.
    assert len(wire.of("CreateFleet")) == 2
    assert again.nodes == first.nodes
    assert len(ledger.entries()) == 2


def test_a_launch_that_is_repeated_before_ec2_shows_the_machines_has_the_same_tokens(
    launch, wire, client, server, monkeypatch, ledger
):
    launch()
    monkeypatch.setattr("infra.providers.aws.queries.live_instances", lambda *_: [])

    again = launch(provider=AwsEc2Provider(client))

    tokens = [request["ClientToken"] for request in wire.of("CreateFleet")]
    assert len(tokens) == 4
    assert tokens[:2] == tokens[2:]
    # To the letter: EC2 refuses a token with other parameters.
    first, second = wire.of("CreateFleet")[0], wire.of("CreateFleet")[2]
    assert first == second
    assert len(server.instances()) == len(again.nodes) == 2


def test_a_lost_answer_is_asked_for_again_under_the_same_token(server, ledger, launch):
    client = server.client(attempts=2)
    wire = Wire()

    def lose_the_first_fleet():
        if wire.requests[-1]["Action"] == "CreateFleet" and len(wire.of("CreateFleet")) == 1:
            raise ReadTimeoutError(endpoint_url="http://ec2")

    wire.after = lose_the_first_fleet
    wire.attach(client)

    cluster = launch(provider=AwsEc2Provider(client))

    assert len(wire.of("CreateFleet")) == 3
    assert len(cluster.nodes) == len(server.instances()) == 2


def test_where_the_zone_of_the_first_part_is_full_all_goes_to_another(launch, wire, provider, ledger, server):
    wire.refused_fleets = {1: "InsufficientInstanceCapacity"}

    cluster = launch()

    zones = {
        instance["State"]["Name"]: instance["Placement"]["AvailabilityZone"]
        for instance in server.instances()
    }
    assert zones.keys() == {"running", "terminated"}
    assert zones["running"] != zones["terminated"]
    assert len({i["Placement"]["AvailabilityZone"] for i in server.instances()}) == 2
    assert len(cluster.nodes) == len(provider.list_instances("r1")) == 2
    # What was had for nothing is in the bill, and so is what runs.
    states = sorted((entry.attempt, entry.stage, entry.state) for entry in ledger.entries())
    assert states == [
        (1, 0, EntryState.FAILED),
        (1, 1, EntryState.ENDED),
        (2, 0, EntryState.LAUNCHED),
        (2, 1, EntryState.LAUNCHED),
    ]
    bill = bill_for_run(provider, "r1", ledger=ledger, now=datetime.now(UTC))
    assert bill.failed_launches_usd == pytest.approx(0.17 * 60 / 3600)  # a minute at least


def test_a_plan_that_no_zone_can_serve_leaves_nothing_but_waste(launch, wire, provider, ledger):
    wire.refused_fleets = dict.fromkeys(range(1, 99), "UnfulfillableCapacity")

    with pytest.raises(
        ProvisioningError, match="UnfulfillableCapacity: as the test wants it; ask for another"
    ):
        launch()

    assert provider.list_instances("r1") == ()
    # Each second fleet request was refused, in one zone after the other.
    assert {entry.reason for entry in ledger.entries() if entry.state is EntryState.ENDED} == {
        EndReason.LAUNCH_FAILED
    }


def test_a_plan_bound_to_one_subnet_does_not_look_elsewhere(launch, wire, client):
    subnet = client.describe_subnets()["Subnets"][0]["SubnetId"]
    wire.refused_fleets = {1: "InsufficientInstanceCapacity"}

    with pytest.raises(ProvisioningError, match="InsufficientInstanceCapacity"):
        launch(provider=AwsEc2Provider(client, MachineSettings(subnet_ids=(subnet,))))

    assert len(wire.of("CreateFleet")) == 2


def test_an_offer_of_a_zone_is_launched_there_or_not_at_all(launch, wire, server, client):
    zoned = replace(offer(), zone="us-east-1c")
    cluster = launch(plan(zoned))
    assert len(cluster.nodes) == 1
    assert {i["Placement"]["AvailabilityZone"] for i in server.instances()} == {"us-east-1c"}

    subnet = client.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1a"]}])
    machines = MachineSettings(subnet_ids=(subnet["Subnets"][0]["SubnetId"],))
    with pytest.raises(
        ProvisioningError, match=r"launched in us-east-1c of vpc-.*whose zones are us-east-1a"
    ):
        launch(plan(zoned), provider=AwsEc2Provider(client, machines), run_id="r2")


def test_a_run_that_has_lost_a_machine_cannot_be_launched_again(launch, client, provider):
    cluster = launch(unlike_plan(Market.ON_DEMAND))
    client.terminate_instances(InstanceIds=[cluster.nodes[0].provider_instance_id])

    with pytest.raises(ProvisioningError, match=r"1 are left.*use a new run id"):
        launch(unlike_plan(Market.ON_DEMAND), provider=AwsEc2Provider(client))

    assert provider.list_instances("r1") == ()


def test_machines_that_ec2_does_not_show_in_time_are_ended(launch, wire, client, server, monkeypatch):
    monkeypatch.setattr(queries, "_with_ids", lambda *_: iter(()))

    with pytest.raises(ProvisioningError, match="EC2 must know its own instances i-"):
        launch()

    assert {instance["State"]["Name"] for instance in server.instances()} == {"terminated"}


def test_the_rendezvous_is_not_on_spot_where_that_can_be(launch):
    cluster = launch(plan(offer(market=Market.SPOT), offer("c7i.xlarge", price_usd_per_hour=0.17)))

    assert cluster.rendezvous == f"{cluster.nodes[1].address}:29400"


def test_what_was_launched_elsewhere_is_ended_also_before_ec2_shows_it(
    launch, wire, provider, server, monkeypatch
):
    wire.refused_fleets = {1: "InsufficientInstanceCapacity"}
    cluster = launch()
    monkeypatch.setattr("infra.providers.aws.queries.live_instances", lambda *_: [])

    ended = provider.terminate("r1")

    assert set(ended) == {node.provider_instance_id for node in cluster.nodes}
    assert {instance["State"]["Name"] for instance in server.instances()} == {"terminated"}
