import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from botocore.exceptions import ConnectTimeoutError

from heterps_core.hardware import Market
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.aws.quotas import Quotas, asks_less, quota_of
from infra.providers.base import QuotaExceededError
from tests.infra.builders import offer, plan
from tests.moto_server import REGION

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
def quotas_of(server):
    """Returns the quotas of an account that tells vCPUs by the quota's code; moto knows no quotas of EC2."""

    def act(vcpus):
        client = server.client("service-quotas")

        def answer(params, **_):
            code = re.search(r"L-\w+", params["body"].decode())[0]
            if code not in vcpus:
                error = {"Code": "NoSuchResourceException", "Message": "as the test wants it"}
                return SimpleNamespace(status_code=400), {"Error": error}
            return SimpleNamespace(status_code=200), {"Quota": {"Value": vcpus[code]}}

        client.meta.events.register("before-call.service-quotas.GetServiceQuota", answer)
        return Quotas(lambda: client, REGION)

    return act


def test_a_plan_beyond_a_quota_is_refused_before_anything_is_asked_of_ec2(launch, client, wire, quotas_of):
    """Two machines of 2 vCPUs each, of two device types, each of which is within it alone."""
    first, second = plan().groups
    both = replace(plan(), groups=(first, replace(second, device_type="cpu-c8g")))
    with pytest.raises(
        QuotaExceededError,
        match=r"Standard.* of 3 vCPUs, and asks for 4; aws service-quotas .*"
        "--quota-code L-1216C47A --region us-east-1 --desired-value 4, or plan with "
        "--device-types cpu-c7i or cpu-c8g alone, or --markets on-demand spot$",
    ) as refused:
        launch(both, provider=AwsEc2Provider(client, quotas=quotas_of({"L-1216C47A": 3.0})))

    assert refused.value.quotas == (STANDARD,)
    assert wire.requests == []


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
    assert limits.text == f"{STANDARD} 5; {STANDARD_SPOT} 0"


def test_a_service_that_is_out_of_reach_is_asked_once_and_all_quotas_are_unknown(server, caplog):
    client, asked = server.client("service-quotas"), []

    def lose(**_):
        asked.append(1)
        raise ConnectTimeoutError(endpoint_url="https://servicequotas")

    client.meta.events.register("before-send.service-quotas", lose)
    offers = [offer(), offer(market=Market.SPOT)]

    limits = Quotas(lambda: client, REGION).unit_limits(["cpu-c7i", "cpu-c7i-spot"], offers)

    assert (len(asked), limits.text) == (1, "")
    assert min(limits.most.values()) > 1_000_000
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "quotas of vCPUs are unknown; EC2 refuses a launch beyond them"
    ]
