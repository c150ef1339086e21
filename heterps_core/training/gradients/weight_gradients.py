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

from torch import Tensor, nn

from heterps_core.training.gradients.products import add_weight_gradient


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
        self.is_put_off = is_put_off
        self._waiting: deque[_Product] = deque()

    def __len__(self) -> int:
        """Return how many products wait."""
        return len(self._waiting)

    def add(self, linear: nn.Linear, *, gradient_BO: Tensor, input_BI: Tensor) -> None:
        """Take what the gradients of a layer's parameters follow from; put the weight's off."""
        if linear.bias is not None and linear.bias.requires_grad:
            # Quick as long as the gradient lies in the cache.
            gradient_O, bias_O = gradient_BO.sum(0).float(), linear.bias
            bias_O.grad = gradient_O if bias_O.grad is None else bias_O.grad.add_(gradient_O)
        if linear.weight.requires_grad:
            self._waiting.append(_Product(linear.weight, gradient_BO, input_BI))
            if not self.is_put_off:
                self.work_out_next()

    def work_out_next(self) -> None:
        """Work out the product that has waited longest.

        The order is that of the backward passes, so sums do not depend on when there was time.
        """
        add_weight_gradient(*self._waiting.popleft())

    def finish(self) -> None:
        """Work out all that waits; only then do the parameters have the gradients of a step."""
        while self._waiting:
            self.work_out_next()
