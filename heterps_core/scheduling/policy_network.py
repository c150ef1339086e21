"""LSTM policies over the layers of a chain: what the learning searches sample their plans from.

Both policies read the layers in order and emit, for each, a distribution over device types. They differ in how
the previous choice enters: `ChainTablePolicy` answers for every previous type at once, so that one pass gives a
table from which any number of plans is drawn; `AutoregressivePolicy` is fed the choice itself, as in the HeterPS
paper (arXiv 2111.10635).

Shape legend: L = layers, T = device types, F = features, H = hidden units, P = plans.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heterps_core.scheduling.problem import SchedulingProblem


def layer_features(problem: SchedulingProblem) -> Tensor:
    """Return what a policy sees of each layer, shape (L, F).

    The paper's features (index, kind, input size, weight size, communication time) and the compute times
    per device type; sizes and times as standardised logarithms.
    """
    kinds = sorted({layer.kind for layer in problem.layers})
    names = problem.device_type_names
    outputs = [layer.output_bytes_per_sample for layer in problem.layers]
    amounts = np.array(
        [
            [
                layer.state_bytes,
                layer.output_bytes_per_sample,
                outputs[index - 1] if index else 0.0,
                *(layer.compute_seconds[name] * _TICKS_PER_S for name in names),
                *(layer.communication_seconds[name] * _TICKS_PER_S for name in names),
            ]
            for index, layer in enumerate(problem.layers)
        ]
    )
    logs = np.log1p(amounts)
    spread = logs.std(axis=0)
    standardised = (logs - logs.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    flags = [
        [
            float(layer.is_sharded),
            index / problem.num_layers,
            *(float(layer.kind == kind) for kind in kinds),
        ]
        for index, layer in enumerate(problem.layers)
    ]
    return torch.tensor(np.concatenate([standardised, flags], axis=1), dtype=torch.float32)


_TICKS_PER_S = 1e6
"""Times enter in microseconds, so that log1p keeps the small ones apart."""


class ChainTablePolicy(nn.Module):
    """P(type of layer l | type of layer l - 1) for all pairs, from one pass of the LSTM.

    Args:
        num_features: F.
        num_types: T.
        num_hidden: H.
        stay_bias: Added to the logit of keeping the previous type, so that a fresh policy draws runs of
            layers instead of noise.
        type_leanings: Added to the logit of each type in every layer, shape (T,); lets fresh policies
            begin in different corners.
    """

    def __init__(
        self,
        num_features: int,
        num_types: int,
        *,
        num_hidden: int,
        stay_bias: float,
        type_leanings: NDArray[np.float64],
    ) -> None:
        super().__init__()
        self.num_types = num_types
        self.lstm = nn.LSTM(num_features, num_hidden)
        # One row of logits per previous type, and one for the first layer, which has none.
        self.head = nn.Linear(num_hidden, (num_types + 1) * num_types)
        prior = torch.zeros(num_types + 1, num_types)
        prior[:num_types].fill_diagonal_(stay_bias)
        self.register_buffer("prior", prior + torch.tensor(type_leanings, dtype=torch.float32))

    def forward(self, features: Tensor) -> Tensor:
        """Return log-probabilities, shape (L, T + 1, T); row T stands for "no previous layer"."""
        hidden, _ = self.lstm(features)
        logits = self.head(hidden).view(-1, self.num_types + 1, self.num_types) + self.prior
        return torch.log_softmax(logits, dim=-1)


def chain_entropy(log_tables: Tensor) -> Tensor:
    """Return the exact entropy of the plans of a chain table, in nats, as a scalar.

    H = sum over l of sum over t of P(previous type = t) * H(P_l(. | t)), with the marginals carried along
    the chain.

    Args:
        log_tables: As from `ChainTablePolicy`, shape (L, T + 1, T).
    """
    tables = log_tables.exp()
    row_entropies = -(tables * log_tables).sum(dim=-1)  # (L, T + 1)
    marginal = tables[0, -1]
    entropy = row_entropies[0, -1]
    for layer in range(1, tables.shape[0]):
        entropy = entropy + marginal @ row_entropies[layer, :-1]
        marginal = marginal @ tables[layer, :-1]
    return entropy


def sample_chains(
    tables: NDArray[np.float64], num_plans: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Draw plans from a chain table of probabilities, shape (L, T + 1, T) -> (P, L)."""
    num_layers, num_rows, _ = tables.shape
    thresholds = tables.cumsum(axis=2)
    thresholds[:, :, -1] = np.inf  # rounding must not leave a draw without a type
    draws = random.random((num_layers, num_plans, 1))
    plans = np.empty((num_plans, num_layers), dtype=np.int64)
    previous = np.full(num_plans, num_rows - 1)
    for layer in range(num_layers):
        previous = (draws[layer] > thresholds[layer, previous]).sum(axis=1)
        plans[:, layer] = previous
    return plans


def chain_log_probabilities(log_tables: Tensor, plans: NDArray[np.int64]) -> Tensor:
    """Return log P of plans under a chain table, shape (P,).

    Args:
        log_tables: Shape (L, T + 1, T).
        plans: Shape (P, L).
    """
    chosen = torch.from_numpy(plans)
    start = torch.full((len(plans), 1), log_tables.shape[1] - 1)
    previous = torch.cat([start, chosen[:, :-1]], dim=1)
    layers = torch.arange(log_tables.shape[0])
    return log_tables[layers, previous, chosen].sum(dim=1)


class AutoregressivePolicy(nn.Module):
    """One LSTM cell per layer, fed the layer's features and the previous choice."""

    def __init__(self, num_features: int, num_types: int, *, num_hidden: int) -> None:
        super().__init__()
        self.num_types = num_types
        self.cell = nn.LSTMCell(num_features + num_types + 1, num_hidden)
        self.head = nn.Linear(num_hidden, num_types)

    def sample(
        self, features: Tensor, num_plans: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw plans.

        Returns:
            The plans, shape (P, L); log P of each, shape (P,); the mean entropy of a plan's choices.
        """
        state = (
            torch.zeros(num_plans, self.cell.hidden_size),
            torch.zeros(num_plans, self.cell.hidden_size),
        )
        previous = torch.full((num_plans,), self.num_types)
        plans, log_probabilities, entropies = [], [], []
        for layer in features:
            choice_code = nn.functional.one_hot(previous, self.num_types + 1).float()
            state = self.cell(torch.cat([layer.expand(num_plans, -1), choice_code], dim=1), state)
            log_table = torch.log_softmax(self.head(state[0]), dim=1)  # (P, T)
            table = log_table.exp()
            previous = torch.multinomial(table.detach(), 1, generator=generator)[:, 0]
            plans.append(previous)
            log_probabilities.append(log_table.gather(1, previous[:, None])[:, 0])
            entropies.append(-(table * log_table).sum(dim=1).mean())
        return (
            torch.stack(plans, dim=1),
            torch.stack(log_probabilities).sum(dim=0),
            torch.stack(entropies).sum(),
        )
