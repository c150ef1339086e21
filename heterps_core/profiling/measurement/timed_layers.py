"""The timed parts of a model: each layer as a stage of its own, and the whole step of a worker that trains alone.

Each layer gets the input that the layers before it produced, because hooks inside a running model miss what an
embedding does in autograd.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn

from heterps_core.compute_device import precision_on
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.profiling.measurement.profiling_input import HeldBatches
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.timing import Phase
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.gradients.finite_gradients import check_losses, check_parameters
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.replica_batches import BatchFeed

LEARNING_RATE = 1e-6
"""Synthetic gradients must not drive the parameters anywhere; the time of an update does not depend on it."""


class _TimedLayer:
    """One layer with its captured input, run as a stage of its own: forward, backward and update."""

    def __init__(
        self,
        layers: StageLayers,
        batches: Sequence[ClickBatch],
        activation: Tensor | None,
        update: Callable[[], object] | None,
    ) -> None:
        self._layers = layers
        self._batches = batches
        self._update = update
        self._activation = activation
        self._entering: Tensor | None = None
        self._round = 0
        self._prepare()
        self._forward()
        self._gradient = torch.empty(0)

    def phases(self, prefix: str) -> list[Phase]:
        """Return the phases of a round."""
        phases = [
            Phase(None, self._prepare),
            Phase(f"{prefix}/forward", self._forward),
            Phase(None, self._draw_gradient),
            Phase(f"{prefix}/backward", self._backward),
        ]
        return phases if self._update is None else [*phases, Phase(f"{prefix}/update", self._update)]

    def _prepare(self) -> None:
        self._round += 1
        if self._activation is not None:
            self._activation.grad = None
            # A copy, so that a layer may work in place; it also puts the input into the caches, where the layer
            # before leaves it in training.
            self._entering = self._activation.clone()

    def _forward(self) -> None:
        self.leaving = self._layers(self._batches[self._round % len(self._batches)], self._entering)

    def _draw_gradient(self) -> None:
        # Rows with packed sequences have another width in each batch.
        if self._gradient.shape != self.leaving.shape:
            self._gradient = torch.randn_like(self.leaving) / len(self.leaving)

    def _backward(self) -> None:
        self.leaving.backward(self._gradient)  # type: ignore[no-untyped-call]


def layer_phases(
    request: ProfileRequest, model: StageModel, batches: Sequence[ClickBatch], size: str
) -> list[Phase]:
    """Run the chain once, keep what entered each layer, and return the phases of all, named "size/layer/phase"."""
    phases: list[Phase] = []
    activation: Tensor | None = None
    precision = precision_on(model.device, request.precision)
    for name, layer in model.layers.items():
        layers = StageLayers([layer], precision=precision, puts_off=False)
        update = _layer_update(request, layer, layers, model.tables.get(name))
        timed = _TimedLayer(layers, batches, activation, update)
        phases += timed.phases(f"{size}/{name}")
        # All layers but the first hand a gradient to the one before them.
        activation = timed.leaving.detach().clone().requires_grad_()
    return phases


def _layer_update(
    request: ProfileRequest, layer: nn.Module, layers: StageLayers, table: ShardedTable | None
) -> Callable[[], object] | None:
    if table is not None:
        return partial(table.apply_gradients, learning_rate=LEARNING_RATE)
    parameters = list(layer.parameters())
    if not parameters:
        return None
    optimizer = get_dense_optimizer(request.dense_optimizer)(parameters)

    def update() -> None:
        layers.weight_gradients.finish()
        optimizer.step(LEARNING_RATE)

    return update


def training_config(request: ProfileRequest, *, num_rows: int) -> TrainingConfig:
    """Return the numbers of a training in batches of so many rows, each a single micro-batch."""
    return TrainingConfig(
        batch_size=num_rows,
        num_microbatches=1,
        num_epochs=1,
        seed=request.seed,
        dense_optimizer=request.dense_optimizer,
        embedding_optimizer=request.embedding_optimizer,
        precision=request.precision,
    )


class WorkerSteps:
    """Steps of a worker that trains alone; with a data set a thread reads batches meanwhile, as in training.

    Args:
        request: Has the data set, if any.
        model: The whole model.
        features: Of its tables.
        batches: Trained in turns where there is no data set; of as many rows each as a step takes.
    """

    def __init__(
        self,
        request: ProfileRequest,
        model: StageModel,
        features: FeatureSpec,
        batches: Sequence[ClickBatch],
    ) -> None:
        self._model, self._config = model, training_config(request, num_rows=len(batches[0].labels))
        self._runner = StageRunner(model, self._config, StagePlace(device=model.device))
        self._losses: list[float] = []
        self._feed_clock: int | None = None
        self._num_read = 0
        self._batches = ([MicroBatch(len(batch.labels), batch.to(model.device))] for batch in cycle(batches))
        if request.dataset is not None:
            held = HeldBatches(request, features, self._config, model, self._runner)
            self._batches = self._fed(held)

    def phases(self, prefix: str) -> list[Phase]:
        """Return the phases of a step: the passes and the updates."""
        return [Phase(f"{prefix}/passes", self._run_passes), Phase(f"{prefix}/updates", self._update)]

    def take(self) -> None:
        """Take a step."""
        self._run_passes()
        self._update()

    def read_so_far(self) -> tuple[int, float]:
        """Return how many batches the thread has read, and its seconds on a core; none without a data set."""
        return self._num_read, 0.0 if self._feed_clock is None else time.clock_gettime(self._feed_clock)

    def close(self) -> None:
        """End the thread."""
        self._batches.close()

    def _run_passes(self) -> None:
        (self._losses,) = self._runner.train_step(next(self._batches))

    def _update(self) -> None:
        check_losses(self._losses, step=1, config=self._config)
        self._model.update_dense(LEARNING_RATE)
        check_parameters(self._model.layers, step=1, config=self._config)
        self._model.update_rows(LEARNING_RATE)

    def _fed(self, held: HeldBatches) -> Generator[list[MicroBatch], None, None]:
        def read(cursor: TrainingCursor) -> list[MicroBatch]:
            if self._feed_clock is None:
                self._feed_clock = time.pthread_getcpuclockid(threading.get_ident())
            self._num_read += 1
            return held.training_batch(cursor)

        for _, microbatches in BatchFeed(read, held.cursors()):
            yield microbatches
