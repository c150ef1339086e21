import pytest

from heterps_core.hardware import Market
from infra.providers.aws.fleet import _quota_of, asks_less
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
        ("inf2.xlarge", Market.ON_DEMAND, "Running On-Demand Inf instances"),
    ],
)
def test_an_instance_counts_against_the_quota_of_its_market_and_group_of_families(name, market, quota):
    assert _quota_of(offer(name, market=market)) == quota


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
