"""The messages between one replica and the stage on one side of it.

Sends and receives run on gloo's own threads while layers compute; a stage on a CUDA device writes and reads them in
pinned memory. For each pair of replicas the order of messages is the protocol. No wait is without a limit: a
neighbour that died or froze is named, and the run ends.

Shapes: B rows of this replica in a micro-batch, W width of a boundary activation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from heterps_core.compute_device import CPU, HostCopy, host_buffer, to_device
from heterps_core.training.pipeline.stage_exchange import StageSide
from heterps_core.transport.rank_layout import LostWorkerError, lost_worker


@dataclass(frozen=True, slots=True)
class _Message:
    work: dist.Work
    peer_replica: int
    rows: Tensor
    """Must stay in memory until it is sent."""


@dataclass(frozen=True, slots=True)
class Receiving:
    """A slice of a micro-batch on its way to this replica."""

    rows_BW: Tensor
    """On the host."""

    arrival: Future[None]
    device: torch.device

    def is_there(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self.arrival.done()

    def wait(self) -> Tensor:
        """Return the slice [B, W], float32, on the stage's device, once all of it is there.

        Raises:
            LostWorkerError: A neighbour did not send its part in time.
        """
        self.arrival.result()
        return to_device(self.rows_BW, self.device).float()


class StageBoundary:
    """Sends to and receives from a neighbouring stage.

    Args:
        side: This replica's.
        width: Of the activation that crosses (W).
        silence_limit_s: Longest wait for one message.
        device: That this stage computes on.
        dtype: Of what is sent, float32 or bfloat16.
    """

    def __init__(
        self,
        side: StageSide,
        *,
        width: int,
        silence_limit_s: float,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.silence_limit_s = silence_limit_s
        self.sent_bytes = 0
        self._dtype = dtype
        self._side = side
        self._width = width
        self._device = device
        self._sending: list[Future[list[_Message]]] = []
        # gloo copies what a connection takes or has on the thread that asks, and cannot say whether a message has
        # arrived without waiting for it; neither is to keep layers from computing.
        self._poster = ThreadPoolExecutor(1, thread_name_prefix=f"stage-{side.neighbour}-posting")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix=f"stage-{side.neighbour}-waiting")

    def receive(self, num_rows: int) -> Receiving:
        """Begin to receive this replica's slice of a micro-batch of `num_rows` rows."""
        num_own = self._side.slice_of(num_rows).num_rows
        rows_BW = host_buffer(num_own, self._width, near=self._device, dtype=self._dtype)
        posted = self._poster.submit(self._post, dist.irecv, HostCopy(rows_BW, None), num_rows)
        return Receiving(rows_BW, self._watcher.submit(self._wait_for, posted), self._device)

    def send(self, rows_BW: Tensor, num_rows: int) -> None:
        """Begin to send this replica's slice of a micro-batch of `num_rows` rows, which must not be changed."""
        rows_BW = rows_BW.to(self._dtype).contiguous()
        self.sent_bytes += rows_BW.nbytes
        leaving = HostCopy.begin(rows_BW)
        self._sending.append(self._poster.submit(self._post, dist.isend, leaving, num_rows))

    def wait_until_sent(self) -> None:
        """Wait for all messages; at the end of a step.

        Raises:
            LostWorkerError: A neighbour did not take one in time.
        """
        for posted in self._sending:
            self._wait_for(posted)
        self._sending.clear()

    def _post(
        self, begin: Callable[[Tensor, int], dist.Work | None], on_host: HostCopy, num_rows: int
    ) -> list[_Message]:
        rows_BW = on_host.wait()
        messages = []
        for route in self._side.routes(num_rows):
            part = rows_BW[route.first : route.stop]
            try:
                work = begin(part, self._side.rank_of(route.peer_replica))
            except RuntimeError as error:
                raise self._lost(route.peer_replica, error) from error
            assert work is not None
            messages.append(_Message(work, route.peer_replica, part))
        return messages

    def _wait_for(self, posted: Future[list[_Message]]) -> None:
        for message in posted.result():
            try:
                message.work.wait(timedelta(seconds=self.silence_limit_s))
            except RuntimeError as error:
                raise self._lost(message.peer_replica, error) from error

    def _lost(self, peer: int, error: RuntimeError) -> LostWorkerError:
        side = self._side
        return lost_worker(side.layout, side.rank_of(peer), error, silence_limit_s=self.silence_limit_s)
