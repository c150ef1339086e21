"""The two copies of a stage's dense parameters that batches in flight at the same time compute with.

Batch t computes with the parameters after t - 2 batches while batch t + 1 already does with those after t - 1; see
`stage_runner`. Optimizers work on the layers themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.training.pipeline.stage_layers import StageLayers


class DelayedLayers:
    """Copies of layers, used by batches in turn.

    Args:
        layers: Of the stage, which hold the newest parameters. Tables and buffers are shared with the copies.
        run_layers: Makes a function of layers.
    """

    def __init__(
        self, layers: Sequence[nn.Module], run_layers: Callable[[Sequence[nn.Module]], StageLayers]
    ) -> None:
        self._newest = [parameter for layer in layers for parameter in layer.parameters()]
        # Embeddings keep their tables. Running statistics are those that optimizers and checkpoints know.
        kept: list[object] = [layer for layer in layers if isinstance(layer, SlotEmbedding)]
        kept += [buffer for layer in layers for buffer in layer.buffers()]
        copies = [copy.deepcopy(list(layers), {id(each): each for each in kept}) for _ in range(2)]
        self._copies = [[parameter for layer in each for parameter in layer.parameters()] for each in copies]
        self._run_layers = [run_layers(each) for each in copies]

    def begin_step(self, *, is_drained: bool) -> tuple[StageLayers, StageLayers]:
        """Return the layers for a batch and for the next one, which takes the newest parameters.

        Args:
            is_drained: No pass of the batch has run yet; it takes the newest parameters, too.
        """
        if is_drained:
            self._refresh(0)
        self._refresh(1)
        return self._run_layers[0], self._run_layers[1]

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the batch, one for each parameter, and end its step."""
        gradients = [used.grad for used in self._copies[0]]
        for used in self._copies[0]:
            used.grad = None
        self._copies.reverse()
        self._run_layers.reverse()
        return gradients

    @torch.no_grad()
    def _refresh(self, index: int) -> None:
        for newest, used in zip(self._newest, self._copies[index], strict=True):
            used.copy_(newest)
