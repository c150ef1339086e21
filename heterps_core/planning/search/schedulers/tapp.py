"""TAPP (Mao et al. 2021): two networks that group the layers and place the groups, kept to compare with.

A joint policy gradient trains both (`tapp_network.py`). Layers take the type of their group, and neighbouring layers
on one type make a stage, so every sample is a chain plan, also where a group's layers do not lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.learned.tapp_network import TappPolicy, layer_inputs
from heterps_core.planning.search.plan_rater import Ratings, log_cost_rewards
from heterps_core.planning.search.schedulers.base import Proposals
from heterps_core.planning.search.schedulers.policy_gradient import (
    MovingBaseline,
    PolicyGradientScheduler,
    descend,
    seeded_torch,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TappSettings:
    """The paper does not print its settings; unless it says otherwise here, they are those of Mirhoseini et al."""

    most_groups: int = 16
    """G, or as many as there are layers; the ancestor has 20 per device for graphs of thousands of operations."""

    neighbour_bias: float = 0.0
    """How much the policy prefers one group for neighbouring layers, see `neighbour_logits`; 0 as published."""

    groupings_per_round: int = 8
    """m."""

    placements_per_grouping: int = 4
    """k."""

    learning_rate: float = 1e-2
    """Adam's step size; the ancestor's is 0.1."""


def root_cost_rewards(ratings: Ratings) -> Floats:
    """Return -sqrt(cost), the paper's reward: where costs are those of measured steps, it is -sqrt(step time) but
    for a factor, and a plan that failed has a large constant for its time."""
    return -np.sqrt(ratings.cost_usd)


class TappScheduler(PolicyGradientScheduler):
    """Samples groupings and placements, and follows the gradient of the mean reward less a moving average.

    The paper's reward is -sqrt(step time), with a large constant for plans that fail; `root_cost_rewards` gives it
    where plans are measured (`measured_search.py`). The objective of a plan search is a cost in USD, whose size
    differs from problem to problem, and two fifths of the first plans miss a constraint: there the reward is
    -log(cost), less a penalty that grows with the distance to feasibility. On eight random problems of
    16 x 4 that gave a mean gap of 9 % after 10,000 evaluations, -sqrt(cost) with a constant for misses 24 %; weak
    evidence, since twenty other problems gave the former 15 %.

    Not taken over from the ancestor: the end of sampling and the noise on its logits, which serve a training that is
    to end in one greedy plan; here the best sample is kept.
    """

    name = "tapp"
    default_budget_evaluations = 10_000

    def __init__(
        self,
        settings: TappSettings | None = None,
        *,
        rewards: Callable[[Ratings], Floats] = log_cost_rewards,
    ) -> None:
        self.settings = settings or TappSettings()
        self.rewards = rewards

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield m * k plans a round; update both networks by their rewards."""
        settings = self.settings
        with seeded_torch(seed):
            policy = TappPolicy(
                layer_inputs(problem),
                len(problem.device_types),
                num_groups=min(settings.most_groups, problem.num_layers),
                neighbour_bias=settings.neighbour_bias,
            )
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        baseline = MovingBaseline()
        while True:
            sample = policy.sample(settings.groupings_per_round, settings.placements_per_grouping, generator)
            rewards = self.rewards((yield sample.plans.numpy()))
            descend(optimizer, -baseline.gain(sample.log_probabilities, rewards))
