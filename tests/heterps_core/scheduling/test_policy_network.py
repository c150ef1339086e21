from itertools import product

import numpy as np
import pytest
import torch

from heterps_core.scheduling.policy_network import (
    AutoregressivePolicy,
    ChainTablePolicy,
    chain_entropy,
    chain_log_probabilities,
    layer_features,
    sample_chains,
)
from tests.builders import make_problem

NUM_LAYERS, NUM_TYPES = 4, 3
ALL_PLANS = np.array(list(product(range(NUM_TYPES), repeat=NUM_LAYERS)))


@pytest.fixture(scope="module")
def log_tables():
    features = layer_features(make_problem(0, num_layers=NUM_LAYERS, num_types=NUM_TYPES))
    torch.manual_seed(0)
    policy = ChainTablePolicy(
        features.shape[1], NUM_TYPES, num_hidden=8, stay_bias=1.0, type_leanings=np.array([0.5, 0.0, -1.0])
    )
    return policy(features).detach().double()


def test_probabilities_of_all_plans_sum_to_one(log_tables):
    total = chain_log_probabilities(log_tables, ALL_PLANS).exp().sum()

    assert float(total) == pytest.approx(1, abs=1e-6)


def test_entropy_equals_the_sum_over_all_plans(log_tables):
    log_probabilities = chain_log_probabilities(log_tables, ALL_PLANS)

    expected = -(log_probabilities.exp() * log_probabilities).sum()

    assert float(chain_entropy(log_tables)) == pytest.approx(float(expected), rel=1e-6)


def test_plans_are_drawn_as_often_as_their_probability_says(log_tables):
    drawn = sample_chains(log_tables.exp().numpy(), 20_000, np.random.default_rng(0))

    codes = NUM_TYPES ** np.arange(NUM_LAYERS - 1, -1, -1)
    frequencies = np.bincount(drawn @ codes, minlength=len(ALL_PLANS)) / len(drawn)

    expected = chain_log_probabilities(log_tables, ALL_PLANS).exp().numpy()
    assert np.abs(frequencies - expected).max() < 0.01  # three standard deviations of 20,000 draws


def test_a_stay_bias_makes_longer_stages():
    features = layer_features(make_problem(0, num_layers=20, num_types=3))

    def changes(stay_bias):
        torch.manual_seed(0)
        policy = ChainTablePolicy(
            features.shape[1], 3, num_hidden=8, stay_bias=stay_bias, type_leanings=np.zeros(3)
        )
        plans = sample_chains(policy(features).detach().double().exp().numpy(), 200, np.random.default_rng(0))
        return (plans[:, 1:] != plans[:, :-1]).mean()

    assert changes(3.0) < changes(0.0) / 2


def test_features_are_finite_even_where_all_layers_are_alike():
    problem = make_problem(0, num_layers=1, num_types=2)

    assert torch.isfinite(layer_features(problem)).all()


def test_autoregressive_log_probability_is_that_of_the_choices_made():
    features = layer_features(make_problem(0, num_layers=NUM_LAYERS, num_types=NUM_TYPES))
    torch.manual_seed(0)
    policy = AutoregressivePolicy(features.shape[1], NUM_TYPES, num_hidden=8)

    plans, log_probabilities, entropy = policy.sample(features, 4_000, torch.Generator().manual_seed(0))

    # Equal plans have equal probability, and the mean surprise is the entropy, up to sampling.
    _, groups = np.unique(plans.numpy(), axis=0, return_inverse=True)
    for group in range(5):
        assert log_probabilities[groups == group].detach().numpy().std() < 1e-5
    assert -log_probabilities.mean().item() == pytest.approx(entropy.item(), rel=0.02)
