import numpy as np
import pytest
import torch
from torch import nn

from heterps_core.planning.search.learned.policy_network import AutoregressivePolicy, layer_features
from tests.builders import make_problem

NUM_LAYERS, NUM_TYPES = 4, 3


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
