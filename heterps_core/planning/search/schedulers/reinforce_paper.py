"""REINFORCE as the HeterPS paper has it (arXiv 2111.10635, equations 14-17), kept to compare with.

A recurrent cell emits one type per layer, each fed the previous choice; every plan of a round carries gradient by
its reward less a moving average. The cell is an LSTM's, or a plain one for the paper's own baseline RL-RNN.
`reinforce.py` is the strong search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.learned.policy_network import AutoregressivePolicy, layer_features
from heterps_core.planning.search.plan_rater import log_cost_rewards
from heterps_core.planning.search.schedulers.base import Proposals
from heterps_core.planning.search.schedulers.policy_gradient import (
    PolicyGradientScheduler,
    descend,
    seeded_torch,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforcePaperSettings:
    """The paper does not print its settings; these are common ones, tried on random problems."""

    plans_per_round: int = 32
    """N."""

    num_hidden: int = 64
    learning_rate: float = 5e-3
    """eta, of Adam."""

    baseline_rate: float = 0.1
    """gamma: share of a round's mean reward that enters the moving average."""

    entropy_weight: float = 0.01
    gradient_norm: float = 1.0
    """Largest norm of a step's gradient."""


class ReinforcePaperScheduler(PolicyGradientScheduler):
    """REINFORCE with an LSTM policy and a moving-average baseline.

    The reward is -log(cost), not -cost: it has the same order, and one learning rate then suits problems of
    any size.

    Args:
        settings: See `ReinforcePaperSettings`.
    """

    name = "reinforce-paper"
    default_budget_evaluations = 10_000
    cell_class: ClassVar[type[nn.LSTMCell | nn.RNNCell]] = nn.LSTMCell

    def __init__(self, settings: ReinforcePaperSettings | None = None) -> None:
        self.settings = settings or ReinforcePaperSettings()

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield rounds of plans drawn from the policy; follow the gradient of the mean reward."""
        settings = self.settings
        features = layer_features(problem)
        with seeded_torch(seed):
            policy = AutoregressivePolicy(
                features.shape[1],
                len(problem.device_types),
                num_hidden=settings.num_hidden,
                cell_class=self.cell_class,
            )
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        baseline: float | None = None
        while True:
            plans, log_probabilities, entropy = policy.sample(features, settings.plans_per_round, generator)
            rewards = log_cost_rewards((yield plans.numpy()))
            mean_reward = float(rewards.mean())
            # Starting from the first mean instead of 0 spares the first rounds a huge common gradient.
            baseline = mean_reward if baseline is None else baseline
            advantages = torch.from_numpy(rewards.astype(np.float32) - np.float32(baseline))
            # The last round may have been cut to the budget.
            gain = (log_probabilities[: rewards.size] * advantages).mean()
            loss = -gain - settings.entropy_weight * entropy
            descend(optimizer, loss, gradient_norm=settings.gradient_norm)
            baseline += settings.baseline_rate * (mean_reward - baseline)


class ReinforceRnnScheduler(ReinforcePaperScheduler):
    """The same search with a plain recurrent (Elman) cell; the paper compares its LSTM with this.

    Args:
        settings: See `ReinforcePaperSettings`.
    """

    name = "reinforce-rnn"
    cell_class = nn.RNNCell
