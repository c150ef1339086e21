"""Recurrent policies over the layers of a chain: what the learning searches sample their plans from.

Both policies read the layers in order and emit, for each, a distribution over device types. They differ in how
the previous choice enters: `ChainTablePolicy` answers for every previous type at once, so that one pass gives a
table from which any number of plans is drawn (`chain_tables.py`); `AutoregressivePolicy` is fed the choice itself,
as in the HeterPS paper (arXiv 2111.10635).

Shape legend: L = layers, T = device types, F = features, H = hidden units, P = plans.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem


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

    The logit of a pair is the sum of one for the type and one for the pair: what is learned of a type in a
    layer holds for previous types that were seldom drawn, too.

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
        # Rows of logits: one per previous type, one for the first layer, which has none, and one for all.
        self.head = nn.Linear(num_hidden, (num_types + 2) * num_types)
        prior = stay_logits(num_types, stay_bias) + type_leanings
        self.register_buffer("prior", torch.tensor(prior, dtype=torch.float32))

    def forward(self, features: Tensor) -> Tensor:
        """Return log-probabilities, shape (L, T + 1, T); row T stands for "no previous layer"."""
        hidden, _ = self.lstm(features)
        rows = self.head(hidden).view(-1, self.num_types + 2, self.num_types)
        return torch.log_softmax(rows[:, :-1] + rows[:, -1:] + self.prior, dim=-1)


def stay_logits(num_types: int, stay_bias: float) -> NDArray[np.float64]:
    """Return logits that favour the previous type and no type else, shape (T + 1, T)."""
    return np.vstack([stay_bias * np.eye(num_types), np.zeros((1, num_types))])


class AutoregressivePolicy(nn.Module):
    """One recurrent cell per layer, fed the layer's features and the previous choice.

    Args:
        num_features: F.
        num_types: T.
        num_hidden: H.
        cell_class: The cell of the recurrence.
    """

    def __init__(
        self,
        num_features: int,
        num_types: int,
        *,
        num_hidden: int,
        cell_class: type[nn.LSTMCell | nn.RNNCell],
    ) -> None:
        super().__init__()
        self.num_types = num_types
        self.cell = cell_class(num_features + num_types + 1, num_hidden)
        self.head = nn.Linear(num_hidden, num_types)

    def sample(
        self, features: Tensor, num_plans: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw plans.

        Returns:
            The plans, shape (P, L); log P of each, shape (P,); the mean entropy of a plan's choices.
        """
        state = None  # a cell starts from zeros
        previous = torch.full((num_plans,), self.num_types)
        plans, log_probabilities, entropies = [], [], []
        for layer in features:
            choice_code = nn.functional.one_hot(previous, self.num_types + 1).float()
            state = self.cell(torch.cat([layer.expand(num_plans, -1), choice_code], dim=1), state)
            hidden = state[0] if isinstance(state, tuple) else state  # an LSTM's state is (hidden, memory)
            log_table = torch.log_softmax(self.head(hidden), dim=1)  # (P, T)
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
