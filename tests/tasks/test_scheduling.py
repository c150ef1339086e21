import pytest

from heterps_core.errors import BudgetExceededError, InfeasiblePlanError
from heterps_core.hardware import Market
from heterps_core.plans.scheduling_plan import Stage
from infra.caps import Caps
from tasks.provisioning import find_offers, provision, rehearsal_stages, usd_for
from tasks.scheduling import search_chosen, with_compared
from tests.tasks.builders import make_problem, make_result


def test_every_compared_method_gets_a_result_or_a_reason():
    # By hand: gpu units share nothing faster than 88 ms / k, so every method can reach 1,000 samples/s.
    searches = search(throughput_floor_samples_per_s=1_000.0)

    assert {"exact", "cpu-only", "gpu-only"} <= set(searches.results)
    assert searches.without_plan == {}
    best = searches.results["exact"].plan
    assert all(best.cost_usd <= found.plan.cost_usd * (1 + 1e-9) for found in searches.results.values())


def test_a_method_that_cannot_reach_the_floor_is_told_and_the_others_go_on():
    # By hand: 8 cpu units reach 100 / (80 ms / 8) = 10,000 samples/s, 8 gpu units 100 / (88 ms / 8) = 9,091.
    searches = search(throughput_floor_samples_per_s=9_500.0)

    assert set(searches.without_plan) == {"gpu-only"}
    assert "9090.91 samples/s" in str(searches.without_plan["gpu-only"])


def test_a_floor_that_nothing_meets_is_an_error_with_the_shortfall():
    with pytest.raises(InfeasiblePlanError, match="throughput floor"):
        search(throughput_floor_samples_per_s=1e9)


def search(**problem):
    # `.fn` of each task is called, so no Prefect server is needed.
    from tasks import scheduling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "search_plan", scheduling.search_plan.fn)
        asked = make_problem(**problem)
        searches = search_chosen(asked, scheduler="exact", budget_evaluations=64, seed=0)
        return with_compared(searches, asked, budget_evaluations=64, seed=0)


def test_before_a_launch_only_the_chosen_method_and_the_proof_are_searched(monkeypatch):
    from tasks import scheduling

    monkeypatch.setattr(scheduling, "search_plan", scheduling.search_plan.fn)

    found = search_chosen(make_problem(), scheduler="genetic", budget_evaluations=64, seed=0)

    assert set(found.results) == {"exact", "genetic"}


def test_a_rehearsal_keeps_the_cut_and_shares_the_cores():
    planned = (Stage(0, 0, "cpu-c7i", 9), Stage(1, 2, "gpu-t4", 1))

    assert rehearsal_stages(planned, num_cores=3) == (Stage(0, 0, "cpu-c7i", 2), Stage(1, 2, "gpu-t4", 1))


def test_offers_carry_the_asked_device_types_on_demand():
    offers = find_offers.fn(["cpu-c7i", "gpu-t4"])

    # With the families that are as fast, to turn to where these cannot be had.
    assert {offer.instance_type.family for offer in offers} == {"c7i", "m7i", "r7i", "g4dn"}
    assert {offer.market for offer in offers} == {Market.ON_DEMAND}


def test_a_cap_is_held_against_the_plan_and_not_against_its_rehearsal():
    plan = make_result(make_problem()).plan
    offers = find_offers.fn(["cpu-c7i", "gpu-t4"])
    allowed = provision.fn(plan, offers, provider="local", caps=Caps())

    assert allowed.is_rehearsal
    assert allowed.launch_plan.price_usd_per_hour <= allowed.cloud_plan.price_usd_per_hour
    too_low = allowed.cloud_plan.price_usd_per_hour * 0.99
    with pytest.raises(BudgetExceededError, match="nothing was launched"):
        provision.fn(plan, offers, provider="local", caps=Caps(max_usd_per_hour=too_low))


def test_price_over_time():
    assert usd_for(7.2, 500.0) == pytest.approx(1.0)
