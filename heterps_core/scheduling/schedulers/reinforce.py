"""Risk-seeking REINFORCE over chain tables of an LSTM policy: the default search.

The plain policy gradient raises the mean plan; a search wants the best one. So only the best plans of a round carry
gradient, the policy conditions on the previous type by a table (one LSTM pass for hundreds of plans), and a
policy that has stopped finding better plans is replaced by a fresh one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heterps_core.scheduling.plan_rater import log_cost_rewards
from heterps_core.scheduling.policy_network import (
    ChainTablePolicy,
    chain_entropy,
    chain_log_probabilities,
    layer_features,
    sample_chains,
)
from heterps_core.scheduling.problem import SchedulingProblem
from heterps_core.scheduling.schedulers.base import Proposals
from heterps_core.scheduling.schedulers.policy_gradient import PolicyGradientScheduler, descend, seeded_torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceSettings:
    """Settings of the search; the defaults were tried on random problems of 16 x 4 and 32 x 4."""

    plans_per_round: int = 256
    elite_fraction: float = 0.1
    """Share of a round's plans that carry gradient, counted as distinct plans."""

    num_hidden: int = 64
    learning_rate: float = 1e-2
    entropy_weight: float = 0.15
    """Reward per nat of the entropy of the whole plan."""

    stay_bias: float = 2.0
    """Logit added for keeping the previous layer's type."""

    type_leaning: float = 1.0
    """Standard deviation of the logits by which a fresh policy leans to each type."""

    patience_rounds: int = 30
    """Rounds without a gain of its own best after which a policy is replaced."""


class ReinforceScheduler(PolicyGradientScheduler):
    """REINFORCE with an LSTM policy, risk-seeking, with restarts.

    Args:
        settings: See `ReinforceSettings`.
    """

    name = "reinforce"
    default_budget_evaluations = 130_000
    """About two seconds on one core at 16 layers x 4 types."""

    def __init__(self, settings: ReinforceSettings | None = None) -> None:
        self.settings = settings or ReinforceSettings()

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield rounds of plans of one fresh policy after the other, until the budget ends."""
        random = np.random.default_rng(seed)
        features = layer_features(problem)
        while True:
            policy = self._fresh_policy(features, len(problem.device_types), random)
            yield from self._train(policy, features, random)

    def _fresh_policy(
        self, features: Tensor, num_types: int, random: np.random.Generator
    ) -> ChainTablePolicy:
        with seeded_torch(int(random.integers(2**62))):
            return ChainTablePolicy(
                features.shape[1],
                num_types,
                num_hidden=self.settings.num_hidden,
                stay_bias=self.settings.stay_bias,
                type_leanings=random.normal(scale=self.settings.type_leaning, size=num_types),
            )

    def _train(self, policy: ChainTablePolicy, features: Tensor, random: np.random.Generator) -> Proposals:
        """Yield rounds of plans and learn from the best of each, until the policy gains no more."""
        settings = self.settings
        optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate)
        best_reward, rounds_without_gain = -np.inf, 0
        while rounds_without_gain < settings.patience_rounds:
            log_tables = policy(features)
            tables = log_tables.detach().double().exp().numpy()
            plans = sample_chains(tables, settings.plans_per_round, random)
            rewards = log_cost_rewards((yield plans))
            elite = best_distinct_plans(plans[: rewards.size], rewards, settings.elite_fraction)
            gain = chain_log_probabilities(log_tables, elite).mean()
            descend(optimizer, -gain - settings.entropy_weight * chain_entropy(log_tables))
            rounds_without_gain = 0 if rewards.max() > best_reward else rounds_without_gain + 1
            best_reward = max(best_reward, float(rewards.max()))


def best_distinct_plans(
    plans: NDArray[np.int64], rewards: NDArray[np.float64], fraction: float
) -> NDArray[np.int64]:
    """Return the best plans without repeats, at least one and at most a fraction of all.

    Counting repeats would let a plan that is drawn often fill the elite and end the search there.

    Args:
        plans: Shape (P, L).
        rewards: Shape (P,).
        fraction: In (0, 1].
    """
    num_elite = max(1, round(fraction * len(plans)))
    ranked = plans[np.argsort(-rewards, kind="stable")]
    _, first_places = np.unique(ranked, axis=0, return_index=True)
    return ranked[np.sort(first_places)[:num_elite]]
