"""REINFORCE from a policy that was trained over many problems: the default search.

The first round of plans is drawn from the shipped policy (`placement_policy.py`) as it is, so that a search with the
budget of one round is the policy alone. Then REINFORCE trains the logits that the policy gave for this problem, one
for each layer, type and previous type, while the network stays (active search of what belongs to one instance:
Hottung, Kwon and Tierney, ICLR 2022). The plain policy gradient raises the mean plan and a search wants the best one,
so only the best plans of a round carry gradient. Where no better plan is met for a while, training starts again, from
flatter logits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from heterps_core.compute_device import one_torch_thread
from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.chain_tables import (
    chain_entropy_gradient,
    likeliest_chain,
    log_softmax,
    sample_chains,
    transition_shares,
)
from heterps_core.planning.search.learned.placement_policy import placement_logits
from heterps_core.planning.search.plan_rater import Assignments, Ratings, log_cost_rewards
from heterps_core.planning.search.schedulers.base import Proposals, ProposingScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceSettings:
    """Settings of the search; the defaults were tried on random problems of 16 x 4 and 32 x 4."""

    plans_per_round: int = 256
    elite_fraction: float = 0.05
    """Share of a round's plans that carry gradient, counted as distinct plans."""

    learning_rate: float = 0.15
    entropy_weight: float = 0.05
    """Reward per nat of the entropy of the whole plan."""

    patience_rounds: int = 10
    """Rounds without a gain of its own best after which training starts again."""

    flattening: tuple[float, float] = (1.0, 4.0)
    """Range of the divisor of the policy's logits where training starts again; each start draws its own."""

    rounds_per_layer: int = 28
    """The search ends after as many rounds, of all starts together, for each layer of the problem."""


class ReinforceScheduler(ProposingScheduler):
    """REINFORCE on the logits that the shipped policy gives for a problem, risk-seeking, with restarts.

    A plan that was rated once is not rated again, so the budget counts distinct plans.

    Args:
        first_logits: What the search starts from for a problem, shape (L, T + 1, T); by default the shipped policy.
    """

    name = "reinforce"
    default_budget_evaluations = 250_000

    def __init__(
        self,
        settings: ReinforceSettings | None = None,
        *,
        first_logits: Callable[[SchedulingProblem], Floats] = placement_logits,
    ) -> None:
        self.settings = settings or ReinforceSettings()
        self.first_logits = first_logits

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield rounds of plans, none twice; the policy's likeliest plan is the first."""
        with one_torch_thread():
            first_logits = self.first_logits(problem)
        yield from _Training(first_logits, self.settings, seed).proposals()


class _Training:
    """The starts of one search, one after the other."""

    def __init__(self, first_logits: Floats, settings: ReinforceSettings, seed: int) -> None:
        self._settings = settings
        self._first_logits = first_logits
        self._num_layers, _, self._num_types = first_logits.shape
        self._random = np.random.default_rng(seed)
        self._hash_factors = self._random.integers(1, 2**62, size=self._num_layers)
        self._known_rewards: dict[int, float] = {}
        self._rounds_left = settings.rounds_per_layer * self._num_layers

    def proposals(self) -> Proposals:
        """Yield plans that were not rated before; see `ReinforceScheduler.propose`."""
        divisor = 1.0
        while self._rounds_left > 0 and len(self._known_rewards) < self._num_types**self._num_layers:
            yield from self._train(_TrainedLogits(self._first_logits / divisor, self._settings.learning_rate))
            divisor = self._random.uniform(*self._settings.flattening)

    def _train(self, logits: _TrainedLogits) -> Proposals:
        """Yield rounds of plans and learn from the best of each, until they gain no more."""
        settings = self._settings
        num_elite = max(1, round(settings.elite_fraction * settings.plans_per_round))
        best_reward, rounds_without_gain = -np.inf, 0
        while rounds_without_gain < settings.patience_rounds and self._rounds_left > 0:
            self._rounds_left -= 1
            log_tables = log_softmax(logits.values())
            plans, rewards = yield from self._rate_distinct(self._draw(log_tables))
            round_best = float(rewards.max())
            rounds_without_gain = 0 if round_best > best_reward else rounds_without_gain + 1
            best_reward = max(best_reward, round_best)
            elite = plans[np.argsort(-rewards, kind="stable")[:num_elite]]
            ascent = transition_shares(elite, self._num_types)
            ascent += settings.entropy_weight * chain_entropy_gradient(log_tables)
            # Through the softmax of each row.
            logits.ascend(ascent - np.exp(log_tables) * ascent.sum(axis=2, keepdims=True))

    def _draw(self, log_tables: Floats) -> Ints:
        """Return the likeliest plan and a round of drawn ones."""
        drawn = sample_chains(np.exp(log_tables), self._settings.plans_per_round - 1, self._random)
        return np.concatenate([likeliest_chain(log_tables)[None], drawn])

    def _rate_distinct(self, plans: Ints) -> Generator[Assignments, Ratings, tuple[Ints, Floats]]:
        """Return the distinct ones of some plans and their rewards; yield those that are new to be rated."""
        _, places = np.unique(plans @ self._hash_factors, return_index=True)
        plans = plans[np.sort(places)]  # the likeliest stays the first: a small budget goes to it
        keys = (plans @ self._hash_factors).tolist()
        rewards = np.array([self._known_rewards.get(key, np.nan) for key in keys])
        new = np.flatnonzero(np.isnan(rewards))
        if new.size:
            found = log_cost_rewards((yield plans[new]))
            rewards[new] = -np.inf  # the last round may have been cut to the budget
            rewards[new[: found.size]] = found
            self._known_rewards.update(zip((keys[index] for index in new), found.tolist(), strict=False))
        return plans, rewards


class _TrainedLogits:
    """A change of the logit of each pair of types, and one of each type, which holds whatever the previous type is.

    So what is learned of a type in a layer holds for previous types that were seldom drawn, too. Both are trained by
    Adam (Kingma and Ba, ICLR 2015), with its usual constants.
    """

    def __init__(self, first: Floats, learning_rate: float) -> None:
        self._first = first
        self._learning_rate = learning_rate
        self._num_steps = 0
        # Each with the first and the second moment of its gradient.
        self._of_pairs = np.zeros((3, *first.shape))
        self._of_types = np.zeros((3, len(first), 1, first.shape[2]))

    def values(self) -> Floats:
        """Return the logits, shape (L, T + 1, T)."""
        return np.asarray(self._first + self._of_pairs[0] + self._of_types[0])

    def ascend(self, gradient: Floats) -> None:
        """Make one step up a gradient with respect to the logits."""
        self._num_steps += 1
        for state, slope in (
            (self._of_pairs, gradient),
            (self._of_types, gradient.sum(axis=1, keepdims=True)),
        ):
            change, mean, square = state
            mean += 0.1 * (slope - mean)
            square += 0.001 * (slope**2 - square)
            size = np.sqrt(square / (1 - 0.999**self._num_steps)) + 1e-8
            change += self._learning_rate * mean / (1 - 0.9**self._num_steps) / size
