"""The trainer's own runner, which knows how long the parts of its steps take.

Seconds are core time of the layers' thread, so waits count for nothing, and other programs that take a core for a
while are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from heterps_core.training.gradients.gradient_sum import PendingSum
from heterps_core.training.gradients.weight_gradients import WeightGradients
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner


class CoreTimer:
    """Adds up the core seconds that this thread spends in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._seconds = 0.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function."""
        started_s = time.thread_time()
        result = self._function(*args, **named)
        self._seconds += time.thread_time() - started_s
        return result

    def take(self) -> float:
        """Return the seconds since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class TimedRunner(StageRunner):
    """Runs the steps of a replica and times passes, weight gradients, the sum over replicas, and the whole."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        layers: Any = CoreTimer(self._run_layers)
        layers.weight_gradients = _TimedWeightGradients(self._run_layers.weight_gradients)
        self.forward: CoreTimer = layers
        self.weight_gradients: _TimedWeightGradients = layers.weight_gradients
        self._run_layers = layers
        self.gradient_sum = CoreTimer(self._sum)
        sums: Any = SimpleNamespace(begin=self.gradient_sum)
        self._begin_sum, self._gradient_sum = self._gradient_sum.begin, sums
        self.step = CoreTimer(super().train_step)

    def train_step(
        self, microbatches: Sequence[MicroBatch], *, following: Sequence[MicroBatch] = ()
    ) -> Iterator[list[float]]:
        """Run a step as the trainer does."""
        updates: Iterator[list[float]] = self.step(microbatches, following=following)
        return updates

    def _sum(self, *batch: Any) -> PendingSum:
        """Sum at once, so that its time is that of the sum alone."""
        begun = self._begin_sum(*batch)
        losses = begun.finish()
        gradients = [parameter.grad for parameter in self._parameters]
        return PendingSum(self._parameters, [*gradients, torch.tensor(losses, device=self.device)])


class _TimedWeightGradients:
    """Weight gradients, timed where they fill waits and at the end of a step."""

    def __init__(self, weight_gradients: WeightGradients) -> None:
        self._weight_gradients = weight_gradients
        self._in_waits = CoreTimer(weight_gradients.work_out_next)
        self._at_end = CoreTimer(weight_gradients.finish)
        self._num_in_waits = 0
        self.num_put_off = 0

    def __len__(self) -> int:
        return len(self._weight_gradients)

    def work_out_next(self) -> None:
        self._in_waits()
        self._num_in_waits += 1

    def finish(self) -> None:
        self.num_put_off, self._num_in_waits = self._num_in_waits + len(self), 0
        self._at_end()

    def take(self) -> float:
        return self._in_waits.take() + self._at_end.take()
