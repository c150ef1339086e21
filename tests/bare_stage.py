"""A stage of layers that no registry builds, for tests of what runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from heterps_core.compute_device import CPU
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel

CONFIG = TrainingConfig(batch_size=8, num_microbatches=1, num_epochs=1, seed=0)


def bare_stage(layers: Sequence[nn.Module], *, input_width: int = 0, output_width: int = 1) -> StageModel:
    return StageModel(
        layers={str(number): layer for number, layer in enumerate(layers)},
        tables={},
        dense_optimizer=None,
        input_width=input_width,
        output_width=output_width,
        device=CPU,
    )
