"""The recurrent policy of the HeterPS paper (arXiv 2111.10635), trained for each problem alone: `reinforce-paper`.

Shape legend: L = layers, T = device types, F = features, H = hidden units, P = plans.
"""

from __future__ import annotations

import numpy as np
import torch
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


class AutoregressivePolicy(nn.Module):
    """One recurrent cell per layer, fed the layer's features and the previous choice."""

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
