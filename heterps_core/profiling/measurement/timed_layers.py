"""What is timed of a model: each layer as a stage of its own, and the whole step of a worker that trains alone.

Each layer gets the input that the layers before it produced, because hooks inside a running model miss what an
embedding does in autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.timing import Phase
from heterps_core.training.gradients.finite_gradients import check_losses, check_parameters
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner

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
        self._gradient = torch.randn_like(self.leaving) / len(self.leaving)

    def phases(self, prefix: str) -> list[Phase]:
        """Return what a round runs."""
        phases = [
            Phase(None, self._prepare),
            Phase(f"{prefix}/forward", self._forward),
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

    def _backward(self) -> None:
        self.leaving.backward(self._gradient)  # type: ignore[no-untyped-call]


def layer_phases(
    request: ProfileRequest, model: StageModel, batches: Sequence[ClickBatch], size: str
) -> list[Phase]:
    """Run the chain once, keep what entered each layer, and return the phases of all, named "size/layer/phase"."""
    phases: list[Phase] = []
    activation: Tensor | None = None
    for name, layer in model.layers.items():
        layers = StageLayers([layer], precision=request.precision, puts_off=False)
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


def training_config(request: ProfileRequest) -> TrainingConfig:
    """Return the numbers of a training whose whole batch is the profiling batch."""
    return TrainingConfig(
        batch_size=request.batch_size,
        num_microbatches=1,
        num_epochs=1,
        seed=request.seed,
        dense_optimizer=request.dense_optimizer,
        embedding_optimizer=request.embedding_optimizer,
        precision=request.precision,
    )


def step_phases(
    request: ProfileRequest, model: StageModel, batches: Sequence[ClickBatch], size: str
) -> list[Phase]:
    """Return a step of a worker that trains alone on batches in turns: the passes, and the updates."""
    config = training_config(request)
    runner = StageRunner(model, config, StagePlace(device=model.device))
    in_turn = cycle(batches)
    losses: list[float] = []

    def run_passes() -> None:
        batch = next(in_turn)
        (losses[:],) = runner.train_step([MicroBatch(len(batch.labels), batch)])

    def update() -> None:
        check_losses(losses, step=1, config=config)
        model.update_dense(LEARNING_RATE)
        check_parameters(model.layers, step=1, config=config)
        model.update_rows(LEARNING_RATE)

    return [Phase(f"{size}/passes", run_passes), Phase(f"{size}/updates", update)]
