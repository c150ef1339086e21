import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from botocore.exceptions import ConnectTimeoutError

from heterps_core.hardware import Market
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.aws.quotas import Quotas, asks_less, quota_of
from infra.providers.base import QuotaExceededError
from tests.infra.builders import offer, plan

STANDARD = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
STANDARD_SPOT = "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"


@pytest.mark.parametrize(
    ("name", "market", "quota"),
    [
        ("c7i.large", Market.ON_DEMAND, STANDARD),
        ("im4gn.large", Market.ON_DEMAND, STANDARD),
        ("m7i.large", Market.SPOT, STANDARD_SPOT),
        ("g4dn.xlarge", Market.ON_DEMAND, "Running On-Demand G and VT instances"),
        ("g5.xlarge", Market.SPOT, "All G and VT Spot Instance Requests"),
        ("p3.2xlarge", Market.ON_DEMAND, "Running On-Demand P instances"),
        ("gr6.4xlarge", Market.ON_DEMAND, "Running On-Demand G and VT instances"),
        ("vt1.3xlarge", Market.ON_DEMAND, "Running On-Demand G and VT instances"),
        ("p4d.24xlarge", Market.SPOT, "All P4, P3 and P2 Spot Instance Requests"),
        ("p5.4xlarge", Market.SPOT, "All P5 Spot Instance Requests"),
        ("x2idn.16xlarge", Market.ON_DEMAND, "Running On-Demand X instances"),
    ],
)
def test_an_instance_counts_against_the_quota_of_its_market_and_group_of_families(name, market, quota):
    assert quota_of(offer(name, market=market)).name == quota


@pytest.mark.parametrize(
    ("other", "is_less"),
    [
        # Each offer has 2 vCPUs: the refused plan asks 4 of spot.
        (plan(offer(market=Market.SPOT), offer(market=Market.SPOT)), False),
        (plan(offer(market=Market.SPOT)), True),
        (plan(offer(), offer()), True),
        (plan(offer("g5.xlarge", market=Market.SPOT)), True),
    ],
    ids=["the same", "fewer", "on-demand", "other family"],
)
def test_a_purchase_is_possible_where_it_asks_less_of_the_exhausted_quota(other, is_less):
    refused = plan(offer(market=Market.SPOT), offer("m7i.large", market=Market.SPOT))

    assert asks_less(other, refused, [STANDARD_SPOT]) is is_less


def test_a_quota_that_the_refused_purchase_would_have_used_instead_is_no_obstacle():
    """An alternative of another family was refused too; a plan without that family asks none of its quota."""
    assert asks_less(plan(offer()), plan(offer("g5.xlarge")), ["Running On-Demand P instances"])


@pytest.fixture
def quotas_of(server, client):
    """Returns the quotas of an account that tells vCPUs by the quota's code; moto knows no quotas of EC2."""

    def act(vcpus):
        service = server.client("service-quotas")

        def answer(params, **_):
            code = re.search(r"L-\w+", params["body"].decode())[0]
            if code not in vcpus:
                error = {"Code": "NoSuchResourceException", "Message": "as the test wants it"}
                return SimpleNamespace(status_code=400), {"Error": error}
            return SimpleNamespace(status_code=200), {"Quota": {"Value": vcpus[code]}}

        service.meta.events.register("before-call.service-quotas.GetServiceQuota", answer)
        return Quotas(lambda: service, client)

    return act


def test_a_plan_beyond_a_quota_is_refused_before_anything_is_made(launch, client, wire, quotas_of):
    """Two machines of 2 vCPUs each, of two device types, each of which is within it alone."""
    first, second = plan().groups
    both = replace(plan(), groups=(first, replace(second, device_type="cpu-c8g")))
    with pytest.raises(
        QuotaExceededError,
        match=r"within the 3 of 3 vCPUs that .* Standard.*, and asks for 4; aws service-quotas .*"
        "--quota-code L-1216C47A --region us-east-1 --desired-value 4, or plan with "
        "--device-types cpu-c7i or cpu-c8g alone, or --markets on-demand spot$",
    ) as refused:
        launch(both, provider=AwsEc2Provider(client, quotas=quotas_of({"L-1216C47A": 3.0})))

    assert refused.value.quotas == (STANDARD,)
    assert {request["Action"] for request in wire.requests} == {"DescribeInstances"}


@pytest.mark.parametrize("vcpus", [{"L-1216C47A": 4.0}, {}], ids=["enough", "unknown"])
def test_a_plan_within_a_quota_or_with_one_that_aws_does_not_tell_is_launched(
    launch, client, quotas_of, vcpus
):
    assert len(launch(provider=AwsEc2Provider(client, quotas=quotas_of(vcpus))).nodes) == 2


def test_a_quota_limits_the_units_of_each_device_type(quotas_of):
    """c7i.large has 2 vCPUs, which are one unit: of 5 vCPUs two machines are left, and of none on spot none."""
    offers = [offer(), offer(market=Market.SPOT)]

    limits = quotas_of({"L-1216C47A": 5.0, "L-34B43A08": 0.0}).unit_limits(
        ["cpu-c7i", "cpu-c7i-spot", "gpu-t4"], offers
    )

    assert limits.most == {"cpu-c7i": 2, "cpu-c7i-spot": 0}
    assert limits.sharing == {STANDARD: {"cpu-c7i"}, STANDARD_SPOT: {"cpu-c7i-spot"}}
    assert limits.text == f"{STANDARD} 5 of 5; {STANDARD_SPOT} 0 of 0"


@pytest.fixture
def machines_of_others(server):
    """Two machines of 2 vCPUs on-demand, one of them stopped, and one of 4 on spot; of no workspace."""
    ec2 = server.own_client
    image = ec2.describe_images(Owners=["self"])["Images"][0]["ImageId"]
    one = {"ImageId": image, "MinCount": 1, "MaxCount": 1}
    ec2.run_instances(InstanceType="m7i.large", **one)
    stopped = ec2.run_instances(InstanceType="m7i.large", **one)["Instances"][0]["InstanceId"]
    ec2.stop_instances(InstanceIds=[stopped])
    spot = {"LaunchSpecification": {"ImageId": image, "InstanceType": "c7i.xlarge"}, "InstanceCount": 1}
    ec2.request_spot_instances(**spot)
    assert Counter(each.get("InstanceLifecycle") for each in server.instances()) == {None: 2, "spot": 1}


def test_what_runs_already_counts_against_the_quota_of_its_market(machines_of_others, quotas_of):
    """By hand: 2 of 9 vCPUs on-demand and 4 of 7 on spot are in use; a c7i.large has 2, which are one unit."""
    offers = [offer(), offer(market=Market.SPOT)]

    limits = quotas_of({"L-1216C47A": 9.0, "L-34B43A08": 7.0}).unit_limits(
        ["cpu-c7i", "cpu-c7i-spot"], offers
    )

    assert limits.most == {"cpu-c7i": 3, "cpu-c7i-spot": 1}
    assert limits.text == f"{STANDARD} 7 of 9; {STANDARD_SPOT} 3 of 7"


def test_what_counts_against_a_quota_of_its_own_leaves_the_standard_one(server, quotas_of):
    """Four vCPUs of an inf1.xlarge are in use, which count against "Running On-Demand Inf instances" alone."""
    image = server.own_client.describe_images(Owners=["self"])["Images"][0]["ImageId"]
    server.own_client.run_instances(InstanceType="inf1.xlarge", ImageId=image, MinCount=1, MaxCount=1)

    limits = quotas_of({"L-1216C47A": 5.0}).unit_limits(["cpu-c7i"], [offer()])

    assert limits.most == {"cpu-c7i": 2}


def test_a_plan_is_refused_beside_what_runs_already(machines_of_others, quotas_of):
    """Two machines of 2 vCPUs each: 5 allowed, 2 in use, so 6 must be asked for."""
    with pytest.raises(
        QuotaExceededError, match=r"within the 3 of 5 vCPUs .*asks for 4; .* --desired-value 6,"
    ):
        quotas_of({"L-1216C47A": 5.0}).check(plan(offer(), offer()))


def test_a_repeated_launch_of_the_same_machines_needs_no_more_of_a_quota(launch, client, quotas_of):
    provider = AwsEc2Provider(client, quotas=quotas_of({"L-1216C47A": 4.0}))

    assert launch(provider=provider).nodes == launch(provider=provider).nodes


def test_machines_that_cannot_be_counted_leave_the_whole_quota(client, wire, quotas_of, caplog):
    wire.refuse = lambda form: ("UnauthorizedOperation", "as the test wants it")

    quotas_of({"L-1216C47A": 4.0}).check(plan(offer(), offer()))

    assert "machines that run are not counted in quotas: AWS refused" in caplog.text


def test_a_service_that_is_out_of_reach_is_asked_once_and_all_quotas_are_unknown(server, caplog):
    client, asked = server.client("service-quotas"), []

    def lose(**_):
        asked.append(1)
        raise ConnectTimeoutError(endpoint_url="https://servicequotas")

    client.meta.events.register("before-send.service-quotas", lose)
    offers = [offer(), offer(market=Market.SPOT)]

    limits = Quotas(lambda: client, server.client()).unit_limits(["cpu-c7i", "cpu-c7i-spot"], offers)

    assert (len(asked), limits.text, limits.most) == (1, "", {})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "quotas of vCPUs are unknown; EC2 refuses a launch beyond them"
    ]
