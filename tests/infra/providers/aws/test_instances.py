"""Machines found, renewed, ended and charged, whatever became of their tags and of the ledger."""

from datetime import UTC, datetime, timedelta

import pytest
from botocore.exceptions import ClientError

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.sweeper import sweep
from infra.providers.aws import queries
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.aws.queries import find_images, find_network, terminate_all
from tests.infra.builders import offer, plan
from tests.infra.faults import unlike_plan
from tests.moto_server import REGION

SERVICES_USD_PER_HOUR = 40 * 0.08 / 730 + 0.005 + 0.001848
"""Of a machine: 40 GB of disk at 0.08 USD a month of 730 h, an address, heartbeats and looks at the lease."""

AFTER_LEASE = timedelta(minutes=11)
TAGS_GRACE = timedelta(minutes=5, seconds=1)


def test_one_instance_that_cannot_be_ended_does_not_keep_the_others(launch, provider, client):
    stubborn = launch().nodes[0].provider_instance_id

    def refuse(params, **_):
        if stubborn in params["body"].values():
            error = {"Error": {"Code": "RequestLimitExceeded", "Message": "slow"}}
            raise ClientError(error, "TerminateInstances")

    client.meta.events.register("before-call.ec2.TerminateInstances", refuse)
    with pytest.raises(ProvisioningError, match=f"terminate {stubborn}: RequestLimitExceeded"):
        provider.terminate("r1")
    assert [i.provider_instance_id for i in provider.list_instances("r1")] == [stubborn]

    client.meta.events.unregister("before-call.ec2.TerminateInstances", refuse)
    assert provider.terminate("r1")[0] == stubborn
    assert provider.list_instances("r1") == ()


def test_ending_an_instance_that_never_was_is_no_error(client):
    assert terminate_all(client, ["i-0123456789abcdef0"]) == ([], [])


def test_a_whole_run_is_renewed_and_ended_in_one_call_each(launch, provider, wire):
    launch(unlike_plan(Market.ON_DEMAND))
    provider.renew_lease("r1", until=datetime.now(UTC))
    provider.terminate("r1")

    assert len(wire.of("CreateTags")) == len(wire.of("TerminateInstances")) == 1


@pytest.mark.parametrize("lease", ["tomorrow", "", "2026-07-20T00:00:00"])  # the last has no time zone
def test_an_unreadable_lease_counts_as_expired(launch, provider, client, ledger, lease):
    instance_id = launch(plan(offer())).nodes[0].provider_instance_id
    client.create_tags(Resources=[instance_id], Tags=[{"Key": "heterps:lease-until", "Value": lease}])

    (swept,) = sweep(provider, now=datetime.now(UTC) + TAGS_GRACE, ledger=ledger)

    assert (swept.provider_instance_id, swept.reason) == (instance_id, EndReason.LEASE_UNREADABLE)
    assert provider.list_instances("r1") == ()


def test_a_lost_ledger_is_written_again_from_tags_alone(launch, provider, ledger, tmp_path):
    launch(unlike_plan(Market.SPOT))
    lost = ledger.entries()
    ledger.path.unlink()
    new = Ledger(tmp_path / "new.sqlite")

    now = datetime.now(UTC) + AFTER_LEASE
    swept = sweep(provider, now=now, ledger=new)

    found = new.entries()
    facts = ("run_id", "attempt", "provider", "stage", "device_type", "instance_type", "market", "region")
    prices = ("price_usd_per_hour", "price_as_of", "price_source", "provider_instance_id", "launched_at")

    def of(entries):
        return sorted(tuple(str(getattr(entry, name)) for name in (*facts, *prices)) for entry in entries)

    assert of(found) == of(lost)
    assert {entry.reason for entry in found} == {EndReason.LEASE_EXPIRED}
    # By hand: two cards and two processors, for as long as they lived, each with its disk and address.
    seconds = {entry.instance_type: (now - entry.launched_at).total_seconds() for entry in lost}
    card_usd, processor_usd = 0.526 + SERVICES_USD_PER_HOUR, 0.09 + SERVICES_USD_PER_HOUR
    usd = 2 * (seconds["g4dn.xlarge"] * card_usd + seconds["c7i.large"] * processor_usd) / 3600
    assert sum(machine.usd for machine in swept) == pytest.approx(usd, rel=1e-3)


def test_an_instance_whose_tags_come_late_lives_and_one_whose_tags_never_come_ends(
    launch, provider, client, ledger
):
    """DescribeInstances shows an instance by its id before the tags that it was launched with."""
    late, never = (node.provider_instance_id for node in launch().nodes)
    tags = client.describe_instances(InstanceIds=[late])["Reservations"][0]["Instances"][0]["Tags"]
    client.delete_tags(Resources=[late, never], Tags=[{"Key": tag["Key"]} for tag in tags])

    assert sweep(provider, now=datetime.now(UTC), ledger=ledger) == []

    client.create_tags(Resources=[late], Tags=[tag for tag in tags if not tag["Key"].startswith("aws:")])
    (swept,) = sweep(provider, now=datetime.now(UTC) + TAGS_GRACE, ledger=ledger)
    assert (swept.provider_instance_id, swept.reason) == (never, EndReason.LEASE_UNREADABLE)
    assert [instance.provider_instance_id for instance in provider.list_instances("r1")] == [late]


def test_an_instance_that_lost_its_tags_is_found_by_its_id_and_ended(launch, provider, client, ledger):
    """The tag index may lag or be wiped: what counts is the state of the instance."""
    instance_id = launch(plan(offer())).nodes[0].provider_instance_id
    described = client.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]
    client.delete_tags(Resources=[instance_id], Tags=[{"Key": tag["Key"]} for tag in described["Tags"]])
    assert provider.list_instances() == ()

    (swept,) = sweep(provider, now=datetime.now(UTC) + TAGS_GRACE, ledger=ledger)

    assert (swept.run_id, swept.reason) == ("r1", EndReason.LEASE_UNREADABLE)
    state = client.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]["State"]
    assert state["Name"] == "terminated"
    assert [entry.state for entry in ledger.entries()] == [EntryState.ENDED]


def test_an_instance_that_went_by_itself_is_charged_until_it_went(launch, provider, client, ledger, server):
    instance_id = launch(plan(offer())).nodes[0].provider_instance_id
    client.terminate_instances(InstanceIds=[instance_id])
    went_at = datetime.now(UTC)

    (swept,) = sweep(provider, now=went_at + timedelta(hours=5), ledger=ledger)

    assert swept.reason is EndReason.GONE
    (entry,) = ledger.entries()
    assert abs(entry.ended_at - went_at) < timedelta(seconds=2)
    assert swept.usd == pytest.approx((0.09 + SERVICES_USD_PER_HOUR) * 60 / 3600)  # a minute at least


def test_a_machine_that_cannot_be_ended_is_reported_and_left_to_the_next_sweep(
    launch, provider, client, ledger
):
    launch(plan(offer()))

    def refuse(**_):
        raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "TerminateInstances")

    client.meta.events.register("before-call.ec2.TerminateInstances", refuse)
    (left,) = sweep(provider, now=datetime.now(UTC) + AFTER_LEASE, ledger=ledger)
    assert "UnauthorizedOperation" in left.problem
    assert [entry.state for entry in ledger.entries()] == [EntryState.LAUNCHED]

    client.meta.events.unregister("before-call.ec2.TerminateInstances", refuse)
    (ended,) = sweep(provider, now=datetime.now(UTC) + AFTER_LEASE, ledger=ledger)
    assert ended.problem is None


def test_machines_of_another_workspace_are_left_alone(launch, server, ledger, tmp_path):
    launch(lease_s=-1.0)
    other = AwsEc2Provider(server.own_client, MachineSettings(workspace="others"))

    assert other.list_instances() == ()
    assert sweep(other, now=datetime.now(UTC), ledger=Ledger(tmp_path / "others.sqlite")) == []
    assert {i["State"]["Name"] for i in server.instances()} == {"running"}


def ids_of(images):
    return {architecture: image["ImageId"] for architecture, image in images.items()}


def test_the_newest_own_image_of_an_architecture_is_taken_or_the_named_one(client, server):
    first = client.describe_images(Owners=["self"])["Images"][0]["ImageId"]
    newer = client.register_image(Name="heterps-node-2", Architecture="x86_64", RootDeviceName="/dev/sda1")
    arm = server.add_arm_image()

    assert ids_of(find_images(client, ())) == {"x86_64": newer["ImageId"], "arm64": arm}
    assert ids_of(find_images(client, (first, arm))) == {"x86_64": first, "arm64": arm}
    assert ids_of(find_images(client, (first,))) == {"x86_64": first}


def test_ids_of_images_of_another_region_are_passed_over_and_without_one_here_refused(client):
    here, elsewhere = client.describe_images(Owners=["self"])["Images"][0]["ImageId"], "ami-0123456789abcdef0"

    assert ids_of(find_images(client, (here, elsewhere), needed=["x86_64"])) == {"x86_64": here}
    with pytest.raises(ProvisioningError, match=rf"names \({elsewhere}\) is one in {REGION}; add the id"):
        find_images(client, (elsewhere,), needed=["x86_64"])


def test_a_missing_image_is_reported_with_the_command_that_makes_or_names_it(client, monkeypatch):
    named = client.describe_images(Owners=["self"])["Images"][0]["ImageId"]

    (made,) = AwsEc2Provider(client).missing_images().values()
    assert f"none in {REGION} whose name matches heterps-node-*" in made
    assert f"aws ec2 create-image --region {REGION} --instance-id ID --name heterps-node-arm64" in made
    assert f"aws ec2 copy-image --region {REGION} --source-region REGION --source-image-id ID --name" in made
    (way_out,) = AwsEc2Provider(client, MachineSettings(image_ids=(named,))).missing_images().values()
    assert way_out.endswith(f"names ({named}) is one in {REGION}; add the id of an arm64 image there")
    monkeypatch.setattr(queries, "IMAGE_NAME_PATTERN", "no-such-*")
    assert AwsEc2Provider(client).missing_images().keys() == {"x86_64", "arm64"}


def test_an_account_without_a_default_network_is_reported_to_name_one(client):
    for subnet in client.describe_subnets()["Subnets"]:
        client.delete_subnet(SubnetId=subnet["SubnetId"])

    with pytest.raises(ProvisioningError, match="set HETERPS_AWS_SUBNETS"):
        find_network(client, None)
