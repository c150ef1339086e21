"""Clips the gradient of all dense parameters by its norm over every stage, whatever the cut.

Rows of tables are not part of it: their optimizers scale each row by its own past gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.training.pipeline.stage_place import StagePlace


def clip_gradients(gradients: Sequence[Tensor], place: StagePlace, *, longest: float) -> None:
    """Scale gradients in place by min(1, longest / norm) (Pascanu et al. 2013).

    The norm is the Euclidean one of all dense gradients of the model. Every worker of the world calls it at once.

    Args:
        gradients: Of the stage, already summed over its replicas.
        longest: Norm, above 0, that a gradient may have.
    """
    own = torch.zeros((), dtype=torch.float64)
    # A stage of embeddings alone has none.
    if gradients:
        own = torch.stack(torch._foreach_norm(list(gradients))).double().square().sum().to(CPU)
    if place.num_stages > 1:
        # Replicas of a stage have the same gradients, so the first one counts for all.
        own = own if place.replica == 0 else torch.zeros_like(own)
        dist.all_reduce(own)
    norm = math.sqrt(own.item()) if own.isfinite() else math.inf
    # What is not finite stays, for the check after the update to name its layer.
    if gradients and longest < norm < math.inf:
        torch._foreach_mul_(list(gradients), longest / norm)
