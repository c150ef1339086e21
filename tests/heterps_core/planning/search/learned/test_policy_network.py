import numpy as np
import pytest
import torch
from torch import nn

from heterps_core.planning.search.chain_tables import sample_chains
from heterps_core.planning.search.learned.policy_network import (
    AutoregressivePolicy,
    ChainTablePolicy,
    layer_features,
)
from tests.builders import make_problem

NUM_LAYERS, NUM_TYPES = 4, 3


def chain_policy(num_features, *, stay_bias, type_leanings=(0.0, 0.0, 0.0)):
    torch.manual_seed(0)
    return ChainTablePolicy(
        num_features, NUM_TYPES, num_hidden=8, stay_bias=stay_bias, type_leanings=np.array(type_leanings)
    )


def test_every_row_of_a_chain_table_is_a_distribution():
    features = layer_features(make_problem(0, num_layers=NUM_LAYERS, num_types=NUM_TYPES))

    log_tables = chain_policy(features.shape[1], stay_bias=1.0, type_leanings=(0.5, 0.0, -1.0))(features)

    assert log_tables.shape == (NUM_LAYERS, NUM_TYPES + 1, NUM_TYPES)
    torch.testing.assert_close(log_tables.exp().sum(dim=2), torch.ones(NUM_LAYERS, NUM_TYPES + 1))


def test_a_stay_bias_makes_longer_stages():
    features = layer_features(make_problem(0, num_layers=20, num_types=NUM_TYPES))

    def changes(stay_bias):
        tables = chain_policy(features.shape[1], stay_bias=stay_bias)(features).detach().double().exp()
        choices = np.zeros((200, 20), dtype=np.int64)
        plans = sample_chains(tables.numpy()[None], choices, np.random.default_rng(0))
        return (plans[:, 1:] != plans[:, :-1]).mean()

    assert changes(3.0) < changes(0.0) / 2


def test_what_is_learned_of_a_type_holds_for_previous_types_that_were_never_drawn():
    features = layer_features(make_problem(0, num_layers=NUM_LAYERS, num_types=NUM_TYPES))
    policy = chain_policy(features.shape[1], stay_bias=0.0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    before = policy(features)[2, 1, 2].item()
    for _ in range(20):  # type 2 in layer 2 is learned after type 0 alone
        optimizer.zero_grad()
        torch.autograd.backward(-policy(features)[2, 0, 2])
        optimizer.step()

    assert policy(features)[2, 1, 2].item() > before + 0.3


def test_features_are_finite_even_where_all_layers_are_alike():
    problem = make_problem(0, num_layers=1, num_types=2)

    assert torch.isfinite(layer_features(problem)).all()


@pytest.mark.parametrize("cell_class", [nn.LSTMCell, nn.RNNCell])
def test_autoregressive_log_probability_is_that_of_the_choices_made(cell_class):
    features = layer_features(make_problem(0, num_layers=NUM_LAYERS, num_types=NUM_TYPES))
    torch.manual_seed(0)
    policy = AutoregressivePolicy(features.shape[1], NUM_TYPES, num_hidden=8, cell_class=cell_class)

    plans, log_probabilities, entropy = policy.sample(features, 4_000, torch.Generator().manual_seed(0))

    # Equal plans have equal probability, and the mean surprise is the entropy, up to sampling.
    _, groups = np.unique(plans.numpy(), axis=0, return_inverse=True)
    for group in range(5):
        assert log_probabilities[groups == group].detach().numpy().std() < 1e-5
    assert -log_probabilities.mean().item() == pytest.approx(entropy.item(), rel=0.02)
