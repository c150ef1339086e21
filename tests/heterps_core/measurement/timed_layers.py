"""Blocks that take a known time: they sleep, so that cores and other programs do not matter."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds_per_row: float) -> Tensor:
        ctx.seconds_per_row = seconds_per_row
        time.sleep(seconds_per_row * len(rows))
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        time.sleep(ctx.seconds_per_row * len(gradient))
        return gradient, None


class Sleep(nn.Module):
    """Takes `seconds_per_row` for each row, forward and again backward."""

    def __init__(self, seconds_per_row: float) -> None:
        super().__init__()
        self.seconds_per_row = seconds_per_row

    def forward(self, rows: Tensor) -> Tensor:
        """Sleep, and return the rows."""
        return _Sleep.apply(rows, self.seconds_per_row)


class FailsOnFewRows(nn.Module):
    """Works on whole batches only."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows if there are more than two."""
        if self.training and torch.is_grad_enabled() and len(rows) <= 2:
            raise ValueError("too few rows")
        return rows


def build(seconds_per_row: list[float], *, fails_on_few_rows: bool = False) -> nn.Sequential:
    """Return one block for each time; the first and the last have a few weights."""
    blocks = [nn.Sequential(Sleep(seconds)) for seconds in seconds_per_row]
    blocks[0].insert(0, nn.Linear(WIDTH, WIDTH))
    if fails_on_few_rows:
        blocks[0].append(FailsOnFewRows())
    blocks[-1].append(nn.Linear(WIDTH, 1))
    return nn.Sequential(*blocks)
