"""What AWS may answer at a bad time: success elsewhere, or an error that says what to do."""

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ChecksumError,
    ClientError,
    ConnectionClosedError,
    ConnectionError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
)
from botocore.parsers import ResponseParserError

from heterps_core.errors import ProvisioningError
from infra.ledger.ledger import EntryState
from infra.providers import provider_of
from infra.providers.aws.errors import (
    CAPACITY_WAYS_OUT,
    WAYS_OUT,
    aws_client,
    explained,
    refusal,
)
from infra.providers.base import InsufficientCapacityError, QuotaExceededError
from infra.workspace import Workspace
from tests.infra.builders import offer, plan
from tests.infra.moto_ec2 import unreadable
from tests.moto_server import REGION


def answer(client, operation, code, *, times=99):
    """Let the first calls of an operation be answered with an error code."""
    left = [times]

    def refuse(**_):
        left[0] -= 1
        if left[0] >= 0:
            raise ClientError({"Error": {"Code": code, "Message": "as the test wants it"}}, operation)

    client.meta.events.register(f"before-call.ec2.{operation}", refuse)


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        ("VcpuLimitExceeded", "ask for a higher vCPU quota in Service Quotas"),
        ("MaxSpotInstanceCountExceeded", "ask for a higher spot quota.* or take on-demand"),
        ("InsufficientFreeAddressesInSubnet", "take a subnet with more free addresses"),
        ("UnfulfillableCapacity", "ask for another instance type or zone"),
        ("SomethingNew", "Error codes"),
    ],
)
def test_a_fleet_that_ec2_refuses_says_why_and_what_to_do(launch, wire, ledger, server, code, way_out):
    wire.refused_fleets = dict.fromkeys(range(99), code)

    with pytest.raises(ProvisioningError, match=f"launch 1 x c7i.xlarge for stage 1: {code}: as .*{way_out}"):
        launch()

    assert server.instances() == []
    (entry,) = ledger.entries()
    assert entry.state is EntryState.FAILED
    assert code in entry.reason


@pytest.mark.parametrize(
    ("operation", "code", "way_out"),
    [
        ("DescribeInstances", "ExpiredToken", "renew the credentials"),
        ("DescribeInstances", "RequestExpired", "set this machine's clock"),
        ("DescribeInstances", "SignatureDoesNotMatch", "set this machine's clock"),
        ("DescribeInstances", "AuthFailure", "renew the credentials.* clock.* region is enabled"),
        ("DescribeInstances", "OptInRequired", "enable this region"),
        ("CreateLaunchTemplate", "UnauthorizedOperation", "IAM policy.* infra/iam"),
        ("CreateFleet", "UnauthorizedOperation", "IAM policy.* infra/iam"),
    ],
)
def test_every_refusal_at_any_call_comes_with_a_way_out(launch, client, server, operation, code, way_out):
    answer(client, operation, code, times=1)

    with pytest.raises(ProvisioningError, match=f"{code}: as the test wants it; .*{way_out}"):
        launch()

    assert server.instances() == []


def test_credentials_that_expire_in_the_middle_leave_the_machines_to_their_lease(launch, client, provider):
    """Nothing can be ended without credentials: the error says so, and the sweep has them again."""

    def expire(**_):
        raise ClientError({"Error": {"Code": "ExpiredToken", "Message": "it was 12 hours"}}, "any")

    def expire_after_the_first_fleet(**_):
        client.meta.events.register("before-call.ec2", expire)

    client.meta.events.register("after-call.ec2.CreateFleet", expire_after_the_first_fleet)
    with pytest.raises(ProvisioningError, match=r"ExpiredToken: it was 12 hours; renew the credentials"):
        launch()

    client.meta.events.unregister("before-call.ec2", expire)
    assert len(provider.list_instances("r1")) == 1


def test_missing_credentials_are_named_with_what_to_do(monkeypatch, launch, ledger, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    provider = provider_of(Workspace(root=tmp_path), "aws", region=REGION)

    with pytest.raises(ProvisioningError, match=r"credentials are needed.* or use the provider local"):
        launch(provider=provider)

    assert ledger.entries() == ()


def test_a_region_that_cannot_be_one_is_refused_at_once(tmp_path):
    with pytest.raises(ProvisioningError, match="check the region's name"):
        provider_of(Workspace(root=tmp_path), "aws", region="us east")


def test_a_plan_for_another_region_is_refused_before_any_call(launch, wire):
    with pytest.raises(ProvisioningError, match="launched in, us-east-1, but some are of eu-west-1"):
        launch(plan(offer(region="eu-west-1")))

    assert wire.requests == []


@pytest.mark.parametrize(
    ("problem", "way_out"),
    [
        (
            EndpointConnectionError(endpoint_url="https://ec2.us-esat-1.amazonaws.com"),
            "check the region's name",
        ),
        (CredentialRetrievalError(provider="sso", error_msg="expired"), "run aws sso login"),
    ],
)
def test_what_boto3_says_by_itself_is_explained_too(problem, way_out):
    with pytest.raises(ProvisioningError, match=way_out), explained("launch"):
        raise problem


def kinds_of_botocore(kind=BotoCoreError):
    return {kind}.union(*(kinds_of_botocore(each) for each in kind.__subclasses__()))


NETWORK = (HTTPClientError, ConnectionError, EndpointConnectionError, ChecksumError, IncompleteReadError)


@pytest.mark.parametrize("kind", sorted(kinds_of_botocore(), key=lambda kind: kind.__name__))
def test_nothing_but_a_fault_of_the_network_is_blamed_on_it(kind):
    problem = kind.__new__(kind)
    Exception.__init__(problem, "as boto3\nsays it.")
    problem.last_response = {}

    with pytest.raises(ProvisioningError) as raised, explained("launch"):
        raise problem

    text = str(raised.value)
    assert text.startswith("AWS could not launch: as boto3 says it; ")
    assert "\n" not in text
    if "check the network" in text:
        assert issubclass(kind, (*NETWORK, FlexibleChecksumError))
    if issubclass(kind, (ConnectTimeoutError, ReadTimeoutError, ConnectionClosedError)):
        assert "check the network" in text


@pytest.mark.parametrize(
    ("settings", "cause", "way_out"),
    [
        ({"AWS_PROFILE": "prodution"}, r"profile \(prodution\) could not be found", "list-profiles"),
        ({"AWS_CONFIG_FILE": "broken"}, "Unable to parse config file", r"correct ~/\.aws/config"),
        ({"AWS_ENDPOINT_URL": "no address"}, "Invalid endpoint", r"correct ~/\.aws/config"),
        ({"AWS_RETRY_MODE": "often"}, '"often" must be one of', r"correct ~/\.aws/config"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_setting_is_named_where_the_client_is_made(tmp_path, monkeypatch, settings, cause, way_out):
    (tmp_path / "broken").write_text("this is no [section\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ProvisioningError, match=f"AWS could not set up its client: .*{cause}.*; .*{way_out}"):
        aws_client("ec2", region=REGION, config=Config())


def answer_fleets(client, *answers):
    """Let fleet requests be answered in order with the errors of pools and no machines; None asks EC2."""
    left = list(answers)

    def refuse(**_):
        codes = left.pop(0) if left else None
        if codes is None:
            return None
        errors = [{"ErrorCode": code, "ErrorMessage": "as the test wants it"} for code in codes]
        return AWSResponse("http://ec2", 200, {}, None), {"Errors": errors, "Instances": []}

    client.meta.events.register("before-call.ec2.CreateFleet", refuse)


@pytest.mark.parametrize(
    "codes",
    [
        ("InvalidFleetConfiguration", "InsufficientInstanceCapacity"),
        ("InsufficientInstanceCapacity", "InvalidFleetConfiguration"),
        ("InvalidFleetConfiguration",),
        ("VcpuLimitExceeded", "InsufficientInstanceCapacity"),
        ("SomethingNew", "UnfulfillableCapacity"),
    ],
    ids="+".join,
)
def test_a_zone_where_one_pool_lacks_capacity_and_another_is_not_sold_is_left_for_the_next(
    launch, client, provider, ledger, codes
):
    answer_fleets(client, None, codes)

    cluster = launch()

    assert len(cluster.nodes) == len(provider.list_instances("r1")) == 2
    assert {(e.attempt, e.state) for e in ledger.entries()} == {
        (1, EntryState.ENDED),
        (1, EntryState.FAILED),
        (2, EntryState.LAUNCHED),
    }


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["UnfulfillableCapacity"], InsufficientCapacityError),
        (["InvalidFleetConfiguration"], InsufficientCapacityError),
        (["InvalidFleetConfiguration", "InsufficientInstanceCapacity"], InsufficientCapacityError),
        (["SomethingNew", "InsufficientInstanceCapacity"], InsufficientCapacityError),
        (["VcpuLimitExceeded", "InsufficientInstanceCapacity"], InsufficientCapacityError),
        (["VcpuLimitExceeded"], QuotaExceededError),
        (["InstanceLimitExceeded"], QuotaExceededError),
        (["MaxSpotInstanceCountExceeded"], QuotaExceededError),
        (["MaxSpotInstanceCountExceeded", "InvalidFleetConfiguration"], QuotaExceededError),
        (["SomethingNew"], ProvisioningError),
        (["SomethingNew", "InvalidFleetConfiguration"], ProvisioningError),
        (["UnauthorizedOperation", "InsufficientInstanceCapacity"], ProvisioningError),
        (["UnauthorizedOperation", "VcpuLimitExceeded"], ProvisioningError),
    ],
    ids=str,
)
def test_every_error_of_an_answer_counts_and_the_gravest_decides(codes, kind):
    error = refusal("launch", {code: ["no"] for code in codes})

    assert type(error) is kind
    assert all(code in str(error) for code in codes)


def test_an_error_of_each_pool_is_reported_with_its_own_words():
    error = refusal("launch", {"InvalidFleetConfiguration": ["not in 1a", "not in 1b", "not in 1a"]})

    assert "InvalidFleetConfiguration: not in 1a, not in 1b; take another zone" in str(error)


def test_a_quota_of_a_region_is_not_tried_in_each_of_its_zones(launch, client, ledger):
    answer_fleets(client, None, ("VcpuLimitExceeded",))

    with pytest.raises(
        QuotaExceededError, match=r"quota: Running On-Demand Standard \(A, C, D,.*\) instances"
    ):
        launch()

    assert {entry.attempt for entry in ledger.entries()} == {1}


def test_only_codes_about_one_place_send_a_launch_elsewhere():
    assert set(CAPACITY_WAYS_OUT) < set(WAYS_OUT)
    assert not {code for code in CAPACITY_WAYS_OUT if "Limit" in code or "Exceeded" in code}


def test_a_page_in_place_of_an_answer_is_one_line_that_says_where_to_look(provider, wire):
    """A portal answers 200 with HTML, which botocore cannot parse."""
    wire.answer = lambda url: unreadable(url, status=200)

    with pytest.raises(
        ProvisioningError,
        match=r"could not list the instances: .*; something other than AWS answered: check AWS_ENDPOINT_URL",
    ) as raised:
        provider.list_instances()

    assert type(raised.value.__cause__) is ResponseParserError
    assert "\n" not in str(raised.value)
