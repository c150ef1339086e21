"""REINFORCE as the HeterPS paper has it (arXiv 2111.10635, equations 14-17), kept to compare with.

A recurrent cell emits one type per layer, each fed the previous choice; every plan of a round carries gradient by
its reward less a moving average. The cell is an LSTM's, or a plain one for the paper's own baseline RL-RNN.
`reinforce.py` is the strong search.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.learned.policy_network import AutoregressivePolicy, layer_features
from heterps_core.planning.search.plan_rater import log_cost_rewards
from heterps_core.planning.search.schedulers.base import Proposals
from heterps_core.planning.search.schedulers.policy_gradient import (
    MovingBaseline,
    PolicyGradientScheduler,
    descend,
    seeded_torch,
)

# The paper does not print its settings; these are common ones, tried on random problems. N, H, and eta of Adam:
PLANS_PER_ROUND, NUM_HIDDEN, LEARNING_RATE, ENTROPY_WEIGHT = 32, 64, 5e-3, 0.01


class ReinforcePaperScheduler(PolicyGradientScheduler):
    """REINFORCE with an LSTM policy and a moving-average baseline.

    The reward is -log(cost), not -cost: it has the same order, and one learning rate then suits problems of
    any size.
    """

    name = "reinforce-paper"
    default_budget_evaluations = 10_000
    cell_class: ClassVar[type[nn.LSTMCell | nn.RNNCell]] = nn.LSTMCell

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield rounds of plans drawn from the policy; follow the gradient of the mean reward."""
        features = layer_features(problem)
        with seeded_torch(seed):
            policy = AutoregressivePolicy(
                features.shape[1],
                len(problem.device_types),
                num_hidden=NUM_HIDDEN,
                cell_class=self.cell_class,
            )
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
        baseline = MovingBaseline()
        while True:
            plans, log_probabilities, entropy = policy.sample(features, PLANS_PER_ROUND, generator)
            rewards = log_cost_rewards((yield plans.numpy()))
            descend(optimizer, -baseline.gain(log_probabilities, rewards) - ENTROPY_WEIGHT * entropy)


class ReinforceRnnScheduler(ReinforcePaperScheduler):
    """The same search with a plain recurrent (Elman) cell; the paper compares its LSTM with this."""

    name = "reinforce-rnn"
    cell_class = nn.RNNCell
