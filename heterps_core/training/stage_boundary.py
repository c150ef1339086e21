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
from heterps_core.training.failures import LostWorkerError
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.stage_exchange import replica_slice, routes_to_neighbour


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
        """Return the slice [B, W] on the stage's device, once all of it is there.

        Raises:
            LostWorkerError: A neighbour did not send its part in time.
        """
        self.arrival.result()
        return to_device(self.rows_BW, self.device)


def lost_worker(
    layout: RankLayout, rank: int, error: RuntimeError, *, silence_limit_s: float
) -> LostWorkerError:
    """Return what to say where a message of another worker did not come; `error` is gloo's."""
    stage, replica = layout.position(rank)
    has_ended = "imed out" not in str(error)
    return LostWorkerError(
        rank=rank, stage=stage, replica=replica, limit_s=silence_limit_s, has_ended=has_ended
    )


class StageBoundary:
    """Sends to and receives from a neighbouring stage.

    Args:
        layout: Ranks of all stages.
        stage, replica: This replica.
        neighbour: The stage on the other side.
        width: Of the activation that crosses (W).
        silence_limit_s: Longest wait for one message.
        device: That this stage computes on.
    """

    def __init__(
        self,
        layout: RankLayout,
        *,
        stage: int,
        replica: int,
        neighbour: int,
        width: int,
        silence_limit_s: float,
        device: torch.device = CPU,
    ) -> None:
        self.silence_limit_s = silence_limit_s
        self._layout = layout
        self._peer_ranks = layout.ranks[neighbour]
        self._num_replicas = len(layout.ranks[stage])
        self._replica = replica
        self._width = width
        self._device = device
        self._sending: list[Future[list[_Message]]] = []
        # gloo copies what a connection takes or has on the thread that asks, and cannot say whether a message has
        # arrived without waiting for it; neither is to keep layers from computing.
        self._poster = ThreadPoolExecutor(1, thread_name_prefix=f"stage-{neighbour}-posting")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix=f"stage-{neighbour}-waiting")

    def receive(self, num_rows: int) -> Receiving:
        """Begin to receive this replica's slice of a micro-batch of `num_rows` rows."""
        mine = replica_slice(num_rows, self._num_replicas, self._replica)
        rows_BW = host_buffer(mine.num_rows, self._width, near=self._device)
        posted = self._poster.submit(self._post, dist.irecv, HostCopy(rows_BW, None), num_rows)
        return Receiving(rows_BW, self._watcher.submit(self._wait_for, posted), self._device)

    def send(self, rows_BW: Tensor, num_rows: int) -> None:
        """Begin to send this replica's slice of a micro-batch of `num_rows` rows, which nobody may change."""
        leaving = HostCopy.begin(rows_BW.contiguous())
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
        for peer, first, stop in self._routes(num_rows):
            part = rows_BW[first:stop]
            try:
                work = begin(part, self._peer_ranks[peer])
            except RuntimeError as error:
                raise self._lost(peer, error) from error
            assert work is not None
            messages.append(_Message(work, peer, part))
        return messages

    def _wait_for(self, posted: Future[list[_Message]]) -> None:
        for message in posted.result():
            try:
                message.work.wait(timedelta(seconds=self.silence_limit_s))
            except RuntimeError as error:
                raise self._lost(message.peer_replica, error) from error

    def _lost(self, peer: int, error: RuntimeError) -> LostWorkerError:
        return lost_worker(self._layout, self._peer_ranks[peer], error, silence_limit_s=self.silence_limit_s)

    def _routes(self, num_rows: int) -> list[tuple[int, int, int]]:
        routes = routes_to_neighbour(
            num_rows,
            num_replicas=self._num_replicas,
            replica=self._replica,
            num_peer_replicas=len(self._peer_ranks),
        )
        return [(route.peer_replica, route.first, route.stop) for route in routes]
