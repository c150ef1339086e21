"""What the searches that train a policy with torch share: one thread, own randomness, torch warmed up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heterps_core.compute_device import one_torch_thread
from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.schedulers.base import ProposingScheduler
from heterps_core.planning.search.search_result import SearchResult


class PolicyGradientScheduler(ProposingScheduler):
    """A scheduler that learns a policy by gradient steps.

    The search runs on one torch thread: its tensors are too small to share, and the order of sums, and with it
    the plan, then does not depend on the machine's cores. The first step of a process loads parts of torch for
    up to a second; that is done before the clock starts.
    """

    def search(self, problem: SchedulingProblem, **terms: Any) -> SearchResult:
        """Return the best plan that was found, with its proof; see `Scheduler.search`."""
        with one_torch_thread():
            _warm_up_torch()
            return super().search(problem, **terms)


class MovingBaseline:
    """The moving average of rewards that is taken off each; it begins with the first round's mean.

    Beginning with 0, or with the reward of a plan that fails, would give the first rounds a huge common gradient.
    """

    _RATE = 0.1
    """Share of a round's mean reward that enters."""

    def __init__(self) -> None:
        self._baseline: float | None = None

    def gain(self, log_probabilities: Tensor, rewards: Floats) -> Tensor:
        """Return what the policy gradient ascends, from P plans and their rewards, fewer where the budget ended."""
        mean_reward = float(rewards.mean())
        baseline = mean_reward if self._baseline is None else self._baseline
        self._baseline = baseline + self._RATE * (mean_reward - baseline)
        advantages = torch.from_numpy((rewards - baseline).astype(np.float32))
        return (log_probabilities[: rewards.size] * advantages).mean()


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Make one optimizer step down the loss, with the gradient clipped to a norm of 1."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Make torch's global generator, which initialises modules, start from a seed; restore it after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _warm_up_torch() -> None:
    with seeded_torch(0):
        cell = torch.nn.LSTM(1, 1)
        optimizer = torch.optim.Adam(cell.parameters())
        descend(optimizer, cell(torch.zeros(1, 1))[0].sum())
