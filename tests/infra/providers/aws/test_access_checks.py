import re

import boto3
import pytest
from botocore.stub import Stubber

from infra.checks import CheckState
from infra.providers.aws import node_role
from infra.providers.aws.access_checks import access_checks
from infra.providers.aws.launch import MachineSettings
from tests.heterps_core.training.storage.test_store_location import KEY, WITH_CREDENTIALS


@pytest.fixture
def run_store(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_RUN_STORE", f"file://{tmp_path}")


BOUNDARY = "arn:aws:iam::123456789012:policy/heterps-node"


def make_boundary(server):
    document = (node_role._POLICY_FILE).read_text()
    return server.own_iam.create_policy(PolicyName="heterps-node", PolicyDocument=document)["Policy"]["Arn"]


def by_name(client, *, iam=None, **settings):
    return {check.what: check for check in access_checks(client, MachineSettings(**settings), iam=iam)}


def states(found):
    return {what: check.state for what, check in found.items()}


@pytest.mark.usefixtures("run_store")
def test_an_account_that_is_set_up_is_well_and_nothing_is_made(server, client):
    before = len(client.describe_security_groups()["SecurityGroups"])
    image = client.describe_images(Owners=["self"])["Images"][0]["ImageId"]
    images = (image, server.add_arm_image())

    found = by_name(client, iam=server.own_iam, image_ids=images, node_boundary=make_boundary(server))

    assert set(states(found).values()) == {CheckState.OK}, found
    assert found["AWS may make templates"].found == "allowed (dry run)"
    assert len(client.describe_security_groups()["SecurityGroups"]) == before
    assert client.describe_launch_templates()["LaunchTemplates"] == []
    assert found["AWS may see node roles"].found == "allowed, /heterps/default/us-east-1/"
    assert server.num_roles_and_profiles() == 0


def test_each_thing_that_is_missing_says_what_mends_it(server, client, monkeypatch):
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)

    found = by_name(client, iam=server.own_iam, image_ids=("ami-00000000000000000",))

    assert states(found)["AWS image of x86_64"] is CheckState.MISSING
    assert found["AWS image of x86_64"].fix
    assert "export HETERPS_AWS_NODE_BOUNDARY=arn:aws:iam::" in found["node boundary"].fix
    assert found["run store"].fix == "export HETERPS_RUN_STORE=s3://your-bucket/heterps"


def test_a_run_store_with_credentials_is_found_and_they_are_not_shown(server, client, monkeypatch):
    monkeypatch.setenv("HETERPS_RUN_STORE", WITH_CREDENTIALS[0])

    found = by_name(client, iam=server.own_iam)["run store"]

    assert found.state is CheckState.MISSING
    assert "must hold no credentials" in found.found
    assert not [part for part in (KEY, "hush") if part in str(found)]


def refusing_client(code):
    """A client to which AWS answers every call with an error; moto refuses nothing."""
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    stub = Stubber(client)
    stub.add_client_error("describe_instances", service_error_code=code, service_message="no")
    stub.activate()
    return client


@pytest.mark.usefixtures("run_store")
@pytest.mark.parametrize(
    ("code", "way_out"),
    [("ExpiredToken", "aws sso login"), ("UnauthorizedOperation", "infra/iam"), ("AuthFailure", "clock")],
)
def test_credentials_that_are_refused_end_the_questions_to_aws(code, way_out):
    found = by_name(refusing_client(code), node_boundary=BOUNDARY)

    assert states(found) == {
        "AWS credentials": CheckState.MISSING,
        "run store": CheckState.OK,
    }
    assert way_out in found["AWS credentials"].fix


@pytest.mark.usefixtures("run_store")
@pytest.mark.parametrize(
    ("what", "settings", "words"),
    [
        ("node boundary", {"node_boundary": BOUNDARY}, "NoSuchEntity.*aws iam get-policy"),
        ("node profile", {"instance_profile": "no-such"}, "NoSuchEntity.*HETERPS_AWS_INSTANCE_PROFILE"),
        ("AWS network", {"subnet_ids": ("subnet-0123",)}, "InvalidSubnetID.NotFound"),
    ],
)
def test_what_is_named_but_does_not_exist_is_found_before_anything_is_bought(
    client, server, what, settings, words
):
    found = by_name(client, iam=server.own_iam, **settings)[what]

    assert found.state is CheckState.MISSING
    assert re.search(words, f"{found.found} {found.fix}")


@pytest.mark.usefixtures("run_store")
def test_a_snapshot_larger_than_the_disk_of_machines_is_found_before_a_launch(client, server):
    def enlarge(parsed, **_):
        for image in parsed["Images"]:
            root = {"DeviceName": image["RootDeviceName"], "Ebs": {"VolumeSize": 60}}
            image["BlockDeviceMappings"] = [root]

    client.meta.events.register("after-call.ec2.DescribeImages", enlarge)

    found = by_name(client, iam=server.own_iam)["AWS image of x86_64"]

    assert found.state is CheckState.MISSING
    assert "must fit the disk of 40 GB" in found.found
    assert "has 60 GB" in found.found
    assert "root volume is smaller" in found.fix
