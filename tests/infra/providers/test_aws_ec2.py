import base64
import subprocess
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from heterps_core.errors import ProvisioningError
from heterps_core.hardware import Market
from infra.billing import bill_for_run
from infra.ledger import EndReason, EntryState, Ledger
from infra.providers import ProviderSettings, get_provider
from infra.providers.aws_ec2 import LEASE_TAG, AwsEc2Provider, newest_image, terminate_one
from infra.sweeper import sweep
from tests.infra.builders import REGION, bootstrap, moto_ec2, offer, plan


@pytest.fixture(scope="module")
def environment():
    with moto_ec2() as variables:
        yield variables


@pytest.fixture
def client(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return boto3.client("ec2")


@pytest.fixture
def provider(client):
    return AwsEc2Provider(client)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


@pytest.fixture
def run_id():
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def requests(client):
    """The launch calls as boto3 was given them."""
    sent = []
    client.meta.events.register(
        "provide-client-params.ec2.RunInstances", lambda params, **_: sent.append(params)
    )
    return sent


def launch(provider, ledger, run_id, launch_plan=None):
    return provider.launch(
        launch_plan or plan(),
        run_id=run_id,
        lease_until=datetime.now(UTC) + timedelta(minutes=10),
        bootstrap=bootstrap(Path("/srv/heterps/run"), ("-m", "heterps_core.training.node")),
        ledger=ledger,
    )


def refuse(client, code: str, *, from_call: int):
    """Let the launch calls from the given one on (counted from 1) fail with an error code of EC2."""
    calls = []

    def answer(**_):
        calls.append(1)
        if len(calls) >= from_call:
            raise ClientError({"Error": {"Code": code, "Message": "as the test wants it"}}, "RunInstances")

    client.meta.events.register("before-call.ec2.RunInstances", answer)


def test_tags_lease_token_and_protection_are_in_the_launch_call(provider, client, ledger, run_id, requests):
    cluster = launch(provider, ledger, run_id)

    tags = {tag["Key"]: tag["Value"] for tag in requests[1]["TagSpecifications"][0]["Tags"]}
    assert tags["heterps:run-id"] == run_id
    assert tags["heterps:stage"] == "1"
    assert datetime.fromisoformat(tags["heterps:lease-until"]) > datetime.now(UTC)
    assert run_id in tags["Name"]
    assert len({request["ClientToken"] for request in requests}) == 2
    instance_id = cluster.nodes[0].provider_instance_id
    attribute = client.describe_instance_attribute(
        InstanceId=instance_id, Attribute="instanceInitiatedShutdownBehavior"
    )
    assert attribute["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    described = client.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]
    assert described["MetadataOptions"]["HttpTokens"] == "required"
    assert "KeyName" not in described


def test_image_subnet_and_profile_are_those_that_were_given(client, ledger, run_id, requests):
    subnet = client.describe_subnets()["Subnets"][0]["SubnetId"]
    image = client.describe_images()["Images"][0]["ImageId"]
    boto3.client("iam").create_instance_profile(InstanceProfileName="heterps-node")
    provider = AwsEc2Provider(client, image_id=image, subnet_id=subnet, instance_profile="heterps-node")

    launch(provider, ledger, run_id)

    assert {request["ImageId"] for request in requests} == {image}
    assert {request["SubnetId"] for request in requests} == {subnet}
    assert [request["IamInstanceProfile"] for request in requests] == [{"Name": "heterps-node"}] * 2


def test_user_data_is_the_bootstrap_script_with_the_node_written_in(
    provider, client, ledger, run_id, tmp_path
):
    cluster = launch(provider, ledger, run_id)
    answer = client.describe_instance_attribute(
        InstanceId=cluster.nodes[1].provider_instance_id, Attribute="userData"
    )
    script = base64.b64decode(answer["UserData"]["Value"]).decode()

    assert script.startswith("#!/usr/bin/env bash\nexport HETERPS_LIFETIME_S=100\n")
    assert "export HETERPS_NODE_ID=stage1-node0\n" in script
    assert f"export HETERPS_RUN_ID={run_id}\n" in script
    assert "set -- -m heterps_core.training.node\n" in script
    assert len(script.encode()) < 16_384  # the limit of EC2
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_instance_sets_its_shutdown_clock_before_anything_else(
    provider, client, ledger, run_id, tmp_path
):
    """The user data as boto3 sent it, run with commands that write down how they were called."""
    cluster = launch(provider, ledger, run_id)
    answer = client.describe_instance_attribute(
        InstanceId=cluster.nodes[0].provider_instance_id, Attribute="userData"
    )
    calls = tmp_path / "calls"
    for name in ("shutdown", "python"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho "{name} $@" >> {calls}\n')
        tool.chmod(0o755)
    script = base64.b64decode(answer["UserData"]["Value"]).decode()
    lines = [
        f"export HETERPS_PYTHON={tmp_path}/python" if line.startswith("export HETERPS_PYTHON=") else line
        for line in script.replace("/srv/heterps/run", str(tmp_path / "run")).splitlines()
    ]

    subprocess.run(["bash", "-c", "\n".join(lines)], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})

    called = calls.read_text().splitlines()
    assert called[0] == "shutdown -P +2"  # 100 s, rounded up to minutes
    assert called[-1] == "python -m heterps_core.training.node"
    assert (tmp_path / "run" / "nodes" / "stage0-node0" / "booted").exists()


def test_the_same_plan_under_the_same_run_is_bought_once(provider, client, ledger, run_id, requests):
    launch(provider, ledger, run_id)
    again = launch(AwsEc2Provider(client), ledger, run_id)

    # moto ignores client tokens: not even a second request may go out.
    assert len(requests) == 2
    assert len(again.nodes) == 2


def test_a_spot_offer_is_asked_for_once_and_without_a_price(provider, ledger, run_id, requests):
    launch(provider, ledger, run_id, plan(offer(market=Market.SPOT)))

    assert requests[0]["InstanceMarketOptions"] == {
        "MarketType": "spot",
        "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
    }


def test_the_rendezvous_is_not_on_spot_where_that_can_be(provider, ledger, run_id):
    mixed = plan(offer(market=Market.SPOT), offer("c7i.xlarge", price_usd_per_hour=0.17))

    cluster = launch(provider, ledger, run_id, mixed)

    assert cluster.rendezvous == f"{cluster.nodes[1].address}:29400"


def test_a_launch_that_fails_half_way_ends_what_was_had_and_bills_it_as_waste(
    provider, client, ledger, run_id
):
    refuse(client, "InsufficientInstanceCapacity", from_call=2)

    with pytest.raises(
        ProvisioningError, match=r"launch c7i\.xlarge for stage1-node0: Insuff.*another instance"
    ):
        launch(provider, ledger, run_id)

    assert provider.list_instances(run_id) == ()
    first, second = ledger.entries(run_id=run_id)
    assert (first.state, first.reason) == (EntryState.ENDED, EndReason.LAUNCH_FAILED)
    assert second.state is EntryState.FAILED
    assert "InsufficientInstanceCapacity" in second.reason
    bill = bill_for_run(provider, run_id, ledger=ledger, now=datetime.now(UTC))
    assert bill.waste_usd == bill.total_usd == pytest.approx(0.09 * 60 / 3600)  # a minute at least


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        ("VcpuLimitExceeded", "Service Quotas"),
        ("UnauthorizedOperation", "IAM policy"),
        ("ExpiredToken", "renew the credentials"),
        ("SomethingNew", "Error codes"),
    ],
)
def test_every_refusal_comes_with_a_way_out(provider, client, ledger, run_id, code, way_out):
    refuse(client, code, from_call=1)

    with pytest.raises(ProvisioningError, match=f"{code}: as the test wants it; .*{way_out}"):
        launch(provider, ledger, run_id)


def test_missing_credentials_are_named_with_what_to_do(environment, monkeypatch, ledger, run_id, tmp_path):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    provider = get_provider("aws", ProviderSettings(state_directory=tmp_path, region=REGION))

    with pytest.raises(ProvisioningError, match=r"credentials are needed.* or use the provider local"):
        launch(provider, ledger, run_id)

    assert ledger.entries() == ()


def test_one_instance_that_cannot_be_ended_does_not_keep_the_others(provider, client, ledger, run_id):
    cluster = launch(provider, ledger, run_id)
    stubborn = cluster.nodes[0].provider_instance_id

    def answer(model, params, **_):
        if stubborn in params["body"].values():
            raise ClientError(
                {"Error": {"Code": "RequestLimitExceeded", "Message": "slow"}}, "TerminateInstances"
            )

    client.meta.events.register("before-call.ec2.TerminateInstances", answer)
    with pytest.raises(ProvisioningError, match=f"terminate {stubborn}: RequestLimitExceeded"):
        provider.terminate(run_id)
    assert [i.provider_instance_id for i in provider.list_instances(run_id)] == [stubborn]

    client.meta.events.unregister("before-call.ec2.TerminateInstances", answer)
    assert provider.terminate(run_id)[0] == stubborn
    assert provider.list_instances(run_id) == ()


def test_ending_an_instance_that_never_was_is_no_error(client):
    assert terminate_one(client, "i-0123456789abcdef0") is False


@pytest.mark.parametrize("lease", ["tomorrow", "", "2026-07-20T00:00:00"])  # the last has no time zone
def test_an_unreadable_lease_counts_as_expired(provider, client, ledger, run_id, lease):
    cluster = launch(provider, ledger, run_id, plan(offer()))
    instance_id = cluster.nodes[0].provider_instance_id
    client.create_tags(Resources=[instance_id], Tags=[{"Key": LEASE_TAG, "Value": lease}])

    swept = sweep(provider, now=datetime.now(UTC), ledger=ledger)

    assert (instance_id, EndReason.LEASE_UNREADABLE) in [(m.provider_instance_id, m.reason) for m in swept]
    assert provider.list_instances(run_id) == ()


def test_the_newest_own_image_is_taken(client):
    newer = client.register_image(Name="heterps-other-2", Architecture="x86_64", RootDeviceName="/dev/sda1")

    assert newest_image(client, "heterps-other-*") == newer["ImageId"]


def test_says_which_image_is_missing(client):
    with pytest.raises(ProvisioningError, match=f"none in {REGION} whose name matches no-such-"):
        newest_image(client, "no-such-*")


def test_refuses_offers_of_another_region(provider, ledger, run_id):
    with pytest.raises(ProvisioningError, match="launched in, us-east-1, but some are of eu-west-1"):
        launch(provider, ledger, run_id, plan(offer(region="eu-west-1")))


def test_refuses_a_run_id_whose_machines_were_ended(provider, client, ledger, run_id):
    """EC2 answers a client token of an ended instance with that instance."""
    launch(provider, ledger, run_id, plan(offer()))
    provider.terminate(run_id)

    def answer_with_the_ended(parsed, **_):
        parsed["Instances"][0]["State"]["Name"] = "terminated"

    client.meta.events.register("after-call.ec2.RunInstances", answer_with_the_ended)
    with pytest.raises(ProvisioningError, match=r"launched and ended before .* use a new run id"):
        launch(AwsEc2Provider(client), ledger, run_id, plan(offer()))
