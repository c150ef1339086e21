"""The plan of a night with device types that exceed a quota together and keep within it alone."""

from types import SimpleNamespace

import pytest

from flows.night import plan
from heterps_core.errors import InfeasiblePlanError

SHARING = {"cpu-c7i", "cpu-m7i", "cpu-r7i"}
COSTS = {"cpu-c7i": 3.0, "cpu-m7i": 2.0, "cpu-r7i": 1.0}


@pytest.fixture
def planned(monkeypatch):
    """What was left out of each plan; a plan costs what the type costs that is left of those that share."""
    asked = []

    def plan_night(run, *, without):
        asked.append(without)
        (kept,) = SHARING - without
        if kept == "cpu-m7i":
            raise InfeasiblePlanError("throughput", "m7i is too slow")
        chosen = SimpleNamespace(plan=SimpleNamespace(cost_usd=COSTS[kept]))
        return SimpleNamespace(report=SimpleNamespace(chosen=chosen))

    monkeypatch.setattr(plan, "plan_night", plan_night)
    return asked


def test_of_the_types_of_the_plan_the_one_that_costs_least_alone_is_kept(planned):
    found = plan._with_one_type_of(None, SHARING, used={"cpu-c7i", "cpu-m7i"}, without={"gpu-t4"})

    assert found.report.chosen.plan.cost_usd == COSTS["cpu-c7i"]
    kept = {"cpu-c7i", "cpu-m7i"}
    assert {frozenset(SHARING - without) for without in planned} == {frozenset({name}) for name in kept}
    assert all("gpu-t4" in without for without in planned)


@pytest.mark.parametrize("used", [{"cpu-r7i"}, set()], ids=["one type", "a machine that meets alone"])
def test_a_plan_of_one_type_is_left_to_its_launch(planned, used):
    assert plan._with_one_type_of(None, SHARING, used=used, without=()) is None
    assert planned == []


def test_types_that_were_left_out_and_are_used_where_no_others_are_sold_are_not_planned_again(planned):
    assert plan._with_one_type_of(None, SHARING, used={"cpu-c7i", "cpu-m7i"}, without=SHARING) is None
    assert planned == []
