"""Ends a run whose losses or dense layers have come to hold what is no number.

The loss does not always tell: a ReLU that is fused with the layer before it turns NaN into 0. Backward passes do not
hide it, since 0 times NaN is NaN: a NaN in an embedding row that a step looks up is in the gradient of the first
layer after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from heterps_core.errors import TrainingError
from heterps_core.judging.quality import WHERE_DIVERGED
from heterps_core.training.job import TrainingConfig
from heterps_core.training.node.failures import SpoiledGradientsError


def check_losses(losses: Sequence[float], *, step: int, config: TrainingConfig) -> None:
    """Check that a step's losses are numbers to learn from, before parameters are updated.

    Args:
        losses: One for each micro-batch, in order.
        step: Counted from 1.

    Raises:
        TrainingError: One is not finite.
    """
    for number, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss must be a finite number, but is {loss} in micro-batch {number} of {len(losses)} of step "
                f"{step} {_remarks(config)}"
            )


def check_parameters(layers: Mapping[str, nn.Module], *, step: int, config: TrainingConfig) -> None:
    """Check that dense parameters are finite right after an update, which leaves none finite whose gradient was not.

    It reads each once, while the cache has it.

    Args:
        layers: By name.
        step: Counted from 1.

    Raises:
        SpoiledGradientsError: Those of a layer are not.
    """
    named = [(name, parameter) for name, layer in layers.items() for parameter in layer.parameters()]
    sums = [parameter.detach().sum() for _, parameter in named]
    # One number for all, so that a device is asked once.
    if not sums or math.isfinite(torch.stack(sums).sum().item()):
        return
    found = ", ".join(
        dict.fromkeys(name for (name, _), total in zip(named, sums, strict=True) if not total.isfinite())
    )
    raise SpoiledGradientsError(
        f"parameters and gradients must be finite numbers, but in step {step} they are not in {found or 'the sum'} "
        f"{_remarks(config)}"
    )


def _remarks(config: TrainingConfig) -> str:
    return (
        f"(dense_learning_rate {config.dense_learning_rate}, embedding_learning_rate "
        f"{config.embedding_learning_rate}); checkpoints from before stay; {WHERE_DIVERGED}"
    )
