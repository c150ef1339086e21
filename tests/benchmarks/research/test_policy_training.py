import numpy as np
import pytest
import torch

from heterps_core.planning.search.learned.placement_policy import PlacementPolicy, policy_features
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.plan_rater import PlanRater
from tests.benchmarks.research import policy_training
from tests.benchmarks.research.policy_training import (
    Example,
    good_placement,
    imitate,
    surprise,
    widened_policy,
)
from tests.builders import make_problem

PROBLEMS = [make_problem(seed, num_layers=6, num_types=3, max_units=400) for seed in range(4)]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_the_policy_imitates_costs_little_more_than_the_optimum(problem):
    rater = PlanRater(problem, budget_evaluations=1)

    rater.rate(good_placement(problem)[None])

    ratio = rater.history[-1].best_cost_usd / find_optimum(problem).cost_usd
    assert 1 - 1e-12 <= ratio <= 1.05


def test_where_units_are_scarce_what_is_imitated_keeps_the_caps():
    problem = make_problem(2, num_layers=12, num_types=4, scarce=True, floor_samples_per_s=2_000)

    assert PlanRater(problem, budget_evaluations=1).rate(good_placement(problem)[None]).shortfalls[0] == 0


def test_the_surprise_is_the_mean_negative_logarithm_of_each_choice_after_the_one_before():
    torch.manual_seed(0)
    placements = [[0, 0, 2, 1, 1, 0], [1, 1, 1, 1, 2, 2]]
    batch = [
        Example(policy_features(problem), torch.tensor(placement))
        for problem, placement in zip(PROBLEMS, placements, strict=False)
    ]
    policy = PlacementPolicy(batch[0].features.shape[2], 8)

    expected = []
    for example, placement in zip(batch, placements, strict=True):
        table = policy(example.features[None])[0]
        expected += [
            -table[layer, ([3, *placement])[layer], placement[layer]].item()
            for layer in range(len(placement))
        ]

    assert surprise(policy, batch).item() == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_widened_policy_ignores_the_features_that_its_weights_do_not_know():
    torch.manual_seed(0)
    features = policy_features(PROBLEMS[0])[None]
    narrow = PlacementPolicy(features.shape[3] - 2, 8)

    wide = widened_policy(narrow.state_dict(), features.shape[3])

    torch.testing.assert_close(wide(features), narrow(features[..., :-2]))


def test_a_policy_that_imitates_placements_is_less_surprised_by_them(monkeypatch):
    monkeypatch.setattr(policy_training, "NUM_EPOCHS", 5)
    torch.manual_seed(0)
    examples = [
        Example(policy_features(problem), torch.tensor(good_placement(problem))) for problem in PROBLEMS
    ]
    policy = PlacementPolicy(examples[0].features.shape[2], 8)
    before = surprise(policy, examples).item()

    imitate(policy, examples, np.random.default_rng(0))

    assert surprise(policy, examples).item() < before
