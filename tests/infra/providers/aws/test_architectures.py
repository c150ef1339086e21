"""A plan may mix machines of both architectures: each boots an image of its own."""

from itertools import islice

import pytest

from heterps_core.errors import ProvisioningError
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from infra.checks import CheckState
from infra.ledger.ledger import EntryState
from infra.providers.aws import queries
from infra.providers.aws.access_checks import access_checks
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.provider import AwsEc2Provider
from tests.infra.builders import offer, plan
from tests.infra.providers.aws.test_fleet import values


def mixed_plan():
    """Tables on Graviton4, and layers on an x86 processor."""
    offers = {"cpu-c8g": offer("c8g.large", price_usd_per_hour=0.08), "cpu-c7i": offer()}
    groups = tuple(
        InstanceGroup(stage=stage, device_type=name, offer=each, count=2, units_per_instance=1)
        for stage, (name, each) in enumerate(offers.items())
    )
    return ProvisioningPlan(replicas=(2, 2), groups=groups, planned_price_usd_per_hour=0.34)


@pytest.fixture
def arm_image(server):
    return server.add_arm_image()


def template_by_name(client):
    templates = client.describe_launch_templates()["LaunchTemplates"]
    return {
        each["LaunchTemplateName"]: client.describe_launch_template_versions(
            LaunchTemplateId=each["LaunchTemplateId"]
        )["LaunchTemplateVersions"][0]["LaunchTemplateData"]
        for each in templates
    }


def test_each_machine_of_a_mixed_plan_boots_the_image_of_its_architecture(launch, client, server, arm_image):
    x86_image = client.describe_images(
        Owners=["self"], Filters=[{"Name": "name", "Values": ["heterps-node-1"]}]
    )["Images"][0]["ImageId"]

    cluster = launch(mixed_plan())

    images = {each["InstanceType"]: each["ImageId"] for each in server.instances()}
    assert images == {"c8g.large": arm_image, "c7i.large": x86_image}
    assert [node.instance_type for node in cluster.nodes] == ["c8g.large"] * 2 + ["c7i.large"] * 2
    assert len({node.zone for node in cluster.nodes}) == 1


def test_both_templates_have_the_run_in_common_and_end_with_it(launch, client, provider, wire, arm_image):
    launch(mixed_plan())

    templates = template_by_name(client)
    assert set(templates) == {"heterps-default-r1", "heterps-default-r1/arm64"}
    x86, arm = templates["heterps-default-r1"], templates["heterps-default-r1/arm64"]
    assert arm["ImageId"] == arm_image
    assert (arm["UserData"], arm["SecurityGroupIds"]) == (x86["UserData"], x86["SecurityGroupIds"])
    used = [values(request, "LaunchTemplateName") for request in wire.of("CreateFleet")]
    assert used == [["heterps-default-r1"], ["heterps-default-r1/arm64"]]

    provider.terminate("r1")
    assert template_by_name(client) == {}


@pytest.mark.usefixtures("arm_image")
def test_a_mixed_plan_that_is_launched_again_buys_nothing(launch, client, wire):
    first = launch(mixed_plan())

    again = launch(mixed_plan(), provider=AwsEc2Provider(client))

    assert again.nodes == first.nodes
    assert len(wire.of("CreateFleet")) == 2


def test_a_mixed_plan_without_an_arm_image_buys_nothing_and_names_the_command(launch, wire, server, ledger):
    with pytest.raises(ProvisioningError, match=r"arm64 nodes need .* --name heterps-node-arm64"):
        launch(mixed_plan())

    assert wire.of("CreateFleet") == wire.of("CreateLaunchTemplate") == []
    assert server.instances() == []
    assert {entry.state for entry in ledger.entries()} == {EntryState.FAILED}


def test_a_plan_of_x86_machines_needs_no_arm_image(launch, client):
    launch(plan())

    assert set(template_by_name(client)) == {"heterps-default-r1"}


@pytest.mark.parametrize("region_has_images", [True, False], ids=["an x86 image", "no image"])
def test_the_doctor_notes_a_missing_image_where_the_other_architecture_has_one(
    server, client, monkeypatch, region_has_images
):
    if not region_has_images:
        monkeypatch.setattr(queries, "IMAGE_NAME_PATTERN", "no-such-*")

    _, x86, arm = islice(access_checks(MachineSettings(), client_of=lambda service: client), 3)

    expected = (CheckState.OK, CheckState.NOTE) if region_has_images else (CheckState.MISSING,) * 2
    assert (x86.state, arm.state) == expected
    assert "aws ec2 create-image --region us-east-1 --instance-id ID" in arm.fix


def test_the_environment_names_an_image_of_each_architecture():
    machines = MachineSettings.of_environment({"HETERPS_AWS_IMAGE": "ami-1  ami-2"})

    assert machines.image_ids == ("ami-1", "ami-2")
    assert MachineSettings.of_environment({}).image_ids == ()
