import statistics
from itertools import product

import numpy as np
import pytest
import torch

from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.planning.search.schedulers.reinforce import (
    ReinforceScheduler,
    ReinforceSettings,
    _TrainedLogits,
)
from tests.builders import make_problem

PROBLEM = make_problem(3, num_layers=8, num_types=3)


def evenly(problem):
    """Logits of a policy that knows nothing."""
    num_types = len(problem.device_types)
    return np.zeros((problem.num_layers, num_types + 1, num_types))


def rounds_of(scheduler, problem, num_rounds):
    """The plans and the ratings of the first rounds of a search."""
    rater = PlanRater(problem, budget_evaluations=100_000)
    proposals = scheduler.propose(problem, budget_evaluations=100_000, seed=0)
    batches, ratings = [next(proposals)], []
    while len(ratings) < num_rounds:
        ratings.append(rater.rate(batches[-1]))
        batches.append(proposals.send(ratings[-1]))
    return batches[:-1], ratings


def test_no_plan_is_rated_twice():
    batches, _ = rounds_of(ReinforceScheduler(first_logits=evenly), PROBLEM, 40)

    plans = np.concatenate(batches)
    assert len(np.unique(plans, axis=0)) == len(plans)


def test_a_search_ends_when_all_plans_are_known():
    problem = make_problem(0, num_layers=3, num_types=2)

    result = ReinforceScheduler().search(problem, budget_evaluations=10_000, seed=0)

    assert result.plan.num_evaluations == len(list(product(range(2), repeat=3)))
    assert result.plan.optimality_gap == pytest.approx(0, abs=1e-12)


def test_a_search_ends_after_its_rounds():
    settings = ReinforceSettings(plans_per_round=16, patience_rounds=3, rounds_per_layer=2)

    result = ReinforceScheduler(settings).search(PROBLEM, budget_evaluations=1_000_000, seed=0)

    assert 1 <= result.plan.num_evaluations <= 16 * 2 * PROBLEM.num_layers


def test_logits_that_know_nothing_learn_to_draw_cheaper_plans():
    problem = make_problem(3, num_layers=16, num_types=4)

    _, ratings = rounds_of(ReinforceScheduler(first_logits=evenly), problem, 16)

    medians = [np.median(each.cost_usd[each.shortfalls == 0]) for each in ratings]
    assert np.median(medians[10:]) < medians[0] / 2


def test_the_first_plan_is_the_likeliest_one_of_the_policy():
    logits = evenly(PROBLEM)
    wanted = np.array([0, 0, 1, 1, 1, 2, 0, 0])
    logits[np.arange(8), :, wanted] = 1.0
    scheduler = ReinforceScheduler(first_logits=lambda problem: logits)

    first = next(scheduler.propose(PROBLEM, budget_evaluations=1, seed=0))[0]

    assert first.tolist() == wanted.tolist()


def test_a_step_is_that_of_the_adam_of_torch():
    random = np.random.default_rng(0)
    first, gradients = random.normal(size=(4, 3, 2)), random.normal(size=(5, 4, 3, 2))
    pairs = torch.zeros(4, 3, 2, dtype=torch.float64, requires_grad=True)
    types = torch.zeros(4, 1, 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([pairs, types], lr=0.1, maximize=True)
    logits = _TrainedLogits(first, 0.1)

    for gradient in gradients:
        logits.ascend(gradient)
        pairs.grad, types.grad = torch.from_numpy(gradient), torch.from_numpy(gradient.sum(1, keepdims=True))
        optimizer.step()

    np.testing.assert_allclose(logits.values(), first + (pairs + types).detach().numpy(), rtol=1e-6)


@pytest.fixture(scope="module")
def unseen():
    """Problems with seeds that the policy was not trained on, and what they cost at least."""
    problems = [make_problem(seed, num_layers=16, num_types=4, max_units=400) for seed in range(40, 47)]
    return [(problem, find_optimum(problem).cost_usd) for problem in problems]


def median_gap(scheduler, unseen, *, budget_evaluations):
    gaps = [
        scheduler.search(problem, budget_evaluations=budget_evaluations, seed=0).plan.cost_usd / cost_usd - 1
        for problem, cost_usd in unseen
    ]
    return statistics.median(gaps)


def test_the_policy_alone_is_within_one_percent_of_the_optimum_where_one_that_knows_nothing_is_far_off(
    unseen,
):
    assert median_gap(ReinforceScheduler(), unseen, budget_evaluations=256) <= 0.01
    assert median_gap(ReinforceScheduler(first_logits=evenly), unseen, budget_evaluations=256) > 0.3


def test_learning_finds_much_cheaper_plans_than_drawing_from_the_same_logits(unseen):
    learning = ReinforceScheduler(first_logits=evenly)
    drawing = ReinforceScheduler(ReinforceSettings(learning_rate=0.0), first_logits=evenly)

    learning_gap, drawing_gap = (
        median_gap(search, unseen, budget_evaluations=2_000) for search in (learning, drawing)
    )

    assert learning_gap < drawing_gap / 2
