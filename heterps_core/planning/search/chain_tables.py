"""Plans drawn from first-order chains over the layers, and the gradients of a chain's objectives.

A chain table holds P(type of layer l | type of layer l - 1); any number of plans is drawn from it at once. Both
objectives have closed gradients with respect to the logarithms of the table, so that training a policy that
emits tables needs no automatic differentiation through the chain.

Shape legend: L = layers, T = device types, P = plans. Tables have shape (L, T + 1, T); row T stands for "no previous
layer".
"""

from __future__ import annotations

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints


def sample_chains(tables: Floats, num_plans: int, random: np.random.Generator) -> Ints:
    """Draw P plans from a table of probabilities, shape (L, T + 1, T); return type indices, shape (P, L)."""
    num_layers, num_rows, _ = tables.shape
    thresholds = tables[..., :-1].cumsum(axis=2)
    draws = random.random((num_layers, num_plans, 1))
    plans = np.empty((num_plans, num_layers), dtype=np.int64)
    previous = np.full(num_plans, num_rows - 1)
    for layer in range(num_layers):
        # The last type takes what the thresholds leave, so rounding leaves no draw without a type.
        previous = (draws[layer] > thresholds[layer, previous]).sum(axis=1)
        plans[:, layer] = previous
    return plans


def transition_shares(plans: Ints, num_types: int) -> Floats:
    """Return how often each (layer, previous type, type) occurs in plans, per plan, shape (L, T + 1, T).

    It is the gradient of the mean log-probability of the plans with respect to the log-tables.
    """
    num_plans, num_layers = plans.shape
    previous = np.full_like(plans, num_types)
    previous[:, 1:] = plans[:, :-1]
    cells = (np.arange(num_layers) * (num_types + 1) + previous) * num_types + plans
    shape = (num_layers, num_types + 1, num_types)
    counts = np.bincount(cells.ravel(), minlength=int(np.prod(shape))).reshape(shape)
    return np.asarray(counts / num_plans)


def chain_entropy_gradient(log_tables: Floats) -> Floats:
    """Return the gradient of the entropy of a chain's plans with respect to its log-tables, of the same shape.

    With V_l(t) the entropy of layers l, l + 1, ... after type t at layer l - 1, and m_l(t) the chance of that
    type, dH / d log P_l(t' | t) = m_l(t) P_l(t' | t) (V_{l+1}(t') - log P_l(t' | t)), up to a constant per row
    that the normalisation of the row takes away again.
    """
    num_layers, num_rows, _ = log_tables.shape
    tables = np.exp(log_tables)
    gains = -log_tables
    for layer in range(num_layers - 2, -1, -1):
        entropy_after = (tables[layer + 1, :-1] * gains[layer + 1, :-1]).sum(axis=1)  # V_{l+1}, shape (T,)
        gains[layer] += entropy_after
    chances = np.zeros((num_layers, num_rows))
    chances[0, -1] = 1.0
    for layer in range(1, num_layers):
        chances[layer, :-1] = chances[layer - 1] @ tables[layer - 1]
    return chances[:, :, None] * tables * gains


def likeliest_chain(log_tables: Floats) -> Ints:
    """Return the plan of the highest probability (Viterbi), shape (L, T + 1, T) -> (L,)."""
    num_layers = len(log_tables)
    best = log_tables[0, -1]
    arrivals = np.empty((num_layers, best.size), dtype=np.int64)
    for layer in range(1, num_layers):
        total = best[:, None] + log_tables[layer, :-1]
        arrivals[layer] = total.argmax(axis=0)
        best = total.max(axis=0)
    plan = np.empty(num_layers, dtype=np.int64)
    plan[-1] = best.argmax()
    for layer in range(num_layers - 1, 0, -1):
        plan[layer - 1] = arrivals[layer, plan[layer]]
    return plan


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
