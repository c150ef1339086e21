import pytest

from infra.billing.caps import Caps
from infra.machines.node_lifetime import node_lifetime_s

SIX_HOURS_S = 6 * 3600


@pytest.mark.parametrize(
    ("planned_s", "caps", "lifetime_s"),
    [
        # By hand, at 3 USD an hour: twice 20 minutes; 1.5 USD are half an hour, 0.5 USD ten minutes.
        (1200, Caps(), 2400),
        (1200, Caps(max_usd_per_run=1.5), 1800),
        (1200, Caps(max_usd_per_month=1.5, max_usd_per_run=30.0), 1800),
        (1200, Caps(max_usd_per_run=0.5), 600),
        (1200, Caps(max_usd_per_hour=0.5), 2400),
        (5 * 3600, Caps(), SIX_HOURS_S),
        # However short the plan: five minutes to run and ten to meet.
        (10, Caps(), 900),
        (10, Caps(max_usd_per_run=0.5), 600),
    ],
)
def test_a_node_lives_six_hours_or_twice_its_plan_or_what_its_cap_pays_whichever_is_least(
    planned_s, caps, lifetime_s
):
    found = node_lifetime_s(longest_s=SIX_HOURS_S, planned_s=planned_s, price_usd_per_hour=3.0, caps=caps)

    assert found == lifetime_s
