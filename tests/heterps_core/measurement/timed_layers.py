"""Blocks that take a known time, and write down when they are run.

They sleep, so that cores and other programs do not matter.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


def write_event(events: str, *, block: int, turn: str, num_rows: int) -> None:
    """Append a line to the file of events, if there is one; what several processes append stays whole."""
    if events:
        line = json.dumps({"process": os.getpid(), "block": block, "turn": turn, "num_rows": num_rows})
        with Path(events).open("a") as file:
            file.write(f"{line}\n")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, block: Sleep) -> Tensor:
        ctx.block = block
        block.take(rows, "forward")
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        ctx.block.take(gradient, "backward")
        return gradient, None


class Sleep(nn.Module):
    """Takes `seconds_per_row` for each row, forward and again backward."""

    def __init__(self, seconds_per_row: float, *, index: int, events: str) -> None:
        super().__init__()
        self.seconds_per_row = seconds_per_row
        self.index = index
        self.events = events

    def take(self, rows: Tensor, turn: str) -> None:
        """Say that a turn begins, and sleep."""
        if self.index == 0 and turn == "forward":
            self._wait_for_the_last_block()
        write_event(self.events, block=self.index, turn=turn, num_rows=len(rows))
        time.sleep(self.seconds_per_row * len(rows))

    def _wait_for_the_last_block(self) -> None:
        """Begin the last micro-batch of a step only when another process has begun the first one's last block.

        Where a file beside that of the events tells how many micro-batches a step has.
        """
        if not self.events or not (hold := Path(self.events).with_suffix(".hold")).exists():
            return
        per_step = int(hold.read_text())
        num_begun = self._num_forward(block=0)
        if num_begun % per_step == per_step - 1:
            while self._num_forward(block=2) <= num_begun // per_step * per_step:
                time.sleep(0.001)

    def _num_forward(self, *, block: int) -> int:
        lines = [json.loads(line) for line in Path(self.events).read_text().splitlines()]
        return sum(line["block"] == block and line["turn"] == "forward" for line in lines)

    def forward(self, rows: Tensor) -> Tensor:
        """Sleep, and return the rows."""
        return _Sleep.apply(rows, self)


class FailsOnFewRows(nn.Module):
    """Works on whole batches only."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows if there are more than two."""
        if self.training and torch.is_grad_enabled() and len(rows) <= 2:
            raise ValueError("too few rows")
        return rows


def build(
    seconds_per_row: list[float], *, events: str = "", fails_on_few_rows: bool = False
) -> nn.Sequential:
    """Return one block for each time; the first and the last have a few weights."""
    blocks = [
        nn.Sequential(Sleep(seconds, index=index, events=events))
        for index, seconds in enumerate(seconds_per_row)
    ]
    blocks[0].insert(0, nn.Linear(WIDTH, WIDTH))
    if fails_on_few_rows:
        blocks[0].append(FailsOnFewRows())
    blocks[-1].append(nn.Linear(WIDTH, 1))
    return nn.Sequential(*blocks)
