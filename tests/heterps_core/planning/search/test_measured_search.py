"""Measurements are stood in for by times that the test defines, so that the best of all plans is known."""

from itertools import product

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.planning.search.measured_search import (
    MEASURED_METHODS,
    run_cost_usd,
    search_by_measuring,
)
from heterps_core.planning.search.schedulers.tapp import TappScheduler, TappSettings, root_cost_rewards
from tests.builders import make_problem

pytestmark = pytest.mark.slow

NUM_LAYERS = 6
ALL_PLANS = list(product(range(2), repeat=NUM_LAYERS))
PENALTY_S = 9.0


def new_tapp():
    settings = TappSettings(groupings_per_round=4, placements_per_grouping=2, learning_rate=0.003)
    return TappScheduler(settings, rewards=root_cost_rewards)


new_reinforce = MEASURED_METHODS["reinforce"]


class Stopwatch:
    """Stands in for measuring: layers take 1 to 6 s on device 0 and 3 to 8 s on device 1, 1 s for each boundary,
    and the slowest device counts. More than three stages fail."""

    def __init__(self):
        self.measured = []

    def __call__(self, plan):
        self.measured.append(plan)
        return self.seconds(plan)

    @staticmethod
    def seconds(plan):
        num_boundaries = sum(plan[layer] != plan[layer + 1] for layer in range(NUM_LAYERS - 1))
        if num_boundaries > 2:
            raise TrainingError("too many stages")
        loads = [0.0, 0.0]
        for layer, device in enumerate(plan):
            loads[device] += layer + (1.0, 3.0)[device]
        return (max(loads) + num_boundaries) / 10

    def all_seconds(self):
        for plan in ALL_PLANS:
            try:
                yield self.seconds(plan)
            except TrainingError:
                continue


def search(scheduler, stopwatch, **changed):
    problem = make_problem(0, num_layers=NUM_LAYERS, num_types=2, max_units=1)
    arguments = {"budget_measurements": 60, "penalty_seconds": PENALTY_S, "seed": 0} | changed
    return search_by_measuring(scheduler, problem, stopwatch, **arguments)


@pytest.mark.parametrize("new_scheduler", [new_tapp, new_reinforce])
def test_the_search_finds_the_fastest_of_all_plans(new_scheduler):
    stopwatch = Stopwatch()

    found = search(new_scheduler(), stopwatch)

    (fastest,) = found.fastest(1)
    assert fastest.step_seconds == min(stopwatch.all_seconds())
    assert stopwatch.seconds(fastest.assignment) == fastest.step_seconds


@pytest.mark.parametrize("new_scheduler", [new_tapp, new_reinforce, MEASURED_METHODS["genetic"]])
def test_no_plan_is_measured_twice_and_none_beyond_the_budget(new_scheduler):
    stopwatch = Stopwatch()

    found = search(new_scheduler(), stopwatch, budget_measurements=21)

    assert len(stopwatch.measured) == len(set(stopwatch.measured)) == 21
    assert [plan.assignment for plan in found.plans] == stopwatch.measured
    assert found.num_proposed >= 21


def at_most_three_stages(plan):
    """The stopwatch's own limit, known before: a plan by its borders, None beyond the limit."""
    borders = tuple(layer for layer in range(1, NUM_LAYERS) if plan[layer] != plan[layer - 1])
    return borders if len(borders) <= 2 else None


def test_a_plan_beyond_a_known_limit_is_reported_as_failed_and_never_measured():
    stopwatch = Stopwatch()

    found = search(new_tapp(), stopwatch, runs_as=at_most_three_stages, budget_measurements=12)

    assert found.num_refused > 0
    assert not any(plan.has_failed for plan in found.plans)
    assert all(at_most_three_stages(plan) is not None for plan in stopwatch.measured)
    assert len(stopwatch.measured) == 12  # refused plans take nothing of the budget


def test_plans_that_run_alike_are_measured_once():
    stopwatch = Stopwatch()

    search(new_tapp(), stopwatch, runs_as=at_most_three_stages, budget_measurements=60)

    # By hand: one stage, 5 cuts in two and 10 in three; each may have either device first.
    assert len(stopwatch.measured) <= 16
    assert len({at_most_three_stages(plan) for plan in stopwatch.measured}) == len(stopwatch.measured)


@pytest.mark.parametrize("budget", [1, 2, 10])
def test_the_first_plans_are_measured_first_and_within_the_budget(budget):
    stopwatch, first_plans = Stopwatch(), [(0,) * NUM_LAYERS, (0, 0, 0, 1, 1, 1)]

    found = search(new_tapp(), stopwatch, first_plans=first_plans, budget_measurements=budget)

    assert stopwatch.measured[:2] == first_plans[:budget]
    assert len(found.plans) == budget
    assert found.fastest(1)[0].step_seconds <= stopwatch.seconds(first_plans[0])


def test_a_budget_above_the_number_of_plans_comes_to_an_end():
    stopwatch = Stopwatch()

    search(new_tapp(), stopwatch, budget_measurements=70)

    assert len(stopwatch.measured) <= len(ALL_PLANS)


def test_the_same_seed_tries_the_same_plans():
    first, second, other = (search(new_tapp(), Stopwatch(), seed=seed).plans for seed in (3, 3, 4))

    assert first == second != other


def test_a_plan_that_fails_stands_at_the_penalty_and_is_never_the_best():
    found = search(new_tapp(), Stopwatch())

    failed = [plan for plan in found.plans if plan.has_failed]
    assert failed
    assert {plan.step_seconds for plan in failed} == {PENALTY_S}
    ran = found.fastest(len(found.plans))
    assert len(ran) == len(found.plans) - len(failed)
    assert [plan.step_seconds for plan in ran] == sorted(plan.step_seconds for plan in ran)


def test_what_tapp_is_rewarded_with_is_the_root_of_the_step_time():
    problem = make_problem(0, num_layers=NUM_LAYERS, num_types=2, max_units=2)
    prices = [unit.price_usd_per_hour for unit in problem.device_types.values()]

    costs = run_cost_usd(problem, [1.0, 4.0])

    # 100 million samples in batches of 4096; two units of each type are held for the whole run.
    hours = 1e8 / 4096 / 3600
    assert costs == pytest.approx([2 * sum(prices) * hours, 8 * sum(prices) * hours])
    rewards = np.sqrt(costs)
    assert rewards[1] == pytest.approx(2 * rewards[0])


def test_a_budget_below_one_is_refused():
    with pytest.raises(ConfigurationError, match="at least 1 evaluation"):
        search(new_tapp(), Stopwatch(), budget_measurements=0)
