"""A training worker without the stages beside it: it does all of its own work, and knows how long the parts take.

Seconds are core time of the layers' thread, so other programs that take a core for a while are left out.

Shapes: B = rows of a replica in a micro-batch, W = width of a boundary activation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heterps_core.training.gradient_sum import GradientSum
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.stage_exchange import replica_slice
from heterps_core.training.stage_layers import StageLayers
from heterps_core.training.stage_runner import Boundary, StageRunner
from heterps_core.training.weight_gradients import WeightGradients


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


class LoneRunner(StageRunner):
    """Runs the steps of a replica whose neighbours are made up, and times passes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        layers: Any = _TimedLayers(self._run_layers)
        self.forward: CoreTimer = layers
        self.weight_gradients = _TimedWeightGradients(layers.weight_gradients)
        layers.weight_gradients = self.weight_gradients
        self._run_layers = layers
        sums: Any = _TimedGradientSum(self._gradient_sum)
        self.gradient_sum: CoreTimer = sums.over_replicas
        self._gradient_sum = sums

    def _boundary(self, layout: RankLayout, neighbour: int, width: int) -> Boundary:
        made_up: Any = _MadeUpStage(width, num_replicas=self.num_replicas, replica=self.replica)
        return made_up  # type: ignore[no-any-return]


class _TimedLayers(CoreTimer):
    def __init__(self, layers: StageLayers) -> None:
        super().__init__(layers)
        self.weight_gradients: Any = layers.weight_gradients


class _TimedGradientSum:
    def __init__(self, gradient_sum: GradientSum) -> None:
        self.over_replicas = CoreTimer(gradient_sum.over_replicas)


class _TimedWeightGradients:
    """Weight gradients that all wait until the end of the step, since the runner never does."""

    def __init__(self, weight_gradients: WeightGradients) -> None:
        self._weight_gradients = weight_gradients
        self._timer = CoreTimer(weight_gradients.finish)
        self.num_put_off = 0

    def __len__(self) -> int:
        return len(self._weight_gradients)

    def finish(self) -> None:
        self.num_put_off = len(self._weight_gradients)
        self._timer()

    def take(self) -> float:
        return self._timer.take()


class _MadeUpRows(NamedTuple):
    """A slice that has arrived already."""

    rows_BW: Tensor

    def is_there(self) -> bool:
        return True

    def wait(self) -> Tensor:
        # Another tensor each time, to have gradients of its own.
        return self.rows_BW.detach()


class _MadeUpStage:
    """Stands where a neighbouring stage would be: it sends rows at once, and takes any."""

    silence_limit_s = 0.0

    def __init__(self, width: int, *, num_replicas: int, replica: int) -> None:
        self._width = width
        self._num_replicas, self._replica = num_replicas, replica
        self._rows: dict[int, Tensor] = {}

    def receive(self, num_rows: int) -> _MadeUpRows:
        if num_rows not in self._rows:
            mine = replica_slice(num_rows, self._num_replicas, self._replica)
            self._rows[num_rows] = torch.randn(mine.num_rows, self._width) / num_rows
        return _MadeUpRows(self._rows[num_rows])

    def send(self, rows_BW: Tensor, num_rows: int) -> None:
        pass

    def wait_until_sent(self) -> None:
        pass
