"""Optimizers of the dense layers, by name; embeddings have their own (`embeddings/row_optimizers.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from heterps_core.errors import UnknownNameError


class _FusedAdam(torch.optim.Adam):
    """Adam whose step calls the fused kernel at once: 10 microseconds for 24 with three parameters, equal digits."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            steps = [state["step"] for state in states]
            if steps:
                torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    # Optimizer.__init__ wraps a step in a profiler's record unless it has this mark.
    step.hooked = True  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _DenseOptimizer:
    """How to make an optimizer, and what state it keeps."""

    optimizer_class: type[torch.optim.Optimizer]
    state_names: tuple[str, ...]
    """Tensors that it keeps for each parameter, of the parameter's shape."""

    counts_steps: bool
    """It also keeps a step count for each parameter."""

    @property
    def state_values_per_parameter(self) -> int:
        """Float32 values kept for each parameter."""
        return len(self.state_names)

    def new(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, *, l2: float = 0.0
    ) -> torch.optim.Optimizer:
        """Make the optimizer; `fused` does one pass over memory instead of several.

        Args:
            l2: By which parameters of two or more dimensions are multiplied and added to their gradients; biases and
                factors of columns are not.
        """
        # One group where nothing is penalised: each is updated by operations of its own.
        groups: dict[bool, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(l2 > 0 and parameter.ndim > 1, []).append(parameter)
        optimizer = self.optimizer_class(
            [{"params": group, "weight_decay": l2 * is_penalised} for is_penalised, group in groups.items()],
            lr=learning_rate,
            fused=True,
        )  # type: ignore[call-arg]
        # State exists from the start, so that a checkpoint has the same tensors before and after step one.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name in self.state_names:
                    optimizer.state[parameter][name] = torch.zeros_like(parameter)
                if self.counts_steps:
                    optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)
        return optimizer


DENSE_OPTIMIZERS: dict[str, _DenseOptimizer] = {
    "adam": _DenseOptimizer(_FusedAdam, ("exp_avg", "exp_avg_sq"), counts_steps=True),
    "sgd": _DenseOptimizer(torch.optim.SGD, (), counts_steps=False),
}


def get_dense_optimizer(name: str) -> _DenseOptimizer:
    """Return the dense optimizer of that name.

    Raises:
        UnknownNameError: It is not in `DENSE_OPTIMIZERS`.
    """
    if name not in DENSE_OPTIMIZERS:
        raise UnknownNameError("dense optimizer", name, DENSE_OPTIMIZERS)
    return DENSE_OPTIMIZERS[name]
