"""Roles of nodes against moto's IAM: made before the machines, gone after them, whatever is killed in between."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from botocore.exceptions import EndpointConnectionError

from heterps_core.errors import BudgetExceededError, ConfigurationError, HeterpsError
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import EndReason, EntryState
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.node_role import delete_node_role, own_node_roles, role_name, roles_path
from infra.providers.aws.provider import LONGEST_PLAN
from tests.infra.faults import BucketProvider, provider_with_roles
from tests.infra.iam.evaluation import Access, is_allowed
from tests.infra.moto_ec2 import Wire

LATER = LONGEST_PLAN + timedelta(seconds=60.0)


@pytest.fixture
def provider(client):
    return provider_with_roles(client)


def only_role(server):
    (role,) = server.own_iam.list_roles()["Roles"]
    return server.own_iam.get_role(RoleName=role["RoleName"])["Role"]


def test_a_run_has_a_role_of_its_own_within_the_boundary_and_its_machines_have_it(server, client, launch):
    launch()

    role = only_role(server)
    (profile,) = server.own_iam.list_instance_profiles()["InstanceProfiles"]
    (template,) = client.describe_launch_templates()["LaunchTemplates"]
    versions = client.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"])
    data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert role["Path"] == profile["Path"] == "/heterps/default/us-east-1/r1/"
    assert role["PermissionsBoundary"]["PermissionsBoundaryArn"].endswith(":policy/heterps-node")
    assert {tag["Key"]: tag["Value"] for tag in role["Tags"]}["heterps:run-id"] == "r1"
    assert [of_profile["RoleName"] for of_profile in profile["Roles"]] == [role["RoleName"]]
    assert data["IamInstanceProfile"]["Name"] == profile["InstanceProfileName"]


def test_the_policy_that_iam_keeps_lets_a_node_write_its_own_run_and_no_other(server, launch):
    launch()

    name = only_role(server)["RoleName"]
    (policy_name,) = server.own_iam.list_role_policies(RoleName=name)["PolicyNames"]
    kept = server.own_iam.get_role_policy(RoleName=name, PolicyName=policy_name)["PolicyDocument"]
    document = kept if isinstance(kept, dict) else json.loads(kept)
    possible = {
        run_id: is_allowed(
            document,
            Access(action="s3:PutObject", resource=f"arn:aws:s3:::runs/heterps/{run_id}/checkpoints/1/a"),
        )
        for run_id in ("r1", "r10", "r2")
    }
    assert possible == {"r1": True, "r10": False, "r2": False}


def test_the_end_of_a_run_deletes_its_role_and_may_come_twice(server, provider, ledger, launch):
    launch()
    launch(run_id="r2")

    for _ in range(2):
        provider.end_run("r1", ledger=ledger, reason=EndReason.RUN_ENDED)

    assert only_role(server)["Path"].endswith("/r2/")
    assert server.num_roles_and_profiles() == 2


def test_another_attempt_has_another_role_whose_name_fits():
    path = roles_path("w" * 32, "us-east-1", "r" * 64)
    names = {role_name(path, attempt=attempt) for attempt in (1, 2)}

    assert len(names) == 2
    assert max(map(len, names)) <= 64


class Killed(BaseException):
    """The process ends here and cleans nothing up."""


MAKING = ["CreateRole", "PutRolePolicy", "CreateInstanceProfile", "AddRoleToInstanceProfile"]


def launch_killed_before(request, provider, launch):
    """Launch until right before a request of IAM."""
    wire = Wire()
    wire.attach(provider.iam)
    provider.end_run = lambda *_, **__: ()

    def before():
        if wire.requests[-1]["Action"] == request:
            raise Killed

    wire.before = before
    with pytest.raises(Killed):
        launch()


@pytest.mark.parametrize(("request_name", "num_left"), list(zip(MAKING, (0, 1, 1, 2), strict=True)))
def test_what_a_kill_leaves_half_made_the_sweep_deletes(server, provider, launch, request_name, num_left):
    launch_killed_before(request_name, provider, launch)
    sweeper = provider_with_roles(server.own_client)

    sweeper.remove_leftovers(now=datetime.now(UTC))
    assert server.num_roles_and_profiles() == num_left  # it may be of a launch under way
    sweeper.remove_leftovers(now=datetime.now(UTC) + LATER)
    assert server.num_roles_and_profiles() == 0


@pytest.mark.parametrize("request_name", MAKING)
def test_the_next_launch_makes_whole_what_a_kill_left_half_made(server, provider, launch, request_name):
    launch_killed_before(request_name, provider, launch)

    cluster = launch(provider=provider_with_roles(server.client()))

    (profile,) = server.own_iam.list_instance_profiles()["InstanceProfiles"]
    assert [role["RoleName"] for role in profile["Roles"]] == [only_role(server)["RoleName"]]
    assert len(cluster.nodes) == 2


@pytest.mark.parametrize(
    "step", ["RemoveRoleFromInstanceProfile", "DeleteInstanceProfile", "DeleteRolePolicy", "DeleteRole"]
)
def test_a_deletion_that_broke_off_is_finished_by_the_next(server, provider, launch, step):
    launch()
    wire = Wire()
    wire.attach(provider.iam)
    path = roles_path("default", "us-east-1")
    (role,) = own_node_roles(provider.iam, path)

    def after():
        if wire.requests[-1]["Action"] == step:
            raise KeyboardInterrupt

    wire.after = after
    with pytest.raises(KeyboardInterrupt):
        delete_node_role(provider.iam, role)

    for left in own_node_roles(server.own_iam, path):
        delete_node_role(server.own_iam, left)
    assert server.num_roles_and_profiles() == 0


def test_the_role_of_a_run_with_machines_stays_and_that_of_another_region_or_workspace_too(server, launch):
    launch()
    later = datetime.now(UTC) + LATER
    elsewhere = provider_with_roles(server.client(region="eu-west-1"))
    others = BucketProvider(server.own_client, MachineSettings(workspace="others"), iam=server.own_iam)

    for sweeper in (provider_with_roles(server.own_client), elsewhere, others):
        assert sweeper.remove_leftovers(now=later) == ()

    assert server.num_roles_and_profiles() == 2


@pytest.mark.parametrize("boundary", [None, "heterps-node"])
def test_without_a_boundary_nothing_is_made(server, client, launch, boundary):
    machines = MachineSettings(node_boundary=boundary)

    with pytest.raises(ConfigurationError, match="export HETERPS_AWS_NODE_BOUNDARY=arn"):
        launch(provider=BucketProvider(client, machines, iam=server.own_iam))

    assert server.num_roles_and_profiles() == len(server.instances()) == 0


@pytest.mark.parametrize("location", ["s3://runs", "s3://runs/*", "s3://runs/${aws:userid}", 's3://runs/a"b'])
def test_a_run_directory_that_would_mean_more_in_a_policy_is_refused(provider, location):
    with pytest.raises(ConfigurationError, match="s3://BUCKET/PATH"):
        provider.check_run_directory(location)


def test_a_role_that_cannot_be_deleted_keeps_no_end_out_of_the_ledger(server, provider, ledger, launch):
    launch()
    wire = Wire()
    wire.attach(provider.iam)

    def unreachable():
        raise EndpointConnectionError(endpoint_url="http://iam")

    wire.before = unreachable
    provider.end_run("r1", ledger=ledger, reason=EndReason.RUN_ENDED)

    assert {entry.state for entry in ledger.entries()} == {EntryState.ENDED}
    assert server.num_roles_and_profiles() == 2


def num_groups(server):
    """Those of runs, beside the network's own."""
    return len(server.own_client.describe_security_groups()["SecurityGroups"]) - 1


IN_BUCKET = Bootstrap(run_location="s3://runs/heterps/r1", python="python")


def test_a_launch_uses_the_group_and_the_role_that_were_made_while_it_was_planned(server, provider, launch):
    with provider.prepared("r1", IN_BUCKET):
        planned_with, num_before = only_role(server), num_groups(server)
        provider.remove_leftovers(now=datetime.now(UTC) + LONGEST_PLAN - timedelta(seconds=60.0))
        launch()

    assert only_role(server) == planned_with
    assert num_groups(server) == num_before == 1
    assert server.num_roles_and_profiles() == 2


@pytest.mark.parametrize("request_name", ["CreateSecurityGroup", *MAKING, "none"])
def test_a_run_that_ends_before_its_launch_leaves_no_role_and_no_group(server, provider, request_name):
    """AWS refuses a part, or the plan does."""
    wire = Wire(refuse=lambda form: ("AccessDenied", "no") if form["Action"] == request_name else None)
    wire.attach(provider.client, provider.iam)

    with pytest.raises(HeterpsError), provider.prepared("r1", IN_BUCKET):
        raise BudgetExceededError("too expensive")

    assert (server.num_roles_and_profiles(), num_groups(server)) == (0, 0)
