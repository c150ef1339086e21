"""Requests to stop: all workers agree on one at the same step, at most two seconds later.

The first worker looks for the mark in the run directory on a thread, so that no step waits for a store. At an agreed
step it tells the others what it found. The same message names the step of the next question, which the first worker
derives from the time that steps took: workers need the same steps, and their clocks would differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from heterps_core.compute_device import CPU
from heterps_core.training.node.node_life import repeated
from heterps_core.training.storage.run_directory import STOP, RunDirectory

_QUESTION_INTERVAL_S = 0.75
"""Between two questions, as far as steps are not longer."""

LOOK_INTERVAL_S = 0.25
_BUCKET_LOOK_INTERVAL_S = 1.0
"""Each look is a request that is paid for: 0.0015 USD an hour."""


class StopQuestion:
    """Asks the first worker now and then whether to stop; a context, in which it looks.

    Every worker of the world makes one for the same first step, and calls `is_asked_for` after each step.

    Args:
        run: Where the mark of a stop appears.
        first_step: The first question comes after it.
    """

    def __init__(self, run: RunDirectory, *, first_step: int) -> None:
        self._run = run
        self._next_step = first_step
        self._asked_at = (first_step - 1, time.monotonic())
        self._is_first = dist.get_rank() == 0
        self._is_found = threading.Event()
        self._looking = ExitStack()

    def __enter__(self) -> Self:
        if self._is_first:
            interval_s = LOOK_INTERVAL_S if self._run.is_local else _BUCKET_LOOK_INTERVAL_S
            self._looking.enter_context(repeated(self._look, interval_s=interval_s, name="stop"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._looking.close()

    def is_asked_for(
        self, step: int, *, limit_s: float, lost_first_worker: Callable[[RuntimeError], Exception]
    ) -> bool:
        """Tell after step `step` whether all stop; asks only at the agreed steps.

        Args:
            limit_s: Longest wait for the answer.
            lost_first_worker: Makes the error to raise where none comes.
        """
        if step < self._next_step:
            return False
        answer = torch.tensor([self._is_found.is_set(), self._following(step)], device=CPU)
        work = dist.broadcast(answer, src=0, async_op=True)
        assert work is not None
        try:
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            if self._is_first:
                raise
            raise lost_first_worker(error) from error
        is_found, self._next_step = answer.tolist()
        return bool(is_found)

    def _following(self, step: int) -> int:
        """Return the step of the question after this one."""
        (before, before_s), now_s = self._asked_at, time.monotonic()
        self._asked_at = step, now_s
        step_s = (now_s - before_s) / (step - before)
        return step + max(1, int(_QUESTION_INTERVAL_S / max(step_s, 1e-6)))

    def _look(self) -> None:
        try:
            if self._run.read_bytes(STOP) is not None:
                self._is_found.set()
        except OSError:
            # A store that is away for a moment has no stop to tell; the next look asks again.
            return
