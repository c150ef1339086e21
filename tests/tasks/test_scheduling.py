from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.search.schedulers.exact import ExactScheduler
from tasks import scheduling
from tasks.planning.deadline import deadline_for
from tasks.scheduling import (
    Searches,
    search_chosen,
    search_in_time,
    with_compared,
)
from tests.tasks.builders import make_problem, make_spot_problem, without_spot


def test_every_compared_method_gets_a_result_or_a_reason():
    # By hand: gpu units share nothing faster than 88 ms / k, so every method can reach 1,000 samples/s.
    searches = search(throughput_floor_samples_per_s=1_000.0)

    assert {"exact", "cpu-only", "gpu-only"} <= set(searches.results)
    assert searches.without_plan == {}
    best = searches.results["exact"].plan
    assert all(best.cost_usd <= found.plan.cost_usd * (1 + 1e-9) for found in searches.results.values())


def test_the_other_methods_take_the_bound_of_the_proving_one(monkeypatch):
    found = search_before_launch(monkeypatch, scheduler="exact")
    exact = found.results["exact"]
    half_usd = exact.plan.cost_lower_bound_usd / 2
    unproven = replace(exact, plan=replace(exact.plan, cost_lower_bound_usd=half_usd))

    compared = with_compared(
        replace(found, results={"exact": unproven}), make_problem(), budget_evaluations=64, seed=0
    )

    assert {each.plan.cost_lower_bound_usd for each in compared.results.values()} == {half_usd}


def test_one_device_type_leaves_nothing_to_compare(monkeypatch):
    problem = make_problem()
    alone = problem.of_types(list(problem.device_types)[:1])
    found = search_before_launch(monkeypatch, scheduler="exact")

    assert with_compared(found, alone, budget_evaluations=64, seed=0) is found


def test_a_method_that_cannot_reach_the_floor_is_reported_and_the_others_go_on():
    # By hand: 8 cpu units reach 100 / (80 ms / 8) = 10,000 samples/s, 8 gpu units 100 / (88 ms / 8) = 9,091.
    searches = search(throughput_floor_samples_per_s=9_500.0)

    assert set(searches.without_plan) == {"gpu-only"}
    assert "9090.91 samples/s" in str(searches.without_plan["gpu-only"])


def test_a_floor_that_nothing_meets_is_an_error_with_the_shortfall():
    with pytest.raises(InfeasiblePlanError, match="throughput floor"):
        search(throughput_floor_samples_per_s=1e9)


def search(**problem):
    # `.fn` of each task is called, so no Prefect server is needed.

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "search_plan", scheduling.search_plan.fn)
        asked = make_problem(**problem)
        searches = search_chosen(asked, scheduler="exact", budget_evaluations=64, seed=0)
        return with_compared(searches, asked, budget_evaluations=64, seed=0)


def test_before_a_launch_only_the_chosen_method_and_the_proof_are_searched(monkeypatch):

    monkeypatch.setattr(scheduling, "search_plan", scheduling.search_plan.fn)

    found = search_chosen(make_problem(), scheduler="genetic", budget_evaluations=64, seed=0)

    assert set(found.results) == {"exact", "genetic"}


def search_before_launch(monkeypatch, *, scheduler, budget_evaluations=64, **problem):

    monkeypatch.setattr(scheduling, "search_plan", scheduling.search_plan.fn)
    asked = make_problem(**problem)
    return search_chosen(asked, scheduler=scheduler, budget_evaluations=budget_evaluations, seed=0)


def test_the_cheaper_plan_of_the_proof_is_taken_and_the_other_stays_in_the_record(monkeypatch):
    found = search_before_launch(monkeypatch, scheduler="gpu-only")

    assert set(found.results) == {"exact", "gpu-only"}
    assert found.results["gpu-only"].plan.cost_usd > found.results["exact"].plan.cost_usd
    assert found.taken == "exact"
    assert found.chosen.plan.scheduler == "exact"
    assert with_compared(found, make_problem(), budget_evaluations=64, seed=0).taken == "exact"


def test_where_both_cost_the_same_the_plan_of_the_method_that_was_asked_for_is_taken(monkeypatch):
    found = search_before_launch(monkeypatch, scheduler="genetic")

    assert found.results["genetic"].plan.cost_usd == pytest.approx(found.results["exact"].plan.cost_usd)
    assert found.chosen.plan.scheduler == "genetic"


def test_a_method_that_finds_no_plan_does_not_keep_a_proven_one_from_being_taken(monkeypatch):
    # By hand: 8 gpu units reach 9,091 samples/s, 8 cpu units 10,000.
    found = search_before_launch(monkeypatch, scheduler="gpu-only", throughput_floor_samples_per_s=9_500.0)

    assert set(found.without_plan) == {"gpu-only"}
    assert found.chosen.plan.scheduler == "exact"


NOW = datetime(2026, 11, 21, 0, 0, tzinfo=UTC)


def planned_in_time(problem, *, steady=True, hours_left, **limits):
    deadline = deadline_for(
        f"{hours_left:02d}:00",
        now=NOW,
        zone=ZoneInfo("UTC"),
        num_samples=problem.num_samples,
        num_epochs=1,
    )
    problem = replace(problem, throughput_floor_samples_per_s=deadline.floor_samples_per_s)

    def search(asked):
        result = ExactScheduler().search(asked, budget_evaluations=100, seed=0)
        return Searches(results={"exact": result}, without_plan={}, taken="exact")

    found, searches = search_in_time(
        problem, without_spot(problem) if steady else None, deadline, search=search, **limits
    )
    return deadline, found, searches.chosen


def test_a_plan_whose_machines_start_late_is_faster_so_that_it_is_in_time():
    problem = without_spot(make_spot_problem(hours=3.0, max_units=8))
    units = {name: replace(unit, startup_seconds=3_600.0) for name, unit in problem.device_types.items()}

    _, _, at_once = planned_in_time(problem, steady=False, hours_left=4)
    late_problem = replace(problem, device_types=units)
    deadline, found, late = planned_in_time(late_problem, steady=False, hours_left=4)

    # By hand: one unit takes 3 h of 14,120 s; with an hour more of start-up two are needed.
    assert (at_once.plan.stages[0].num_replicas, late.plan.stages[0].num_replicas) == (1, 2)
    assert found.throughput_floor_samples_per_s == pytest.approx(10_800 / (14_120 - 3_600))
    assert late.evaluation.run_seconds + 3_600 <= deadline.training_seconds
    # The bound is that of the first search, as no plan does with less.
    assert late.plan.cost_lower_bound_usd == pytest.approx(at_once.plan.cost_usd + 1)


@pytest.mark.parametrize(("max_units", "num_units"), [(1, 1), (8, 2)])
def test_a_plan_on_spot_has_time_for_an_interruption_and_to_wait_for_machines(max_units, num_units):
    deadline, found, chosen = planned_in_time(make_spot_problem(hours=3.0, max_units=max_units), hours_left=4)

    [stage] = chosen.plan.stages
    # By hand: 4 h less 280 s are left for training, and 3.70 h after an interruption; twice as fast are two units,
    # which cost as much as one.
    assert (stage.device_type, stage.num_replicas) == ("cpu-c7i-spot", num_units)
    assert found.throughput_floor_samples_per_s == pytest.approx(
        deadline.spot_floor_samples_per_s * num_units
    )
    spare_s = 4 * 3_600 - 280 - 790 - 3 * 3_600 / num_units
    assert (deadline.spot_until(num_units) - NOW).total_seconds() == pytest.approx(spare_s)


def test_no_plan_on_spot_is_faster_than_it_must_be_where_that_breaks_a_cap():
    problem = make_spot_problem(hours=3.0)

    _, _, chosen = planned_in_time(problem, hours_left=4, max_usd_per_hour=0.5)

    # By hand: two units on spot are 0.6 USD an hour.
    assert [stage.num_replicas for stage in chosen.plan.stages] == [1]


def test_a_night_that_an_interruption_would_make_late_is_bought_on_demand():
    # By hand: eight units need 3,150 s; of an hour 3,270 s are left for training, and 2,480 s after an interruption.
    _, found, chosen = planned_in_time(make_spot_problem(hours=7.0), hours_left=1)

    assert [stage.device_type for stage in chosen.plan.stages] == ["cpu-c7i"]
    assert "cpu-c7i-spot" not in found.device_types


def test_where_only_spot_may_be_bought_a_deadline_does_not_buy_on_demand():
    _, _, chosen = planned_in_time(make_spot_problem(hours=7.0), steady=False, hours_left=1)

    assert [stage.device_type for stage in chosen.plan.stages] == ["cpu-c7i-spot"]
