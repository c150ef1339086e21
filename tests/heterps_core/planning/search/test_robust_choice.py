from dataclasses import replace

import pytest

from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.robust_choice import choose_robust
from heterps_core.plans.scheduling_plan import Stage
from tests.heterps_core.planning.explain.test_measurement_worth import KEPT, problem
from tests.heterps_core.planning.explain.trying_all import (
    feasible_plans,
    tiny_problem,
    with_spread,
    with_times,
)

INFINITY = float("inf")
COMPUTING, COMMUNICATION = "computing", "communication"
OTHER = (Stage(0, 0, "cpu-b", 1),)


def costs_by_trying_all(problem, case):
    """Every plan that keeps all constraints where (quantity, device type) of the case take so many times as long."""
    factors = {COMPUTING: {}, COMMUNICATION: {}}
    for (quantity, name), factor in case.items():
        factors[quantity][name] = factor
    return {stages: usd for _, stages, usd in feasible_plans(with_times(problem, **factors))}


@pytest.mark.parametrize("floor_samples_per_s", [0.0, 2_000.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_plan_of_least_worst_regret_by_trying_all_plans_in_all_cases(
    seed, floor_samples_per_s
):
    problem = tiny_problem(seed, max_units=3, floor_samples_per_s=floor_samples_per_s)
    names = list(problem.device_types)
    stages = find_optimum(problem).stages
    spread = with_spread(problem, dict.fromkeys(names, 0.3), communication=0.3)

    choice = choose_robust(spread, stages)

    both = [(quantity, name) for quantity in (COMPUTING, COMMUNICATION) for name in names]
    cases = [{}, *({each: 1 + end} for each in both for end in (-0.3, 0.3))]
    cases += [dict.fromkeys(both, 1 + end) for end in (-0.3, 0.3)]
    cases += [
        {each: 1 + (end if each == odd else -end) for each in both} for odd in both for end in (-0.3, 0.3)
    ]
    costs = [costs_by_trying_all(problem, case) for case in cases]
    candidates = {stages} | {min(usd, key=usd.__getitem__) for usd in costs if usd}
    for plan in list(candidates):
        used = {stage.device_type for stage in plan}
        case = {each: 1.3 if each[1] in used else 0.7 for each in both}
        if case not in cases:
            cases.append(case)
            costs.append(costs_by_trying_all(problem, case))
    costs = [usd for usd in costs if usd]
    candidates |= {min(usd, key=usd.__getitem__) for usd in costs}

    def worst(plan):
        shares = [usd.get(plan, INFINITY) / min(usd.values()) - 1 for usd in costs]
        kept = [share for share in shares if share < INFINITY]
        return len(shares) - len(kept), max(kept)

    assert (choice.num_cases, choice.num_plans) == (len(costs), len(candidates))
    for plan, regret in ((choice.stages, choice.regret), (stages, choice.regret_at_hand)):
        assert (regret.num_broken, pytest.approx(regret.share, abs=1e-9)) == worst(plan)
    least = min(worst(plan) for plan in candidates)
    assert (choice.regret.num_broken, choice.regret.share) == (least[0], pytest.approx(least[1], abs=1e-9))
    assert choice.cost_usd == pytest.approx(costs[0][choice.stages])


def test_a_floor_that_the_cheapest_plan_may_miss_is_kept_by_the_robust_one():
    # By hand: a reaches 1,000 samples/s, 667 at the slow end; b 833, for 4.32 USD where a costs 3.60 and fast 1.80.
    known = problem(floor_samples_per_s=750.0)
    layer = replace(known.layers[0], compute_relative_spread={"cpu-a": 0.5})

    choice = choose_robust(replace(known, layers=(layer,)), KEPT)

    assert (choice.stages, choice.num_cases, choice.num_plans) == (OTHER, 3, 2)
    assert (choice.regret_at_hand.num_broken, choice.regret_at_hand.share) == (1, 0.0)
    assert (choice.regret.num_broken, choice.regret.share) == (0, pytest.approx(4.32 / 1.80 - 1))
    assert [str(each) for each in choice.regret.fast] == ["computing on cpu-a"]
    assert str(choice).startswith(
        "+20.00% at the estimated times for a worst regret of 140.0% (computing on cpu-a at the fast end) in place "
        "of 0.0% (the estimated times) and 1 case in which it breaks a limit: the least of 2 plans in 3 cases"
    )


def test_without_a_spread_the_plan_stays():
    choice = choose_robust(problem(spread=0.0), KEPT)

    assert choice.stages == KEPT
    assert str(choice) == "no time has a spread, so there is nothing to choose"


def test_a_plan_that_is_cheapest_in_every_case_says_so():
    choice = choose_robust(problem(spread=0.05), KEPT)

    assert str(choice) == "this plan is the cheapest in all 9 cases of times off by their spread"


def test_hardware_in_two_markets_is_off_together():
    # By hand: on demand and on spot a is the same, so b is cheaper than both where a is slow.
    one = problem(spread=0.5)
    layer = one.layers[0]
    both = {"cpu-a": 0.1, "cpu-a-spot": 0.1, "cpu-b": 0.12}
    unit = one.device_types["cpu-a"]
    two = replace(
        one,
        layers=(
            replace(
                layer,
                compute_seconds=both,
                communication_seconds=dict.fromkeys(both, 0.0),
                compute_relative_spread={"cpu-a": 0.5, "cpu-a-spot": 0.5},
            ),
        ),
        device_types={"cpu-a": unit, "cpu-a-spot": unit, "cpu-b": one.device_types["cpu-b"]},
    )

    choice = choose_robust(two, KEPT)

    assert choice.num_cases == 3
    assert choice.regret_at_hand.share == pytest.approx(5.40 / 4.32 - 1)
