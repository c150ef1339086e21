"""What parameter servers and the workers that they serve say to each other, over gloo.

A worker has two channels to each server, told apart by tags, and every message of a channel comes in order:

    pull    PullRequest, then the row numbers asked for; the server answers with the rows
    push    PushNotice, then the gradients of the rows of the oldest pull for training that has none yet

Row numbers travel once, with the pull. So each distinct row of a step costs 8 bytes there, 4 D bytes back and 4 D
bytes of gradient, which is what a plan counts for the exchange inside this stage. What it also counts, the
activation that leaves the stage and its gradient, does not cross: the plan asks for more network than hybrid updates
need, 2 * output_bytes_per_sample for each sample.

Shapes: U distinct rows, D width of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from heterps_core.training.pipeline.stage_runner import FIRST_SILENCE_LIMIT_S, STEPS_OF_SILENCE
from heterps_core.transport.lost_workers import SILENCE_LIMIT_S, lost_worker
from heterps_core.transport.rank_layout import RankLayout

Header = TypeVar("Header", "PullRequest", "PushNotice")


class Channel(IntEnum):
    """Tag of a message; those between stages have tag 0."""

    PULL = 1
    ANSWER = 2
    PUSH = 3


class PullRequest(NamedTuple):
    """Asks for rows."""

    table: int
    """Number of the table, in the order of layers."""

    num_rows: int
    """Row numbers that follow."""

    step: int
    """For which the rows are, counted from 0; `NO_STEP` where no gradients will follow, `END` in the last request."""

    least_steps: int
    """Steps whose updates, of all workers, must be in the rows."""


class PushNotice(NamedTuple):
    """Announces gradients."""

    table: int
    num_rows: int
    step: int
    """In which they were made; `END` in the last notice."""

    learning_rate: float


NO_STEP, END = -1, -2


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor on its way; it stays in memory until then."""

    layout: RankLayout
    rank: int
    content: Tensor
    work: dist.Work | None
    """None for an empty tensor, which is not sent at all: its reader knows."""

    def wait(self, limit_s: float) -> None:
        """Wait until it has arrived or left.

        Raises:
            LostWorkerError: That took longer than the limit, or the connection broke.
        """
        if self.work is None:
            return
        try:
            self.work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise lost_worker(self.layout, self.rank, error, silence_limit_s=limit_s) from error


class Mail:
    """One process's way to the others, from any of its threads.

    Args:
        layout: Ranks of servers and of all stages.
    """

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout

    def send(self, content: Tensor, rank: int, channel: Channel) -> Message:
        """Begin to send a contiguous tensor.

        Raises:
            LostWorkerError: The connection is broken already.
        """
        return self._begin(dist.isend, content, rank, channel)

    def receive(self, content: Tensor, rank: int, channel: Channel) -> Message:
        """Begin to receive into a contiguous tensor of the size that was sent; raises as `send` does."""
        return self._begin(dist.irecv, content, rank, channel)

    def send_header(self, header: PullRequest | PushNotice, rank: int, channel: Channel) -> Message:
        """Begin to send a header; raises as `send` does."""
        # Every whole number in it is far below 2^53.
        return self.send(torch.tensor(header, dtype=torch.float64), rank, channel)

    def receive_header(self, kind: type[Header], rank: int, channel: Channel, *, limit_s: float) -> Header:
        """Wait for a header.

        Raises:
            LostWorkerError: None came within the limit, or the connection broke.
        """
        content = torch.empty(len(kind._fields), dtype=torch.float64)
        self.receive(content, rank, channel).wait(limit_s)
        *whole, last = content.tolist()
        return kind._make([*map(int, whole), last if kind is PushNotice else int(last)])

    def _begin(
        self, function: Callable[..., dist.Work | None], content: Tensor, rank: int, channel: Channel
    ) -> Message:
        if not content.numel():
            return Message(self._layout, rank, content, None)
        try:
            work = function(content, rank, tag=channel)
        except RuntimeError as error:
            raise lost_worker(self._layout, rank, error, silence_limit_s=SILENCE_LIMIT_S) from error
        return Message(self._layout, rank, content, work)


class Patience:
    """Longest wait for others: long in the first step, then by how slow steps are (as in `stage_runner`)."""

    def __init__(self) -> None:
        self.limit_s = FIRST_SILENCE_LIMIT_S
        self._slowest_step_s: float | None = None

    def step_took(self, seconds: float) -> None:
        """Take in how long a step took; the first one warms up, and says nothing."""
        self._slowest_step_s = 0.0 if self._slowest_step_s is None else max(self._slowest_step_s, seconds)
        self.limit_s = max(SILENCE_LIMIT_S, STEPS_OF_SILENCE * self._slowest_step_s)
