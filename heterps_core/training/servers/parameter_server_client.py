"""A table whose rows lie on parameter servers, as a worker that trains with them sees it.

Rows of a step are asked for when its batch is read, steps ahead, as one request to each server for the distinct rows
of all its micro-batches; gradients go back the same way once a step and are not waited for.

Shapes: B samples of a micro-batch, S rows that each looks up, U distinct ones of the step, D width of a row,
X = S * D.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from heterps_core.compute_device import CPU, host_buffer, to_device
from heterps_core.embeddings.lookup_table import LookupTable, copy_rows
from heterps_core.embeddings.row_optimizers import sum_by_row
from heterps_core.embeddings.row_range import shard_rows
from heterps_core.training.servers.parameter_server_messages import (
    END,
    NO_STEP,
    Channel,
    Mail,
    Message,
    Patience,
    PullRequest,
    PushNotice,
)
from heterps_core.transport.rank_layout import RankLayout


@dataclass(frozen=True, slots=True)
class Pull:
    """The rows of a step on their way."""

    step: int
    rows_UD: Tensor
    """On the worker's device."""

    host_rows_UD: Tensor
    """Where messages put them; the same tensor for a worker that computes on the host."""

    bounds: list[int]
    """Those of server i are rows bounds[i]..bounds[i + 1] - 1."""

    messages: list[Message]
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Positions [B, S] in the distinct rows and gradients [B, X], by micro-batch."""

    def wait(self, limit_s: float) -> None:
        """Wait until the rows are there, or at least on their way from the host to the device.

        Raises:
            LostWorkerError: A server died or was silent for too long.
        """
        if not self.messages:
            return
        for message in self.messages:
            message.wait(limit_s)
        self.messages.clear()
        if self.rows_UD is not self.host_rows_UD:
            self.rows_UD.copy_(self.host_rows_UD, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PulledPart:
    """What one micro-batch looks up of a pull."""

    pull: Pull
    inverse_BS: Tensor
    """Position in the distinct rows of each looked-up row; on the worker's device."""


class PulledTable(LookupTable[PulledPart]):
    """A table that parameter servers hold.

    Args:
        number: Of this table among those that the servers hold, in the order of layers.
        name: Name of the table.
        num_rows: Rows of the whole table.
        dimension: Width of a row (D).
        layout: Ranks of servers and stages.
        staleness_bound_steps: Steps before one whose updates may be missing in its rows, 0 or more.
        device: That the worker computes on.
    """

    def __init__(
        self,
        *,
        number: int,
        name: str,
        num_rows: int,
        dimension: int,
        layout: RankLayout,
        staleness_bound_steps: int,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(name=name, num_rows=num_rows, dimension=dimension, device=device)
        self._number = number
        self._servers = layout.servers
        shards = [shard_rows(num_rows, len(self._servers), server) for server in range(len(self._servers))]
        self._shard_stops = torch.tensor([shard.stop for shard in shards], device=CPU)
        self._mail = Mail(layout)
        self._staleness_bound_steps = staleness_bound_steps
        self._patience = Patience()
        self._ahead: deque[Pull] = deque()
        self._sent: deque[list[Message]] = deque()
        self._num_steps = 0
        self._started_s: float | None = None

    def start(self, step: int) -> None:
        """Begin; `step` steps were trained before."""
        self._num_steps = step

    def pull(self, parts: Sequence[Tensor], *, step: int) -> list[PulledPart]:
        """Ask the servers for the rows of a training step, without waiting for them.

        Steps must be asked for in order, and each that is trained gets gradients by `apply_gradients`. It may run
        on a thread of its own.

        Args:
            parts: Row numbers [B, S] of each micro-batch.
            step: Counted from 0.

        Returns:
            One for each part; hand it to `expect` right before the look-up.

        Raises:
            IndexError: A row is not in the table.
            LostWorkerError: The connection to a server is broken.
        """
        pulled = self._pull(parts, step=step, least_steps=max(step - self._staleness_bound_steps, 0))
        self._ahead.append(pulled[0].pull)
        return pulled

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Send the servers the gradients of the oldest step that has none yet, without waiting for anything new.

        Raises:
            LostWorkerError: A server died, or has not taken an older step's in time.
        """
        pull = self._ahead.popleft()
        gradients_UD = sum_by_row(pull.gradients, len(pull.rows_UD), self.dimension).cpu()
        self._wait_until_sent(self._staleness_bound_steps)
        messages = []
        for server, (first, stop) in zip(self._servers, pairwise(pull.bounds), strict=True):
            notice = PushNotice(self._number, stop - first, pull.step, learning_rate)
            messages.append(self._mail.send_header(notice, server, Channel.PUSH))
            messages.append(self._mail.send(gradients_UD[first:stop], server, Channel.PUSH))
        self._sent.append(messages)
        self._num_steps = pull.step + 1
        if self._started_s is not None:
            self._patience.step_took(time.perf_counter() - self._started_s)
            self._started_s = None

    def close(self) -> None:
        """Tell the servers that nothing more will come; raises as `apply_gradients` does."""
        self._drop_ahead()
        messages = []
        for server in self._servers:
            request = PullRequest(self._number, 0, END, 0)
            notice = PushNotice(self._number, 0, END, 0.0)
            messages.append(self._mail.send_header(request, server, Channel.PULL))
            messages.append(self._mail.send_header(notice, server, Channel.PUSH))
        self._sent.append(messages)
        self._wait_until_sent(0)

    def _pull(self, parts: Sequence[Tensor], *, step: int, least_steps: int) -> list[PulledPart]:
        rows_U, inverse_N = self._distinct(torch.cat([rows_BS.reshape(-1) for rows_BS in parts]).cpu())
        # Distinct rows are ascending and shards are contiguous, so they are in the servers' order already.
        bounds = [0, *torch.searchsorted(rows_U, self._shard_stops).tolist()]
        host_rows_UD = host_buffer(len(rows_U), self.dimension, near=self.device)
        is_on_host = self.device.type == "cpu"
        rows_UD = host_rows_UD if is_on_host else torch.empty_like(host_rows_UD, device=self.device)
        messages = []
        for server, (first, stop) in zip(self._servers, pairwise(bounds), strict=True):
            request = PullRequest(self._number, stop - first, step, least_steps)
            messages.append(self._mail.send_header(request, server, Channel.PULL))
            messages.append(self._mail.send(rows_U[first:stop], server, Channel.PULL))
            messages.append(self._mail.receive(host_rows_UD[first:stop], server, Channel.ANSWER))
        pull = Pull(step, rows_UD, host_rows_UD, bounds, messages)
        inverses = torch.split(to_device(inverse_N, self.device), [rows_BS.numel() for rows_BS in parts])
        return [
            PulledPart(pull, inverse.view(rows_BS.shape))
            for inverse, rows_BS in zip(inverses, parts, strict=True)
        ]

    def _gather(self, rows_BS: Tensor, out_BX: Tensor) -> PulledPart:
        part = self._expected
        if part is None:
            # Not a training step: all updates must be in, and no gradients will follow.
            self._drop_ahead()
            (part,) = self._pull([rows_BS], step=NO_STEP, least_steps=self._num_steps)
        self._expected = None
        if self._started_s is None:
            self._started_s = time.perf_counter()
        part.pull.wait(self._patience.limit_s)
        copy_rows(part.pull.rows_UD, part.inverse_BS, out_BX)
        return part

    def _scatter(self, rows_BS: Tensor, part: PulledPart, gradients_BX: Tensor) -> None:
        part.pull.gradients.append((part.inverse_BS, gradients_BX))

    def _drop_ahead(self) -> None:
        """Wait for the rows of steps that will not be trained: their answers come first."""
        while self._ahead:
            self._ahead.popleft().wait(self._patience.limit_s)

    def _wait_until_sent(self, num_steps_left: int) -> None:
        """Wait for the gradients of all but the newest steps; they stay in memory until then."""
        while len(self._sent) > num_steps_left:
            for message in self._sent.popleft():
                message.wait(self._patience.limit_s)
