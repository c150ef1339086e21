from dataclasses import replace
from types import SimpleNamespace

import pytest

from heterps_core.errors import BudgetExceededError
from heterps_core.plans.scheduling_plan import Stage
from infra.billing.caps import Caps
from tasks.planning.extra_costs import _planned_usage, fast_flow_text
from tasks.provisioning import provision
from tests.tasks.test_provisioning import OFFERS, planned


def test_requests_and_egress_of_a_plan_by_hand():
    usage = _planned_usage(state_bytes=10 * 16 * 1024**2, hours=2.0, leaves_region=True)

    # Two hours are 7,200 s. Reports: 2 * 1,440; the model in 16 parts of 10 MiB.
    assert usage.put_requests == 2 * 1_440 + 16
    # The model in 10 parts of 16 MiB, which leave the region.
    assert usage.get_requests == 10
    assert usage.egress_bytes == 10 * 16 * 1024**2


def test_a_flow_between_stages_that_ec2_does_not_carry_is_named():
    """By hand: 10,000 bytes a sample between 2 and 3 replicas, so a flow has a third of a batch at most.

    At 200,000 samples/s that is 10,000 * 200,000 / 3 = 0.667 GB/s, or 5.3 Gbit/s; at 180,000 it is 4.8.
    """
    layers = [SimpleNamespace(output_bytes_per_sample=size) for size in (10, 10_000, 4)]
    problem, stages = SimpleNamespace(layers=layers), (Stage(0, 1, "cpu-c7i", 2), Stage(2, 2, "gpu-a100", 3))

    assert "needs 5.3 Gbit/s, and EC2 gives one 5" in fast_flow_text(problem, stages, 200_000.0)
    assert fast_flow_text(problem, stages, 180_000.0) == ""
    assert fast_flow_text(problem, stages[:1], 200_000.0) == ""


def test_in_the_region_of_the_bucket_nothing_is_paid_for_the_way():
    usage = _planned_usage(state_bytes=1e9, hours=1.0, leaves_region=False)

    assert usage.egress_bytes == 0


@pytest.fixture
def outside_of_aws(monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("outside_of_aws")
def test_the_cap_of_a_run_counts_what_its_bucket_will_cost():
    caps = Caps(max_usd_per_run=3.0)
    allowed = provision.fn(planned(), OFFERS, provider="aws", caps=caps, state_bytes=1e9)

    # By hand, in ten hours: writes 14,400 + 95 at 0.005 a thousand, reads 60 at 0.0004, and 1 GB at 0.09;
    # 20 GB leave the region for 1.80 USD, for which the machines' 1.53 leave no room.
    assert allowed.bucket_usd == pytest.approx(14.495 * 0.005 + 0.06 * 0.0004 + 0.09, rel=1e-4)
    assert "USD for its bucket" in allowed.summary
    with pytest.raises(BudgetExceededError, match="within 3 USD per run"):
        provision.fn(planned(), OFFERS, provider="aws", caps=caps, state_bytes=20e9)
    assert provision.fn(planned(), OFFERS, provider="local", caps=caps, state_bytes=20e9).bucket_usd == 0.0


@pytest.mark.usefixtures("outside_of_aws")
def test_disks_and_addresses_of_reserved_machines_count_for_the_hours_of_their_plan():
    free_plan = replace(planned(), price_usd_per_hour=0.0, cost_usd=0.0)
    free_offers = [replace(offer, price_usd_per_hour=0.0) for offer in OFFERS]

    allowed, longer = (
        provision.fn(free_plan, free_offers, provider="aws", caps=Caps(), free_hours=hours)
        for hours in (2.0, 6.0)
    )

    assert allowed.predicted_cost_usd > 0
    assert longer.predicted_cost_usd == pytest.approx(3 * allowed.predicted_cost_usd)
