"""Risk-seeking REINFORCE over chain tables of an LSTM policy: the default search.

The plain policy gradient raises the mean plan; a search wants the best one. So only the best plans of a round carry
gradient, the policy conditions on the previous type by a table (one LSTM pass for hundreds of plans), most plans
explore one window of layers while the policy draws the rest (temporally extended epsilon-greedy: Dabney, Ostrovski
and Barreto, ICLR 2021), and a policy that has stopped finding better plans is replaced by a fresh one. No plan is
altered after it was drawn. What a search has learned can start the next one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from heterps_core.errors import ConfigurationError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.chain_tables import (
    Floats,
    Ints,
    chain_entropy_gradient,
    random_windows,
    sample_chains,
    transition_shares,
)
from heterps_core.planning.search.learned.policy_network import ChainTablePolicy, layer_features, stay_logits
from heterps_core.planning.search.learned.policy_state import PolicyState
from heterps_core.planning.search.plan_rater import Assignments, Ratings, log_cost_rewards
from heterps_core.planning.search.schedulers.base import Proposals
from heterps_core.planning.search.schedulers.policy_gradient import (
    PolicyGradientScheduler,
    descend,
    seeded_torch,
)
from heterps_core.planning.search.search_result import SearchResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceSettings:
    """Settings of the search; the defaults were tried on random problems of 16 x 4 and 32 x 4."""

    plans_per_round: int = 256
    elite_fraction: float = 0.05
    """Share of a round's plans that carry gradient, counted as distinct plans."""

    num_hidden: int = 64
    learning_rate: float = 1e-2
    entropy_weight: float = 0.15
    """Reward per nat of the entropy of the whole plan."""

    exploring_fraction: float = 0.8
    """Share of a round's plans in which one window of layers is drawn as by an untrained policy."""

    longest_window: int = 8
    """Most layers in such a window."""

    stay_biases: tuple[float, float] = (0.3, 3.0)
    """Range of the logit added for keeping the previous layer's type; each fresh policy draws its own, since
    problems differ in how many stages a good plan has."""

    type_leaning: float = 1.0
    """Standard deviation of the logits by which a fresh policy leans to each type."""

    patience_rounds: int = 30
    """Rounds without a gain of its own best after which a policy is replaced."""

    rounds_per_layer: int = 28
    """The search ends after as many rounds, of all policies together, for each layer of the problem."""


class ReinforceScheduler(PolicyGradientScheduler):
    """REINFORCE with an LSTM policy, risk-seeking, with restarts.

    A plan that was rated once is not rated again, so the budget counts distinct plans.

    Args:
        settings: See `ReinforceSettings`.
        warm_start: What an earlier search kept, of a problem with as many device types and kinds of layers;
            every second policy then starts from it.
    """

    name = "reinforce"
    default_budget_evaluations = 250_000
    """Never reached with the default settings: the search ends after its rounds, in 1 to 2 s on one core at
    16 layers x 4 types and 4 to 5 s at 32 x 4."""

    def __init__(
        self, settings: ReinforceSettings | None = None, *, warm_start: PolicyState | None = None
    ) -> None:
        self.settings = settings or ReinforceSettings()
        self.warm_start = warm_start

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield rounds of plans of one policy after the other.

        Raises:
            ConfigurationError: The warm start does not fit the problem or the settings.
        """
        return _Training(problem, self.settings, self.warm_start, seed).proposals()

    def search_and_keep(
        self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int
    ) -> tuple[SearchResult, PolicyState]:
        """Search as `search` does, and return what the policy of the best plan has learned, too.

        Raises:
            ConfigurationError: As for `search`, or the warm start does not fit the problem or the settings.
            InfeasiblePlanError: As for `search`.
        """
        training = _Training(problem, self.settings, self.warm_start, seed)
        result = self.run_proposals(
            problem, training.proposals(), budget_evaluations=budget_evaluations, seed=seed
        )
        return result, training.best_policy

    def search_from_last(
        self, problem: SchedulingProblem, *, policies: Path, budget_evaluations: int, seed: int
    ) -> SearchResult:
        """Search from the policy that the last search with these device types and kinds of layers kept; keep the new.

        A file that is damaged or does not fit is replaced.

        Args:
            problem: As for `search`.
            policies: Folder of the policies, made with the first.
            budget_evaluations: As for `search`.
            seed: As for `search`.

        Raises:
            ConfigurationError, InfeasiblePlanError: As for `search`.
        """
        path = policies / f"{_inputs_key(problem)}.safetensors"
        search = ReinforceScheduler(self.settings, warm_start=self.warm_start)
        try:
            if path.exists():
                search.warm_start = PolicyState.load(path)
                _Training(problem, self.settings, search.warm_start, seed)
                logger.info("reinforce starts from the policy %s of an earlier run", path)
        except ConfigurationError as error:
            logger.warning("reinforce starts without an earlier policy: %s; the file is replaced", error)
            search.warm_start = self.warm_start
        result, policy = search.search_and_keep(problem, budget_evaluations=budget_evaluations, seed=seed)
        try:
            policy.save(path)
        except OSError as error:
            logger.warning("the policy of this search is not kept: %s", error)
        return result


def _inputs_key(problem: SchedulingProblem) -> str:
    """Return a hash of the names of device types and kinds of layers, which a policy's inputs stand for."""
    names = problem.device_type_names, sorted({layer.kind for layer in problem.layers})
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


class _Training:
    """The policies of one search, trained one after the other."""

    def __init__(
        self,
        problem: SchedulingProblem,
        settings: ReinforceSettings,
        warm_start: PolicyState | None,
        seed: int,
    ) -> None:
        self._settings = settings
        self._warm_start = warm_start
        self._random = np.random.default_rng(seed)
        self._features = layer_features(problem)
        self._num_types = len(problem.device_types)
        self._num_assignments = self._num_types**problem.num_layers
        self._hash_factors = self._random.integers(1, 2**62, size=problem.num_layers)
        self._known_rewards: dict[int, float] = {}
        self._rounds_left = settings.rounds_per_layer * problem.num_layers
        self._best_reward = -np.inf
        policy = self._fresh_policy(0.0)
        if warm_start is not None:
            warm_start.load_into(policy)
        self.best_policy = PolicyState.of(policy)

    def proposals(self) -> Proposals:
        """Yield plans that were not rated before; see `ReinforceScheduler.propose`."""
        for index in count():
            if self._rounds_left == 0 or len(self._known_rewards) == self._num_assignments:
                return
            stay_bias = self._random.uniform(*self._settings.stay_biases)
            policy = self._fresh_policy(stay_bias)
            if self._warm_start is not None and index % 2 == 0:
                self._warm_start.load_into(policy)
            yield from self._train(policy, self._untrained_tables(stay_bias))

    def _fresh_policy(self, stay_bias: float) -> ChainTablePolicy:
        with seeded_torch(int(self._random.integers(2**62))):
            return ChainTablePolicy(
                self._features.shape[1],
                self._num_types,
                num_hidden=self._settings.num_hidden,
                stay_bias=stay_bias,
                type_leanings=self._random.normal(scale=self._settings.type_leaning, size=self._num_types),
            )

    def _untrained_tables(self, stay_bias: float) -> Floats:
        logits = stay_logits(self._num_types, stay_bias)
        rows = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return np.tile(rows, (len(self._features), 1, 1))

    def _train(self, policy: ChainTablePolicy, untrained_tables: Floats) -> Proposals:
        """Yield rounds of plans and learn from the best of each, until the policy gains no more."""
        settings = self._settings
        optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate, fused=True)
        num_elite = max(1, round(settings.elite_fraction * settings.plans_per_round))
        best_reward, rounds_without_gain = -np.inf, 0
        while rounds_without_gain < settings.patience_rounds and self._rounds_left > 0:
            self._rounds_left -= 1
            log_tables = policy(self._features)
            plans, rewards = yield from self._rate_distinct(
                self._draw(log_tables.detach().double().exp().numpy(), untrained_tables)
            )
            round_best = float(rewards.max())
            rounds_without_gain = 0 if round_best > best_reward else rounds_without_gain + 1
            best_reward = max(best_reward, round_best)
            elite = plans[np.argsort(-rewards, kind="stable")[:num_elite]]
            descend(optimizer, -self._surrogate_gain(log_tables, elite))
            if round_best > self._best_reward:
                self._best_reward = round_best
                self.best_policy = PolicyState.of(policy)

    def _draw(self, tables: Floats, untrained_tables: Floats) -> Ints:
        """Draw a round of plans, some of them with a window in which an untrained policy draws."""
        settings = self._settings
        choices = np.zeros((settings.plans_per_round, len(tables)), dtype=np.int64)
        num_exploring = round(settings.exploring_fraction * settings.plans_per_round)
        choices[:num_exploring] = random_windows(
            num_exploring, len(tables), longest=settings.longest_window, random=self._random
        )
        return sample_chains(np.stack([tables, untrained_tables]), choices, self._random)

    def _rate_distinct(self, plans: Ints) -> Generator[Assignments, Ratings, tuple[Ints, Floats]]:
        """Return the distinct ones of some plans and their rewards; yield those that are new to be rated."""
        keys, places = np.unique(plans @ self._hash_factors, return_index=True)
        plans = plans[places]
        rewards = np.array([self._known_rewards.get(key, np.nan) for key in keys.tolist()])
        new = np.flatnonzero(np.isnan(rewards))
        if new.size:
            found = log_cost_rewards((yield plans[new]))
            rewards[new] = -np.inf  # the last round may have been cut to the budget
            rewards[new[: found.size]] = found
            self._known_rewards.update(zip(keys[new].tolist(), found.tolist(), strict=False))
        return plans, rewards

    def _surrogate_gain(self, log_tables: Tensor, elite: Ints) -> Tensor:
        """Return a sum whose gradient is that of the mean log-probability of plans and of the entropy."""
        ascent = transition_shares(elite, self._num_types)
        ascent += self._settings.entropy_weight * chain_entropy_gradient(log_tables.detach().double().numpy())
        return (log_tables * torch.from_numpy(ascent).float()).sum()
