from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import save

from heterps_core.errors import ConfigurationError
from heterps_core.planning.search.learned.policy_state import PolicyState
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.planning.search.schedulers.reinforce import ReinforceScheduler, ReinforceSettings
from tests.builders import make_problem

PROBLEM = make_problem(3, num_layers=8, num_types=3)


def rounds_of(scheduler, problem, num_rounds):
    """The plans of the first rounds of a search."""
    rater = PlanRater(problem, budget_evaluations=100_000)
    proposals = scheduler.propose(problem, budget_evaluations=100_000, seed=0)
    batches = [next(proposals)]
    while len(batches) < num_rounds:
        batches.append(proposals.send(rater.rate(batches[-1])))
    return batches


def test_no_plan_is_rated_twice():
    plans = np.concatenate(rounds_of(ReinforceScheduler(), PROBLEM, 40))

    assert len(np.unique(plans, axis=0)) == len(plans)


def test_a_search_ends_when_all_plans_are_known():
    problem = make_problem(0, num_layers=3, num_types=2)

    result = ReinforceScheduler().search(problem, budget_evaluations=10_000, seed=0)

    assert result.plan.num_evaluations == len(list(product(range(2), repeat=3)))
    assert result.plan.optimality_gap == pytest.approx(0, abs=1e-12)


def test_a_search_ends_after_its_rounds():
    settings = ReinforceSettings(plans_per_round=16, patience_rounds=3, rounds_per_layer=2)

    result = ReinforceScheduler(settings).search(PROBLEM, budget_evaluations=1_000_000, seed=0)

    assert 16 <= result.plan.num_evaluations <= 16 * 2 * PROBLEM.num_layers


def test_a_policy_learns_to_draw_cheaper_plans():
    settings = ReinforceSettings(exploring_fraction=0.0)
    rater = PlanRater(PROBLEM, budget_evaluations=100_000)
    proposals = ReinforceScheduler(settings).propose(PROBLEM, budget_evaluations=100_000, seed=0)
    batch, medians = next(proposals), []
    for _ in range(16):
        ratings = rater.rate(batch)
        medians.append(np.median(ratings.cost_usd[ratings.shortfalls == 0]))
        batch = proposals.send(ratings)

    # Late rounds hold few plans that are new, so one of them alone says little.
    assert np.median(medians[10:]) < medians[0] / 2


def test_a_warm_start_finds_a_plan_near_the_old_one_at_once():
    problem = make_problem(5, num_layers=16, num_types=4)
    cold, policy = ReinforceScheduler().search_and_keep(problem, budget_evaluations=20_000, seed=0)

    warm = ReinforceScheduler(warm_start=policy).search(problem, budget_evaluations=512, seed=1)
    short = ReinforceScheduler().search(problem, budget_evaluations=512, seed=1)

    assert warm.plan.cost_usd < cold.plan.cost_usd * 1.01
    assert warm.plan.cost_usd < short.plan.cost_usd


def test_keeping_the_policy_does_not_change_the_plan(tmp_path):
    result, policy = ReinforceScheduler().search_and_keep(PROBLEM, budget_evaluations=2_000, seed=4)
    again = ReinforceScheduler().search(PROBLEM, budget_evaluations=2_000, seed=4)
    policy.save(tmp_path / "policy.safetensors")
    from_file = PolicyState.load(tmp_path / "policy.safetensors")

    assert replace(again.plan, search_seconds=0.0) == replace(result.plan, search_seconds=0.0)
    assert all(np.array_equal(from_file.arrays[name], array) for name, array in policy.arrays.items())


def test_a_warm_start_from_another_number_of_types_is_refused():
    _, policy = ReinforceScheduler().search_and_keep(PROBLEM, budget_evaluations=500, seed=0)
    other = make_problem(3, num_layers=8, num_types=4)

    with pytest.raises(ConfigurationError, match="as many device types and kinds of layers"):
        ReinforceScheduler(warm_start=policy).search(other, budget_evaluations=500, seed=0)


def search_in(folder, problem, *, budget_evaluations=500):
    return ReinforceScheduler().search_from_last(
        problem, policies=folder, budget_evaluations=budget_evaluations, seed=0
    )


def evaluations_until(result, cost_usd):
    return next(
        point.num_evaluations for point in result.history if point.best_cost_usd <= cost_usd * (1 + 1e-9)
    )


def test_the_next_search_starts_from_the_last_policy_and_reaches_its_cost_in_fewer_evaluations(tmp_path):
    problem = make_problem(5, num_layers=16, num_types=4)
    policies = tmp_path / "policies"
    first = search_in(policies, problem, budget_evaluations=8_000)
    second = search_in(policies, problem, budget_evaluations=8_000)

    assert second.plan.cost_usd <= first.plan.cost_usd * (1 + 1e-9)
    assert evaluations_until(second, first.plan.cost_usd) < evaluations_until(first, first.plan.cost_usd) / 2
    assert len(list(policies.iterdir())) == 1


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: b"",
        lambda content: content[:-10],
        lambda content: content[:-4] + np.float32("nan").tobytes(),
        lambda content: save({"weight": np.zeros((2, 3), dtype=np.float32)}),
    ],
)
def test_a_policy_file_that_is_damaged_or_does_not_fit_is_told_and_replaced(tmp_path, caplog, damaged):
    cold = search_in(tmp_path, PROBLEM)
    [path] = tmp_path.iterdir()
    kept = path.read_bytes()
    path.write_bytes(damaged(kept))

    again = search_in(tmp_path, PROBLEM)

    assert len(caplog.records) == 1
    assert "without an earlier policy" in caplog.text
    assert replace(again.plan, search_seconds=0.0) == replace(cold.plan, search_seconds=0.0)
    assert path.read_bytes() == kept


def test_a_policy_that_cannot_be_kept_costs_a_line_and_not_the_plan(tmp_path, caplog):
    (tmp_path / "policies").write_text("a file where the folder should be")

    found = search_in(tmp_path / "policies", PROBLEM)

    assert found.plan.num_evaluations > 0
    assert "is not kept" in caplog.text


def num_optima_reached(settings):
    """How many of 16 problems of 16 layers x 4 types a search solves within 0.1 % by 4,000 evaluations."""
    search = ReinforceScheduler(settings)
    problems = [
        make_problem(seed, num_layers=16, num_types=4, floor_samples_per_s=5_000) for seed in range(16)
    ]
    return sum(
        search.search(problem, budget_evaluations=4_000, seed=seed).plan.optimality_gap <= 1e-3
        for seed, problem in enumerate(problems)
    )


def test_an_elite_of_many_plans_reaches_more_optima_than_one_of_a_single_plan():
    of_many, of_one = (
        num_optima_reached(ReinforceSettings()),
        num_optima_reached(ReinforceSettings(elite_fraction=0.001)),
    )

    assert of_many >= 14
    assert of_many > of_one
