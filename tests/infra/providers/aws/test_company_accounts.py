"""Accounts of companies: several subnets, a ready-made profile, demanded tags, refusals of the organisation."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from heterps_core.errors import ConfigurationError
from infra.providers.aws.errors import refusal
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.base import InsufficientCapacityError
from tests.infra.builders import offer, plan
from tests.infra.faults import BucketProvider
from tests.infra.moto_ec2 import Wire


def subnets_of(client, *zones):
    found = client.describe_subnets(Filters=[{"Name": "availability-zone", "Values": list(zones)}])["Subnets"]
    return [subnet["SubnetId"] for subnet in found]


def test_of_several_subnets_the_next_is_tried_where_a_zone_is_full(launch, client, server):
    names = subnets_of(client, "us-east-1a", "us-east-1c")
    wire = Wire(refused_fleets={1: "InsufficientInstanceCapacity"})
    wire.attach(client)
    settings = MachineSettings.of_environment({"HETERPS_AWS_SUBNETS": " ".join(names)})

    launch(provider=AwsEc2Provider(client, settings))

    used = {instance["State"]["Name"]: instance["SubnetId"] for instance in server.instances()}
    assert {used["running"], used["terminated"]} == set(names)


def test_an_offer_of_a_zone_without_a_subnet_lets_the_next_purchase_be_tried(launch, client):
    settings = MachineSettings(subnet_ids=tuple(subnets_of(client, "us-east-1a")))

    with pytest.raises(
        InsufficientCapacityError, match=r"must be launched in us-east-1c .*HETERPS_AWS_SUBNETS"
    ):
        launch(plan(replace(offer(), zone="us-east-1c")), provider=AwsEc2Provider(client, settings))


def test_a_ready_made_profile_and_the_tags_of_the_company_are_on_all_that_is_made(launch, client, server):
    settings = MachineSettings.of_environment(
        {"HETERPS_AWS_INSTANCE_PROFILE": "ready", "HETERPS_AWS_TAGS": "team=ads cost-centre=4711"}
    )
    wire = Wire()
    wire.attach(client)
    server.own_iam.create_instance_profile(InstanceProfileName="ready")

    launch(provider=BucketProvider(client, settings, iam=server.own_iam))

    assert server.own_iam.list_roles()["Roles"] == []
    (template,) = client.describe_launch_templates()["LaunchTemplates"]
    (group,) = (g for g in client.describe_security_groups()["SecurityGroups"] if g["GroupName"] != "default")
    for made in (template, group, *server.instances()):
        tags = {tag["Key"]: tag["Value"] for tag in made["Tags"]}
        assert (tags["team"], tags["cost-centre"], tags["heterps:run-id"]) == ("ads", "4711", "r1")
    assert wire.of("CreateLaunchTemplate")[0]["LaunchTemplateData.IamInstanceProfile.Name"] == "ready"


@pytest.mark.parametrize("text", ["team", "=ads", "heterps:run-id=r2", "aws:name=x"])
def test_tags_that_aws_or_heterps_would_refuse_are_named(text):
    with pytest.raises(ConfigurationError, match="HETERPS_AWS_TAGS must be KEY=VALUE"):
        MachineSettings.of_environment(MappingProxyType({"HETERPS_AWS_TAGS": text}))


def test_a_refusal_of_the_organisation_is_not_blamed_on_the_policy_of_the_user():
    message = "You are not authorized, with an explicit deny in a service control policy"

    error = str(refusal("launch", {"UnauthorizedOperation": [message]}))

    assert "ask its administrator" in error
    assert "infra/iam" not in error
