"""One replica of one stage: it runs its layers over micro-batches and trades rows with its neighbours.

The exchange is c10d send and receive on contiguous row slices (`stage_exchange`). For each pair of neighbours the
order of messages is the protocol. Losses are summed and divided by the size of the whole batch, so gradients of
replicas add up to the gradient of the batch mean, whatever the cut.

Shapes: B rows of this replica in a micro-batch, W width of a boundary activation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from heterps_core.data.batch import ClickBatch
from heterps_core.models.chain import run_layers
from heterps_core.training.pipeline_schedule import one_forward_one_backward
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.stage_exchange import RowSlice, replica_slice, routes_to_neighbour


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The part of a micro-batch that a replica works on."""

    num_rows: int
    """Of the whole micro-batch, over all replicas."""

    batch: ClickBatch
    """This replica's slice."""


@dataclass(slots=True)
class _Receiving:
    rows_BW: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.rows_BW


class _Boundary:
    """The messages between this replica and the stage on one side of it."""

    def __init__(self, layout: RankLayout, stage: int, replica: int, neighbour: int, width: int) -> None:
        self._peer_ranks = layout.ranks[neighbour]
        self._num_replicas = len(layout.ranks[stage])
        self._replica = replica
        self._width = width
        # A message must stay in memory until it is sent.
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def receive(self, num_rows: int) -> _Receiving:
        """Begin to receive this replica's slice of a micro-batch of `num_rows` rows."""
        mine = replica_slice(num_rows, self._num_replicas, self._replica)
        rows_BW = torch.empty(mine.num_rows, self._width)
        works = [dist.irecv(rows_BW[first:stop], rank) for rank, first, stop in self._messages(num_rows)]
        return _Receiving(rows_BW, [work for work in works if work is not None])

    def send(self, rows_BW: Tensor, num_rows: int) -> None:
        """Begin to send this replica's slice of a micro-batch of `num_rows` rows."""
        rows_BW = rows_BW.contiguous()
        for rank, first, stop in self._messages(num_rows):
            part = rows_BW[first:stop]
            work = dist.isend(part, rank)
            assert work is not None
            self._sending.append((work, part))

    def wait_until_sent(self) -> None:
        """Wait for all messages; at the end of a step."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _messages(self, num_rows: int) -> list[tuple[int, int, int]]:
        routes = routes_to_neighbour(
            num_rows,
            num_replicas=self._num_replicas,
            replica=self._replica,
            num_peer_replicas=len(self._peer_ranks),
        )
        return [(self._peer_ranks[route.peer_replica], route.first, route.stop) for route in routes]


class StageRunner:
    """Runs training steps and predictions of one replica.

    Args:
        layers: The layers of the stage, in order; embeddings have their tables.
        layout: Ranks of all stages.
        stage, replica: Which one this is.
        input_width: Width of the activation that enters the stage; 0 for the first.
        output_width: Width of the activation that leaves it.
        group: The replicas of this stage.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        layout: RankLayout,
        stage: int,
        replica: int,
        input_width: int,
        output_width: int,
        group: ProcessGroup | None,
    ) -> None:
        self.layers = layers
        self.stage = stage
        self.replica = replica
        self.num_stages = layout.num_stages
        self.num_replicas = len(layout.ranks[stage])
        self.group = group
        self.is_first = stage == 0
        self.is_last = stage == layout.num_stages - 1
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._before = None if self.is_first else _Boundary(layout, stage, replica, stage - 1, input_width)
        self._after = None if self.is_last else _Boundary(layout, stage, replica, stage + 1, output_width)

    def row_slices(self, num_rows: int, num_microbatches: int) -> list[tuple[int, RowSlice]]:
        """Return for each micro-batch of a batch its size and this replica's rows, relative to the batch."""
        slices = []
        for index in range(num_microbatches):
            microbatch = replica_slice(num_rows, num_microbatches, index)
            mine = replica_slice(microbatch.num_rows, self.num_replicas, self.replica)
            rows = RowSlice(microbatch.first + mine.first, microbatch.first + mine.stop)
            if microbatch.num_rows:
                slices.append((microbatch.num_rows, rows))
        return slices

    def train_step(self, microbatches: Sequence[MicroBatch]) -> float:
        """Run forward and backward passes of a batch and leave summed gradients in the parameters.

        Returns:
            On the last stage the mean loss over the whole batch, elsewhere 0.
        """
        batch_size = sum(microbatch.num_rows for microbatch in microbatches)
        arriving: deque[_Receiving] = deque()
        returning: deque[_Receiving] = deque()
        live: dict[int, tuple[Tensor | None, Tensor]] = {}
        loss = torch.zeros(())

        def post_receive(index: int) -> None:
            if self._before is not None and index < len(microbatches):
                arriving.append(self._before.receive(microbatches[index].num_rows))

        post_receive(0)
        order = one_forward_one_backward(
            num_microbatches=len(microbatches), num_stages=self.num_stages, stage=self.stage
        )
        for direction, index in order:
            microbatch = microbatches[index]
            if direction == "forward":
                # The next activation travels while this one is worked on.
                post_receive(index + 1)
                entering = None if self._before is None else arriving.popleft().wait().requires_grad_()
                leaving = run_layers(self.layers, microbatch.batch, entering)
                if self._after is not None:
                    self._after.send(leaving.detach(), microbatch.num_rows)
                    returning.append(self._after.receive(microbatch.num_rows))
                else:
                    leaving = F.binary_cross_entropy_with_logits(
                        leaving.squeeze(1), microbatch.batch.labels, reduction="sum"
                    ).div(batch_size)
                    loss += leaving.detach()
                live[index] = (entering, leaving)
            else:
                entering, leaving = live.pop(index)
                gradient = None if self._after is None else returning.popleft().wait()
                torch.autograd.backward(leaving, gradient)
                if self._before is not None:
                    assert entering is not None
                    assert entering.grad is not None
                    self._before.send(entering.grad, microbatch.num_rows)
        self._wait_until_sent()
        self._sum_gradients()
        return self._sum_loss(loss)

    def predict(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Run forward passes only.

        Returns:
            On the last stage the logits of this replica's rows, in the order of micro-batches; else empty.
        """
        logits = []
        arriving: deque[_Receiving] = deque()
        with torch.no_grad():
            if self._before is not None:
                arriving.extend(self._before.receive(microbatch.num_rows) for microbatch in microbatches)
            for microbatch in microbatches:
                entering = None if self._before is None else arriving.popleft().wait()
                leaving = run_layers(self.layers, microbatch.batch, entering)
                if self._after is not None:
                    self._after.send(leaving, microbatch.num_rows)
                else:
                    logits.append(leaving.squeeze(1))
            self._wait_until_sent()
        return torch.cat(logits) if logits else torch.empty(0)

    def _wait_until_sent(self) -> None:
        for boundary in (self._before, self._after):
            if boundary is not None:
                boundary.wait_until_sent()

    def _sum_gradients(self) -> None:
        """All-reduce the dense gradients of the stage as one message."""
        if self.num_replicas == 1 or not self._parameters:
            return
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def _sum_loss(self, loss: Tensor) -> float:
        if not self.is_last:
            return 0.0
        if self.num_replicas > 1:
            dist.all_reduce(loss, group=self.group)
        return float(loss)
