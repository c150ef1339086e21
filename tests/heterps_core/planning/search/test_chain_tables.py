from itertools import product

import numpy as np
import pytest
import torch

from heterps_core.planning.search.chain_tables import (
    chain_entropy_gradient,
    likeliest_chain,
    sample_chains,
    transition_shares,
)

NUM_LAYERS, NUM_TYPES = 4, 3
ALL_PLANS = np.array(list(product(range(NUM_TYPES), repeat=NUM_LAYERS)))


def random_logits(seed):
    return np.random.default_rng(seed).normal(size=(NUM_LAYERS, NUM_TYPES + 1, NUM_TYPES))


def log_tables_of(logits):
    return torch.log_softmax(torch.as_tensor(logits), dim=-1)


def log_probabilities(log_tables, plans):
    """log P of plans, added up layer by layer, shape (P,)."""
    rows = []
    for plan in plans.tolist():
        previous = [NUM_TYPES, *plan[:-1]]
        rows.append(sum(log_tables[layer, previous[layer], plan[layer]] for layer in range(NUM_LAYERS)))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def tables():
    return log_tables_of(random_logits(0)).exp().numpy()


def frequencies(plans):
    codes = NUM_TYPES ** np.arange(NUM_LAYERS - 1, -1, -1)
    return np.bincount(plans @ codes, minlength=len(ALL_PLANS)) / len(plans)


def test_plans_are_drawn_as_often_as_their_probability_says(tables):
    drawn = sample_chains(tables, 20_000, np.random.default_rng(0))

    expected = log_probabilities(torch.as_tensor(tables).log(), ALL_PLANS).exp().numpy()
    assert np.abs(frequencies(drawn) - expected).max() < 0.01  # three standard deviations of 20,000 draws


def test_rounding_leaves_no_draw_without_a_type():
    tables = np.full((1, 11, 10), 0.1)  # ten times 0.1 adds up to less than 1

    drawn = sample_chains(tables, 10_000, np.random.default_rng(0))

    assert set(np.unique(drawn)) == set(range(10))


def test_transition_shares_are_the_gradient_of_the_mean_log_probability():
    log_tables = log_tables_of(random_logits(0)).requires_grad_()
    plans = ALL_PLANS[[0, 5, 5, 80, 17]]

    log_probabilities(log_tables, plans).mean().backward()

    np.testing.assert_allclose(transition_shares(plans, NUM_TYPES), log_tables.grad.numpy(), atol=1e-12)


def test_the_entropy_gradient_is_that_of_the_sum_over_all_plans():
    logits = torch.as_tensor(random_logits(2)).requires_grad_()
    log_p = log_probabilities(log_tables_of(logits), ALL_PLANS)
    (-(log_p.exp() * log_p).sum()).backward()
    expected, logits.grad = logits.grad.clone(), None

    log_tables = log_tables_of(logits)
    log_tables.backward(torch.as_tensor(chain_entropy_gradient(log_tables.detach().numpy())))

    np.testing.assert_allclose(logits.grad.numpy(), expected.numpy(), atol=1e-12)


def test_the_likeliest_chain_has_the_highest_log_probability_of_all_plans():
    for seed in range(5):
        log_tables = log_tables_of(random_logits(seed))
        of_all = log_probabilities(log_tables, ALL_PLANS)

        plan = likeliest_chain(log_tables.numpy())

        assert plan.tolist() == ALL_PLANS[int(of_all.argmax())].tolist()
