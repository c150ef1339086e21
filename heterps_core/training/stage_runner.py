"""One replica of one stage: it runs its layers over micro-batches and trades rows with its neighbours.

The exchange with neighbours is one of contiguous row slices (`stage_boundary`), posted ahead so that it overlaps
with computing. Losses are summed and divided by the size of the whole batch, so gradients of replicas add up to the
gradient of the batch mean, whatever the cut.

Shapes: B rows of this replica in a micro-batch, W width of a boundary activation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from heterps_core.data.batch import ClickBatch
from heterps_core.embeddings.sharded_table import RowExchange, ShardedTable
from heterps_core.training.failures import LostWorkerError
from heterps_core.training.pipeline_schedule import WARMUP_PER_STAGE, one_forward_one_backward
from heterps_core.training.rank_layout import RankLayout
from heterps_core.training.stage_boundary import Receiving, StageBoundary, lost_worker
from heterps_core.training.stage_exchange import RowSlice, replica_slice
from heterps_core.training.stage_layers import StageLayers

FIRST_SILENCE_LIMIT_S = 120.0
"""Longest wait for a message of the first step, in which kernels are built and memory is touched first."""

SILENCE_LIMIT_S = 20.0
"""Longest wait for a message later on, where nobody says otherwise."""

STEPS_OF_SILENCE = 10.0
"""A model whose steps are so slow that this many of them outlast the limit is waited for as long."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The part of a micro-batch that a replica works on."""

    num_rows: int
    """Of the whole micro-batch, over all replicas."""

    batch: ClickBatch
    """This replica's slice."""

    exchanges: Sequence[tuple[ShardedTable, RowExchange]] = ()
    """Of tables whose owners know already what this slice will look up in them."""


class StageRunner:
    """Runs training steps and predictions of one replica.

    Args:
        layers: The layers of the stage, in order; embeddings have their tables.
        layout: Ranks of all stages.
        stage, replica: Which one this is.
        input_width: Width of the activation that enters the stage; 0 for the first.
        output_width: Width of the activation that leaves it.
        group: The replicas of this stage.
        precision: Name in `PRECISIONS`: in what dense layers multiply.
        warmup_per_stage: See `pipeline_schedule`; the same for all stages.
        silence_limit_s: Longest wait for a message, from the second step on.
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
        precision: str = "fp32",
        warmup_per_stage: int = WARMUP_PER_STAGE,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._run_layers = StageLayers(layers, precision=precision)
        self.stage = stage
        self.replica = replica
        self.num_stages = layout.num_stages
        self.num_replicas = len(layout.ranks[stage])
        self.group = group
        self.is_first = stage == 0
        self.is_last = stage == layout.num_stages - 1
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._warmup_per_stage = warmup_per_stage
        self._before = None if self.is_first else self._boundary(layout, stage - 1, input_width)
        self._after = None if self.is_last else self._boundary(layout, stage + 1, output_width)
        self._layout = layout
        self._silence_limit_s = silence_limit_s
        self._slowest_step_s = 0.0
        self._is_warm = False

    @property
    def silence_limit_s(self) -> float:
        """Longest wait for another worker that does equal work."""
        return max(self._silence_limit_s, STEPS_OF_SILENCE * self._slowest_step_s)

    def lost_worker(self, rank: int, error: RuntimeError) -> LostWorkerError:
        """Return what to say where a message of another worker did not come; `error` is gloo's."""
        return lost_worker(self._layout, rank, error, silence_limit_s=self.silence_limit_s)

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

    def train_step(self, microbatches: Sequence[MicroBatch]) -> list[float]:
        """Run forward and backward passes of a batch and leave summed gradients in the parameters.

        Returns:
            On the last stage, for each micro-batch, its share of the mean loss over the whole batch; they add up
            to it. Elsewhere nothing.

        Raises:
            LostWorkerError: A neighbour died, or was silent for too long.
        """
        started_s = time.perf_counter()
        batch_size = sum(microbatch.num_rows for microbatch in microbatches)
        to_receive = iter(microbatches)
        arriving: deque[Receiving] = deque()
        returning: deque[Receiving] = deque()
        live: dict[int, tuple[Tensor | None, Tensor]] = {}
        losses: list[Tensor] = []

        # As many activations may travel to this stage as the one before it is ahead.
        for _ in range(self._warmup_per_stage):
            self._post_receive(to_receive, arriving)
        order = one_forward_one_backward(
            num_microbatches=len(microbatches),
            num_stages=self.num_stages,
            stage=self.stage,
            warmup_per_stage=self._warmup_per_stage,
        )
        for direction, index in order:
            microbatch = microbatches[index]
            if direction == "forward":
                self._post_receive(to_receive, arriving)
                entering = None if self._before is None else arriving.popleft().wait().requires_grad_()
                for table, exchange in microbatch.exchanges:
                    table.expect(exchange)
                leaving = self._run_layers(microbatch.batch, entering)
                if self._after is not None:
                    self._after.send(leaving.detach(), microbatch.num_rows)
                    returning.append(self._after.receive(microbatch.num_rows))
                else:
                    leaving = F.binary_cross_entropy_with_logits(
                        leaving.squeeze(1), microbatch.batch.labels, reduction="sum"
                    ).div(batch_size)
                    losses.append(leaving.detach())
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
        shares = self._sum_over_replicas(losses)
        # The first step warms up, and says nothing of the others.
        elapsed_s = time.perf_counter() - started_s if self._is_warm else 0.0
        self._slowest_step_s, self._is_warm = max(self._slowest_step_s, elapsed_s), True
        for boundary in self._boundaries:
            boundary.silence_limit_s = self.silence_limit_s
        return shares

    def predict(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Run forward passes only.

        Returns:
            On the last stage the logits of this replica's rows, in the order of micro-batches; else empty.
        """
        logits = []
        arriving: deque[Receiving] = deque()
        with torch.no_grad():
            if self._before is not None:
                arriving.extend(self._before.receive(microbatch.num_rows) for microbatch in microbatches)
            for microbatch in microbatches:
                entering = None if self._before is None else arriving.popleft().wait()
                leaving = self._run_layers(microbatch.batch, entering)
                if self._after is not None:
                    self._after.send(leaving, microbatch.num_rows)
                else:
                    logits.append(leaving.squeeze(1))
            self._wait_until_sent()
        return torch.cat(logits) if logits else torch.empty(0)

    def _boundary(self, layout: RankLayout, neighbour: int, width: int) -> StageBoundary:
        return StageBoundary(
            layout,
            stage=self.stage,
            replica=self.replica,
            neighbour=neighbour,
            width=width,
            silence_limit_s=FIRST_SILENCE_LIMIT_S,
        )

    @property
    def _boundaries(self) -> list[StageBoundary]:
        return [boundary for boundary in (self._before, self._after) if boundary is not None]

    def _post_receive(self, to_receive: Iterator[MicroBatch], arriving: deque[Receiving]) -> None:
        microbatch = next(to_receive, None)
        if self._before is not None and microbatch is not None:
            arriving.append(self._before.receive(microbatch.num_rows))

    def _wait_until_sent(self) -> None:
        for boundary in self._boundaries:
            boundary.wait_until_sent()

    def _sum_over_replicas(self, losses: list[Tensor]) -> list[float]:
        """All-reduce the dense gradients of the stage and the losses of micro-batches, as one message."""
        losses_M = torch.stack(losses) if losses else torch.empty(0)
        if self.num_replicas > 1 and (self._parameters or losses):
            gradients = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in self._parameters
            ]
            flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), losses_M])
            dist.all_reduce(flat, group=self.group)
            *parts, losses_M = torch.split(flat, [*(gradient.numel() for gradient in gradients), len(losses)])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        # Read once a step, when nothing is left to compute.
        return losses_M.tolist()
