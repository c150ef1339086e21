"""Optimizers of the dense layers, by name; embeddings have their own (`embeddings/row_optimizers.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from heterps_core.errors import UnknownNameError

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
"""Defaults of Kingma and Ba, Adam (2015)."""


class DenseOptimizer(ABC):
    """Updates parameters by torch's fused kernels, which do one pass over memory.

    torch.optim calls the same kernels, but imports torch's compiler first, which takes a second of each new process,
    and spends several times the kernel's time of a small layer around it.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """Float32 tensors that it keeps for each parameter, of the parameter's shape."""

    counts_steps: ClassVar[bool] = False
    """It also keeps a step count for each parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, l2: float = 0.0) -> None:
        """State exists from the start, so that a checkpoint has the same tensors before and after step one.

        Args:
            l2: By which parameters of two or more dimensions are multiplied and added to their gradients; biases and
                factors of columns are not.
        """
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._groups: defaultdict[tuple[float, torch.dtype], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self._groups[l2 if parameter.ndim > 1 else 0.0, parameter.dtype].append(parameter)
            self.state[parameter] = {name: torch.zeros_like(parameter) for name in self.state_names}
            if self.counts_steps:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters that have gradients, and clear these."""
        for (weight_decay, _), group in self._groups.items():
            gradients = {parameter: parameter.grad for parameter in group if parameter.grad is not None}
            if gradients:
                self._update(gradients, learning_rate, weight_decay)
            for parameter in gradients:
                parameter.grad = None

    @abstractmethod
    def _update(
        self, gradients: dict[nn.Parameter, Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        """Update parameters of one data type."""


class _Adam(DenseOptimizer):
    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def _update(
        self, gradients: dict[nn.Parameter, Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        means, squares, steps = (
            [self.state[parameter][name] for parameter in gradients] for name in (*self.state_names, "step")
        )
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            list(gradients),
            list(gradients.values()),
            means,
            squares,
            [],
            steps,
            lr=learning_rate,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            weight_decay=weight_decay,
            eps=ADAM_EPSILON,
            amsgrad=False,
            maximize=False,
        )


class _Sgd(DenseOptimizer):
    def _update(
        self, gradients: dict[nn.Parameter, Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        torch._fused_sgd_(
            list(gradients),
            list(gradients.values()),
            [],
            weight_decay=weight_decay,
            momentum=0.0,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


DENSE_OPTIMIZERS: dict[str, type[DenseOptimizer]] = {"adam": _Adam, "sgd": _Sgd}


def get_dense_optimizer(name: str) -> type[DenseOptimizer]:
    """Return the dense optimizer of that name.

    Raises:
        UnknownNameError: It is not in `DENSE_OPTIMIZERS`.
    """
    if name not in DENSE_OPTIMIZERS:
        raise UnknownNameError("dense optimizer", name, DENSE_OPTIMIZERS)
    return DENSE_OPTIMIZERS[name]
