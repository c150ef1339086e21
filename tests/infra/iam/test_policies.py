"""Every call of a whole life is allowed, nothing that it does not make is, and no way leads past the tags."""

import base64
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from heterps_core.profiling.profiling_node import _profile_key
from heterps_core.training.storage.run_directory import RunDirectory
from infra.ledger.ledger import Ledger
from infra.machines.sweeper import sweep
from infra.providers.aws.node_role import node_policy
from tests.heterps_core.training.node_processes import make_job, prepare_clicks, train
from tests.infra.builders import bootstrap, plan
from tests.infra.faults import Steps, live, provider_with_roles
from tests.infra.iam.evaluation import ACCOUNT_ID, IAM_FOLDER, Access, actions_of, is_allowed, policy
from tests.infra.iam.recorded import ARN, OWN, ec2_accesses, s3_access, s3_deletions
from tests.infra.iam.recorded_roles import role_accesses, role_arn
from tests.infra.moto_ec2 import moto_process
from tests.infra.providers.aws.set_up import rights_of_the_doctor

ARROWS_PROBE = "extremelyunlikelytoexist"
"""Arrow asks for a bucket that nobody has, to learn whose S3 it talks to; a refusal is an answer too."""

ROOT = IAM_FOLDER.parents[1]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return tmp_path_factory.mktemp("moto") / "requests"


@pytest.fixture(scope="module")
def server(recording):
    with moto_process(MOTO_ENABLE_RECORDING="1", MOTO_RECORDER_FILEPATH=str(recording)) as running:
        yield running


def whole_life(client, folder):
    """A run that fails over to another zone, is renewed and ended, and one that is launched twice, left and swept."""
    wire = live(client, Steps(None), folder / "ledger.sqlite", market=Market.SPOT, zones=1)
    ledger = Ledger(folder / "ledger.sqlite")
    for _ in range(2):
        provider = provider_with_roles(client)
        wire.attach(provider.iam)
        provider.launch(
            plan(),
            run_id="left",
            lease_until=datetime.now(UTC),
            bootstrap=bootstrap(Path("/srv/heterps/run")),
            ledger=ledger,
        )
    provider.all_regions()
    for days in (1, 2):
        sweep(provider, now=datetime.now(UTC) + timedelta(days=days), ledger=ledger)
    return wire.requests


@pytest.fixture(scope="module")
def requests_of_a_life(server, tmp_path_factory):
    server.reset()
    return whole_life(server.client(), tmp_path_factory.mktemp("life"))


@pytest.fixture(scope="module")
def accesses_to_ec2(requests_of_a_life):
    return list(ec2_accesses(requests_of_a_life))


@pytest.fixture(scope="module")
def accesses_to_roles(requests_of_a_life):
    return list(role_accesses(requests_of_a_life))


@pytest.fixture(scope="module")
def accesses_to_store(server, recording, tmp_path_factory):
    """What a run directory in a bucket asks for."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "test")
        yield _accesses_to_store(server, recording, tmp_path_factory)


def run_in_a_bucket(server):
    """Make the bucket of the policies, and return the location of a run in it."""
    server.reset()
    boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    ).create_bucket(Bucket="runs")
    host = server.url.removeprefix("http://")
    return f"s3://runs/heterps/night-1?region=us-east-1&scheme=http&endpoint_override={host}"


def s3_accesses(recording, start):
    """Return what IAM is asked for the requests that were recorded from a line on."""
    lines = [json.loads(line) for line in recording.read_text().splitlines()[start:]]
    accesses: list[Access] = []
    for line in lines:
        if line["method"] == "POST" and line["url"].endswith("?delete"):
            body = base64.b64decode(line["body"]) if line["body_encoded"] else line["body"].encode()
            accesses += s3_deletions(line["url"], body.decode())
        else:
            accesses.append(s3_access(line["method"], line["url"]))
    return [access for access in accesses if ARROWS_PROBE not in access.resource]


def _accesses_to_store(server, recording, tmp_path_factory):
    location = run_in_a_bucket(server)
    start = len(recording.read_text().splitlines())
    run = RunDirectory(location)
    source = tmp_path_factory.mktemp("data")
    (source / "part.bin").write_bytes(bytes(100_000))
    (source / "large.bin").write_bytes(bytes(30_000_000))
    run.upload_folder(source, "data")
    with run.appending("checkpoints/1/rank-00000.bin") as append:
        append(memoryview(bytes(30_000_000)))
    list(run.read_ranges("data/large.bin", [(0, 20_000_000)]))
    run.write_json("job.json", {})
    run.require_json("job.json")
    run.read_json("none.json")
    run.names("")
    run.delete_file("job.json")
    run.delete_folder("data")
    return s3_accesses(recording, start)


def test_every_call_to_ec2_is_allowed_to_the_controller(accesses_to_ec2):
    refused = [access for access in accesses_to_ec2 if not is_allowed(policy("controller"), access)]

    assert refused == []


def test_a_controller_of_one_region_may_do_all_of_it_there_and_make_nothing_elsewhere(accesses_to_ec2):
    """As docs/AWS.md replaces it in the policy."""
    assert "-e s/ec2:\\*/ec2:us-east-1/g" in (ROOT / "docs" / "AWS.md").read_text()
    of_region = json.loads(json.dumps(policy("controller")).replace("ec2:*", "ec2:us-east-1"))
    elsewhere = [
        replace(access, resource=access.resource.replace("us-east-1", "eu-west-1"))
        for access in accesses_to_ec2
        if access.resource.startswith("arn:aws:ec2:us-east-1")
    ]

    assert [access for access in accesses_to_ec2 if not is_allowed(of_region, access)] == []
    assert [access for access in elsewhere if is_allowed(of_region, access)] == []
    assert [access for access in elsewhere if not is_allowed(policy("controller"), access)] == []


def test_every_call_that_makes_and_deletes_roles_is_allowed_to_the_controller(accesses_to_roles):
    refused = [access for access in accesses_to_roles if not is_allowed(policy("controller"), access)]

    assert refused == []


def test_every_call_to_the_run_store_is_allowed_to_the_controller(accesses_to_store):
    refused = [access for access in accesses_to_store if not is_allowed(policy("controller"), access)]

    assert refused == []


OF_THE_FLOW = re.compile(r"(data|start_model|code|leases)/|(job|cluster)\.json$")
"""What the flow writes into a run directory."""


@pytest.fixture(scope="module")
def accesses_of_a_run(server, recording, tmp_path_factory):
    """What a training of three nodes asks of its bucket, the flow's part too."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "test")
        location = run_in_a_bucket(server)
        start = len(recording.read_text().splitlines())
        run = RunDirectory(location, secret=b"the key of this run")
        train(run, make_job(prepare_clicks(tmp_path_factory.mktemp("clicks")), (2, 1)))
        run.write_json(_profile_key("stage0-node0"), {})
        run.request_stop()
    return s3_accesses(recording, start)


@pytest.mark.slow
def test_every_call_of_a_node_to_the_run_store_is_allowed(accesses_of_a_run):
    """All of a run's accesses but writes of the flow, which nodes share no key with."""
    own = "arn:aws:s3:::runs/heterps/night-1/"
    of_nodes = [
        access
        for access in accesses_of_a_run
        if access.action in ("s3:GetObject", "s3:ListBucket")
        or not OF_THE_FLOW.match(access.resource.removeprefix(own))
    ]
    refused = [access for access in of_nodes if not is_allowed_to_node("night-1", access)]

    assert {access.action for access in of_nodes} == actions_of(policy("node"))
    assert refused == []
    assert not [access for access in of_nodes if is_allowed_to_node("night-2", access)]


@pytest.mark.parametrize(
    "key",
    [
        "job.json",
        "cluster.json",
        "code/heterps-1.whl",
        "data/rows-00000.parquet",
        "leases/night-1",
        "start_model/model.npz",
    ],
)
@pytest.mark.parametrize("run_id", ["night-1", "night-2"])
@pytest.mark.parametrize("action", ["s3:PutObject", "s3:DeleteObject"])
def test_a_node_can_change_neither_code_nor_data_nor_job_nor_lease_of_any_run(action, run_id, key):
    access = Access(action=action, resource=f"arn:aws:s3:::runs/heterps/{run_id}/{key}")

    assert not is_allowed_to_node("night-1", access)
    assert is_allowed(policy("controller"), access)


KEYS = [
    "job.json",
    "data/rows-00000.parquet",
    "checkpoints/1/rank-00000.bin",
    "nodes/n0/status.json",
    "result.json",
    "stop",
]


@pytest.mark.parametrize("other", ["night-2", "night-10", "night", "x/night-1", "night-1.2"])
@pytest.mark.parametrize("action", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"])
def test_a_node_can_neither_read_nor_write_nor_delete_what_is_of_another_run(action, other):
    reachable = [
        key
        for key in KEYS
        if is_allowed_to_node(
            "night-1", Access(action=action, resource=f"arn:aws:s3:::runs/heterps/{other}/{key}")
        )
    ]

    assert reachable == []


def test_a_node_reads_the_rows_of_its_run_and_changes_none_of_them():
    own = node_policy("s3://runs/heterps/night-1", ["clicks/raw", "more"])

    def possible(action, key):
        return is_allowed(own, Access(action=action, resource=f"arn:aws:s3:::{key}"))

    assert possible("s3:GetObject", "clicks/raw/dt=2026-11-21/a.parquet")
    assert possible("s3:GetObject", "more/a.parquet")
    assert not possible("s3:GetObject", "clicks/payroll.parquet")
    assert not possible("s3:PutObject", "clicks/raw/dt=2026-11-21/a.parquet")


@pytest.mark.parametrize("folder", ["clicks/*", "clicks/${aws:username}", "clicks/a b", ""])
def test_a_folder_of_rows_that_would_mean_more_in_a_policy_is_refused(folder):
    with pytest.raises(
        ConfigurationError, match="a folder of rows that nodes get rights to must be BUCKET/PATH"
    ):
        node_policy("s3://runs/heterps/night-1", [folder])


def test_a_node_writes_and_deletes_its_own_runs_checkpoints():
    own = "arn:aws:s3:::runs/heterps/night-1/checkpoints/1/rank-00000.bin"

    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
        assert is_allowed_to_node("night-1", Access(action=action, resource=own))


def is_allowed_to_node(run_id, access):
    """Tell whether the role of a run's nodes may: its policy and its boundary allow it."""
    own = node_policy(f"s3://runs/heterps/{run_id}?region=us-east-1")
    return is_allowed(own, access) and is_allowed(policy("node"), access)


@pytest.mark.parametrize(
    "prefix", [None, "", "payroll/", "heterps-others/", "heterps/", "heterps/night-2/", "heterps/night-1"]
)
def test_a_node_can_list_nothing_but_the_run_store(prefix):
    context = {} if prefix is None else {"s3:prefix": prefix}
    access = Access(action="s3:ListBucket", resource="arn:aws:s3:::runs", context=context)

    assert not is_allowed_to_node("night-1", access)


def test_the_controller_may_do_nothing_that_the_code_never_does(
    accesses_to_ec2, accesses_to_roles, accesses_to_store, server
):
    prices = (ROOT / "infra" / "providers" / "aws" / "prices.py").read_text()
    of_catalogue = {
        ("pricing:" if name == "get_products" else "ec2:")
        + "".join(word.capitalize() for word in name.split("_"))
        for name in re.findall(r'get_paginator\("(\w+)"\)', prices)
    }
    used = {access.action for access in [*accesses_to_ec2, *accesses_to_roles, *accesses_to_store]}

    assert actions_of(policy("controller")) == used | of_catalogue | rights_of_the_doctor(server)


FOREIGN = {"aws:ResourceTag/heterps:workspace": "others"}
ASKED = {"aws:RequestTag/heterps:workspace": "default", "aws:RequestTag/heterps:run-id": "night-1"}
INSTANCE = {**ASKED, "ec2:MetadataHttpTokens": "required"}


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    [
        ("ec2:TerminateInstances", "instance/i-1", {}),
        ("ec2:TerminateInstances", "instance/i-1", FOREIGN),
        ("ec2:StopInstances", "instance/i-1", OWN),
        ("ec2:ModifyInstanceAttribute", "instance/i-1", OWN),
        ("ec2:RunInstances", "instance/*", {"ec2:MetadataHttpTokens": "required"}),
        ("ec2:RunInstances", "instance/*", {**INSTANCE, "aws:RequestTag/heterps:workspace": "others"}),
        ("ec2:RunInstances", "instance/*", {**INSTANCE, "aws:RequestTag/heterps:run-id": ""}),
        ("ec2:RunInstances", "instance/*", {**INSTANCE, "ec2:MetadataHttpTokens": "optional"}),
        ("ec2:RunInstances", "volume/*", {**ASKED, "ec2:Encrypted": "false"}),
        ("ec2:RunInstances", "key-pair/mine", {}),
        ("ec2:RunInstances", "launch-template/lt-1", FOREIGN),
        ("ec2:CreateFleet", "launch-template/lt-1", {}),
        ("ec2:RunInstances", "security-group/sg-1", {}),
        ("ec2:CreateFleet", "fleet/*", {}),
        ("ec2:CreateLaunchTemplate", "launch-template/*", {}),
        ("ec2:CreateSecurityGroup", "security-group/*", {}),
        ("ec2:DeleteLaunchTemplate", "launch-template/lt-1", FOREIGN),
        ("ec2:DeleteSecurityGroup", "security-group/sg-1", {}),
        ("ec2:AuthorizeSecurityGroupIngress", "security-group/sg-1", FOREIGN),
        # Adopting what others own, or letting go of one's own, by changing a tag.
        ("ec2:CreateTags", "instance/i-1", {"aws:TagKeys": ["heterps:workspace"]}),
        ("ec2:CreateTags", "instance/i-1", {**OWN, "aws:TagKeys": ["heterps:workspace"]}),
        ("ec2:CreateTags", "instance/i-1", {**OWN, "aws:TagKeys": ["heterps:lease-until", "Name"]}),
        ("ec2:CreateTags", "instance/i-1", {**FOREIGN, "aws:TagKeys": ["heterps:lease-until"]}),
        ("ec2:DeleteTags", "instance/i-1", OWN),
    ],
)
def test_ec2_refuses_the_controller_what_is_not_its_own(action, resource, context):
    assert not is_allowed(
        policy("controller"), Access(action=action, resource=f"{ARN}:{resource}", context=context)
    )


@pytest.mark.parametrize("name", ["controller", "node"])
@pytest.mark.parametrize(
    ("action", "resource"),
    [
        ("s3:GetObject", "arn:aws:s3:::payroll/2026.csv"),
        ("s3:ListBucket", "arn:aws:s3:::payroll"),
        ("s3:PutObject", "arn:aws:s3:::runs/elsewhere/file"),
        ("s3:GetObject", "arn:aws:s3:::runs/heterps-others/file"),
        ("s3:DeleteBucket", "arn:aws:s3:::runs"),
        ("s3:CreateBucket", "arn:aws:s3:::new"),
        ("s3:PutBucketPolicy", "arn:aws:s3:::runs"),
        ("iam:PassRole", f"arn:aws:iam::{ACCOUNT_ID}:role/administrator"),
        ("iam:CreateUser", f"arn:aws:iam::{ACCOUNT_ID}:user/me"),
        ("sts:AssumeRole", f"arn:aws:iam::{ACCOUNT_ID}:role/administrator"),
    ],
)
def test_neither_may_touch_what_is_no_run_of_ours(name, action, resource):
    passed = {"iam:PassedToService": "ec2.amazonaws.com"}

    assert not is_allowed(policy(name), Access(action=action, resource=resource, context=passed))


def test_a_node_may_ask_nothing_of_ec2(accesses_to_ec2):
    assert not [access for access in accesses_to_ec2 if is_allowed(policy("node"), access)]


BOUNDARY = f"arn:aws:iam::{ACCOUNT_ID}:policy/heterps-node"
OWN_PATH = "/heterps/default/us-east-1/night-1/"


@pytest.mark.parametrize("action", ["iam:CreateRole", "iam:PutRolePolicy"])
@pytest.mark.parametrize(
    ("path", "boundary", "is_possible"),
    [
        (OWN_PATH, BOUNDARY, True),
        (OWN_PATH, None, False),
        (OWN_PATH, "arn:aws:iam::aws:policy/AdministratorAccess", False),
        ("/", BOUNDARY, False),
        ("/heterps/others/us-east-1/night-1/", BOUNDARY, False),
        ("/heterps/default-too/us-east-1/night-1/", BOUNDARY, False),
    ],
)
def test_roles_are_made_below_the_workspaces_path_and_within_the_boundary_alone(
    action, path, boundary, is_possible
):
    context = {} if boundary is None else {"iam:PermissionsBoundary": boundary}
    access = Access(action=action, resource=role_arn(path, "heterps-night-1"), context=context)

    assert is_allowed(policy("controller"), access) is is_possible


@pytest.mark.parametrize("path", ["/", "/heterps/others/us-east-1/night-1/"])
@pytest.mark.parametrize("kind", ["role", "instance-profile"])
def test_the_controller_may_do_nothing_with_roles_and_profiles_of_others(kind, path):
    of_iam = {action for action in actions_of(policy("controller")) if action.startswith("iam:")}
    context = {"iam:PermissionsBoundary": BOUNDARY, "iam:PassedToService": "ec2.amazonaws.com"}
    possible = {
        action
        for action in of_iam
        if is_allowed(
            policy("controller"),
            Access(
                action=action,
                resource=f"arn:aws:iam::{ACCOUNT_ID}:{kind}{path}administrator",
                context=context,
            ),
        )
    }

    assert possible == {"iam:ListRoles", "iam:ListInstanceProfiles"}


@pytest.mark.parametrize(
    "action",
    [
        "iam:AttachRolePolicy",
        "iam:CreatePolicyVersion",
        "iam:DeleteRolePermissionsBoundary",
        "iam:PutRolePermissionsBoundary",
        "iam:UpdateAssumeRolePolicy",
    ],
)
@pytest.mark.parametrize("resource", [role_arn(OWN_PATH, "heterps-night-1"), BOUNDARY])
def test_no_boundary_is_changed_or_taken_off(action, resource):
    access = Access(action=action, resource=resource, context={"iam:PermissionsBoundary": BOUNDARY})

    assert not is_allowed(policy("controller"), access)


def test_the_role_of_nodes_is_only_for_instances():
    access = Access(action="iam:PassRole", resource=role_arn(OWN_PATH, "heterps-night-1"))

    assert is_allowed(
        policy("controller"), replace(access, context={"iam:PassedToService": "ec2.amazonaws.com"})
    )
    assert not is_allowed(
        policy("controller"), replace(access, context={"iam:PassedToService": "lambda.amazonaws.com"})
    )


def test_moto_as_a_second_judge_allows_a_whole_life_and_refuses_the_node(server, tmp_path):
    """moto knows neither resources nor conditions of EC2, so it is given the actions alone."""
    server.reset()
    clients = {name: _client_with_rights(server, name) for name in ("controller", "node")}
    server.set_unchecked_requests(0)
    try:
        whole_life(clients["controller"], tmp_path)
        with pytest.raises(ClientError, match=r"AccessDenied|UnauthorizedOperation"):
            clients["node"].describe_instances()
        with pytest.raises(ClientError, match=r"AccessDenied|UnauthorizedOperation"):
            clients["controller"].stop_instances(InstanceIds=["i-0123456789abcdef0"])
    finally:
        server.set_unchecked_requests(10**9)
    assert {instance["State"]["Name"] for instance in server.instances()} == {"terminated"}


def _client_with_rights(server, name):
    iam = boto3.client(
        "iam",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    iam.create_user(UserName=name)
    statement = {"Effect": "Allow", "Action": sorted(actions_of(policy(name))), "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=document)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return server.client(key=(key["AccessKeyId"], key["SecretAccessKey"]))
