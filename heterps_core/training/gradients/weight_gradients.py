"""The gradients of fully connected layers' weights, put off until there is time for them.

A backward pass has two parts: the gradient of a layer's input, for which the stage before waits, and that of its
weight, which is not needed before the update. Only the first stands in the way of other stages; the second fills
the time in which a stage waits for messages, and the rest of it the end of a step (the idea: Qi et al. 2023, "Zero
Bubble Pipeline Parallelism"). Nothing is late: all products of a step are in its update.

Shapes: B rows, I and O inputs and outputs of a layer.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

FLOATS_PER_REGISTER = 16
"""Floats of a register of AVX-512. MKL finds the gradient of a weight faster transposed (1.1 times) where rows are
no multiple of it."""


class _Product(NamedTuple):
    weight_OI: Tensor
    gradient_BO: Tensor
    input_BI: Tensor


class WeightGradients:
    """Products that are still to be worked out; what is done is summed over micro-batches.

    For each waiting product the input and the output gradient of a layer stay in memory.

    Args:
        is_put_off: False: work each out at once, while its factors lie in the cache; for a stage without others.
    """

    def __init__(self, *, is_put_off: bool = True) -> None:
        self._is_put_off = is_put_off
        self._waiting: deque[_Product] = deque()
        self._transposed_sums: dict[Tensor, Tensor] = {}

    def __len__(self) -> int:
        """Return how many products wait."""
        return len(self._waiting)

    def add(self, linear: nn.Linear, *, gradient_BO: Tensor, input_BI: Tensor) -> None:
        """Take what the gradients of a layer's parameters follow from; put the weight's off."""
        if linear.bias is not None and linear.bias.requires_grad:
            # Quick as long as the gradient lies in the cache.
            _add_to_gradient(linear.bias, gradient_BO.sum(0).float())
        if linear.weight.requires_grad:
            self._waiting.append(_Product(linear.weight, gradient_BO, input_BI))
            if not self._is_put_off:
                self.work_out_next()

    def work_out_next(self) -> None:
        """Work out the product that has waited longest.

        The order is that of the backward passes, so sums do not depend on when there was time.
        """
        weight_OI, gradient_BO, input_BI = self._waiting.popleft()
        if gradient_BO.dtype is not torch.float32:
            _add_to_gradient(weight_OI, torch.mm(gradient_BO.t(), input_BI).float())
        elif input_BI.shape[1] % FLOATS_PER_REGISTER:
            transposed = self._transposed_sums.get(weight_OI)
            if transposed is None:
                self._transposed_sums[weight_OI] = torch.mm(input_BI.t(), gradient_BO)
            else:
                transposed.addmm_(input_BI.t(), gradient_BO)
        elif weight_OI.grad is None:
            weight_OI.grad = torch.mm(gradient_BO.t(), input_BI)
        else:
            weight_OI.grad.addmm_(gradient_BO.t(), input_BI)

    def finish(self) -> None:
        """Work out all that waits; only then do the parameters have the gradients of a step."""
        while self._waiting:
            self.work_out_next()
        for weight, transposed in self._transposed_sums.items():
            _add_to_gradient(weight, transposed.t().contiguous())
        self._transposed_sums.clear()


def _add_to_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
