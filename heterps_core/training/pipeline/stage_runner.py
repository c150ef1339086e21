"""One replica of one stage: it runs its layers over micro-batches and exchanges rows with its neighbours.

The exchange with neighbours is one of contiguous row slices (`stage_boundary`), posted ahead so that it overlaps
with computing. Losses, times the weights of their rows, are summed and divided by the size of the whole batch, so
gradients of replicas add up to the gradient of the batch mean, whatever the cut.

With delayed updates a step does not wait for the pipeline to drain: while backward passes of batch t run, forward
passes of batch t + 1 do too (PipeDream-2BW: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
Training"). Nor does it for the sum of batch t's gradients over replicas, which travels while batch t + 1 computes.
Dense layers compute batch t, forward and backward, with the parameters after t - 2 batches instead of t, on all
stages, which takes two copies of them. Rows of tables are read as they are when a forward pass runs: those passes of
batch t + 1 that run ahead see none of batch t's updates, the others all. Both follow from the order of passes alone,
so a run can be repeated bit for bit. A batch after a drained pipeline sees all updates from before it.

Shapes: B rows of this replica in a micro-batch, W width of a boundary activation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.compute_device import CPU, precision_on
from heterps_core.data.batch import ClickBatch
from heterps_core.embeddings.row_exchange import LookupRows
from heterps_core.embeddings.row_range import RowRange
from heterps_core.embeddings.sequence_columns import SequenceColumns
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.training.batch_shares import OwnWork
from heterps_core.training.gradients.gradient_sum import GradientSum, PendingSum
from heterps_core.training.gradients.weight_gradients import WeightGradients
from heterps_core.training.job import DELAYED, TrainingConfig
from heterps_core.training.pipeline.delayed_layers import DelayedLayers
from heterps_core.training.pipeline.pipeline_schedule import WARMUP_PER_STAGE, one_forward_one_backward
from heterps_core.training.pipeline.shared_memory_boundary import (
    ArrivingRows,
    SharedMemoryBoundary,
    SharedNeighbour,
)
from heterps_core.training.pipeline.stage_boundary import Receiving, ReceivingPacked, StageBoundary
from heterps_core.training.pipeline.stage_exchange import StageSide, batch_slices
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_place import ALONE, StagePlace
from heterps_core.transport.rank_layout import LostWorkerError, lost_worker

Boundary: TypeAlias = StageBoundary | SharedMemoryBoundary
Arriving: TypeAlias = Receiving | ReceivingPacked | ArrivingRows

_FIRST_SILENCE_LIMIT_S = 120.0
"""Longest wait for a message of the first step, in which kernels are built and memory is touched first; later on it
is `SILENCE_LIMIT_S`."""

_STEPS_OF_SILENCE = 10.0
"""A model whose steps are so slow that this many of them outlast the limit is waited for as long."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The part of a micro-batch that a replica works on."""

    num_rows: int
    """Rows of the whole micro-batch, over all replicas."""

    batch: ClickBatch
    """This replica's slice."""

    announced: Sequence[tuple[ShardedTable, LookupRows]] = ()
    """Rows that this slice looks up, by table, where the owners of the rows know them already."""

    row_keys: Tensor | None = None
    """Keys of the slice's rows, for dropout; see `RowDropout`."""


class _LivePass(NamedTuple):
    """A forward pass whose backward pass is still to come."""

    num_rows: int
    entering: Tensor | None
    leaving: Tensor
    """On the last stage its share of the loss."""


def _summed_loss(logits: Tensor, batch: ClickBatch, label_weights: Tensor | None = None) -> Tensor:
    """Return the log-loss of logits [B, labels], times the weights of rows, summed over rows; of labels the mean.

    Args:
        label_weights: [labels], of mean 1; None for ones.
    """
    num_labels = logits.shape[1]
    labels = batch.labels.view(-1, num_labels)
    weights = None if batch.weights is None else batch.weights.unsqueeze(1)
    if label_weights is not None:
        weights = label_weights.expand_as(logits) if weights is None else weights * label_weights
    loss = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    return loss if num_labels == 1 else loss.div(num_labels)


def _counts(boundary: Boundary, activation_BW: Tensor) -> Tensor | None:
    """Return the lengths of packed sequences that cross."""
    return None if boundary.packed is None else boundary.packed.columns.counts(activation_BW)


class StageRunner:
    """Runs training steps and predictions of one replica.

    Args:
        model: The layers of the stage; embeddings have their tables.
        config: Says in what layers multiply, what crosses between stages, and when batches are updated.
        place: Place of this replica in the plan.
        warmup_per_stage: See `pipeline_schedule`; the same for all stages.
    """

    def __init__(
        self,
        model: StageModel,
        config: TrainingConfig,
        place: StagePlace = ALONE,
        *,
        warmup_per_stage: int = WARMUP_PER_STAGE,
    ) -> None:
        self.place, self._config, self._warmup_per_stage = place, config, warmup_per_stage
        layers = list(model.layers.values())
        # Dropout and batch normalization work otherwise in training than in predictions.
        self._modules = nn.ModuleList(layers).train()
        precision = precision_on(place.device, config.precision)
        run_layers = partial(StageLayers, precision=precision, puts_off=place.num_stages > 1)
        self._run_layers = run_layers(layers)
        self._delayed = None
        # A single worker has no other to wait for.
        if config.update_mode == DELAYED and (place.num_stages > 1 or place.group is not None):
            self._delayed = DelayedLayers(layers, run_layers)
        self.is_last = place.stage == place.num_stages - 1
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self._gradient_sum = GradientSum(self._parameters, place)
        if place.link is not None:
            place.link.silence_limit_s = _FIRST_SILENCE_LIMIT_S
        self._before = self._boundary(place.stage - 1, model.input_width, model.input_columns)
        self._after = self._boundary(place.stage + 1, model.output_width, model.output_columns)
        self._label_weights = None
        if config.label_weights:
            weights_L = torch.tensor(config.label_weights, device=place.device)
            self._label_weights = weights_L / weights_L.mean()
        self._arriving: deque[Arriving] = deque()
        self._returning: deque[Arriving] = deque()
        self._is_drained = True
        self._ahead: deque[_LivePass] = deque()
        """Forward passes whose backward passes are still to come."""

        self._sums: deque[PendingSum] = deque()
        """Sums of batches whose update is still to come."""

        peers = next((table.peers for table in model.tables.values() if table.peers is not None), None)
        self.own_work = OwnWork(lambda: self.waited_seconds + (0.0 if peers is None else peers.rows.waited_s))

        self._slowest_step_s = 0.0
        self._is_warm = False
        self.trained_seconds = 0.0
        """In training steps after the first, which warms up."""

        self.waited_seconds = 0.0
        """Seconds among them for messages of other stages with nothing left to work out."""

    def take_shares(self, shares: tuple[tuple[int, ...], ...]) -> None:
        """Cut later batches by other shares of all stages; all workers call it when no row is under way."""
        layout = replace(self.place.layout, shares=shares)
        self.place = replace(self.place, layout=layout)
        self.own_work.begin_again()
        for boundary in self._boundaries:
            boundary.side = replace(boundary.side, layout=layout)

    @property
    def silence_limit_s(self) -> float:
        """Longest wait for another worker that does equal work."""
        return max(self.place.silence_limit_s, _STEPS_OF_SILENCE * self._slowest_step_s)

    def lost_worker(self, rank: int, error: RuntimeError) -> LostWorkerError:
        """Return what to say where a message of another worker did not come; `error` is gloo's."""
        return lost_worker(self.place.layout, rank, error, silence_limit_s=self.silence_limit_s)

    def row_slices(self, num_rows: int, num_microbatches: int) -> list[tuple[int, RowRange]]:
        """Return for each micro-batch of a batch its size and this replica's rows, relative to the batch."""
        return batch_slices(
            num_rows,
            num_microbatches=num_microbatches,
            shares=self.place.layout.shares_of(self.place.stage),
            replica=self.place.replica,
        )

    def train_step(
        self, microbatches: Sequence[MicroBatch], *, following: Sequence[MicroBatch] = ()
    ) -> Iterator[list[float]]:
        """Run forward and backward passes of a batch and begin to sum its gradients over replicas.

        Args:
            microbatches: The micro-batches of the batch, in order.
            following: The micro-batches of the next call of this method, if they are known. The stage then receives
                the first of them while this step ends and, with delayed updates, computes with them. Empty drains the
                pipeline.

        Returns:
            An iterator, which must be run to its end, over the batches that may be updated: this one; with delayed
            updates the one before, or both where the pipeline drains. For each the summed gradients lie in the
            parameters. It gives what the micro-batches have of the mean loss over the batch, on the last stage.

        Raises:
            LostWorkerError: A neighbour died, or was silent for too long.
        """
        started_s = time.perf_counter()
        self._set_mode(is_training=True)
        run_layers = next_run_layers = self._run_layers
        if self._delayed is not None:
            run_layers, next_run_layers = self._delayed.begin_step(is_drained=self._is_drained)
        self._is_drained = not following
        num_ahead = len(self._ahead)
        batch_size = sum(microbatch.num_rows for microbatch in microbatches)
        passes = [(microbatch, run_layers, batch_size) for microbatch in microbatches]
        received = [*microbatches, *following[: self._warmup_per_stage]]
        if self._delayed is not None:
            warmup = self._warmup_per_stage * (self.place.num_stages - 1 - self.place.stage)
            num_next = min(warmup, len(microbatches), len(following))
            next_size = sum(microbatch.num_rows for microbatch in following)
            passes += [(microbatch, next_run_layers, next_size) for microbatch in following[:num_next]]
            received = [*microbatches, *following[: num_next + self._warmup_per_stage]]
        to_receive = iter([microbatch.num_rows for microbatch in received[num_ahead + len(self._arriving) :]])
        weight_gradients = run_layers.weight_gradients
        losses: list[Tensor] = []

        # As many activations may travel to this stage as the one before it is ahead.
        while len(self._arriving) < self._warmup_per_stage and self._post_receive(to_receive):
            pass
        order = one_forward_one_backward(
            num_microbatches=len(passes),
            num_stages=self.place.num_stages,
            stage=self.place.stage,
            warmup_per_stage=self._warmup_per_stage,
            most_ahead=len(microbatches),
        )
        for direction, index in order:
            # What ran ahead in the step before is not run again; backward passes of the next batch are its own.
            if direction == "forward" and index >= num_ahead:
                self._post_receive(to_receive)
                self._ahead.append(self._run_forward(*passes[index], weight_gradients))
            elif direction == "backward" and index < len(microbatches):
                self._run_backward(self._ahead.popleft(), losses, weight_gradients)
        while self._post_receive(to_receive):
            pass
        weight_gradients.finish()
        self._end_step(is_drained=self._is_drained)
        if self._delayed is not None:
            gradients = self._delayed.take_gradients()
        else:
            gradients = [parameter.grad for parameter in self._parameters]
        self._sums.append(self._gradient_sum.begin(gradients, losses))
        return self._finish_sums(started_s)

    def _finish_sums(self, started_s: float) -> Iterator[list[float]]:
        num_under_way = 0 if self._delayed is None or self._is_drained else 1
        while len(self._sums) > num_under_way:
            with self.own_work.waiting():
                losses = self._sums.popleft().finish()
            yield losses
        # The first step warms up, and says nothing of the others.
        elapsed_s = time.perf_counter() - started_s if self._is_warm else 0.0
        self.trained_seconds += elapsed_s
        if not self._is_warm:
            self.waited_seconds = 0.0
        self._slowest_step_s, self._is_warm = max(self._slowest_step_s, elapsed_s), True
        for boundary in self._boundaries:
            boundary.silence_limit_s = self.silence_limit_s
        if self.place.link is not None:
            self.place.link.silence_limit_s = self.silence_limit_s

    def _run_forward(
        self,
        microbatch: MicroBatch,
        run_layers: StageLayers,
        batch_size: int,
        weight_gradients: WeightGradients,
    ) -> _LivePass:
        entering = None
        if self._before is not None:
            entering = self._wait_for(self._arriving.popleft(), weight_gradients).requires_grad_()
        for table, looked_up in microbatch.announced:
            table.expect(looked_up)
        leaving = run_layers(microbatch.batch, entering, microbatch.row_keys)
        if self._after is not None:
            self._after.send(leaving.detach(), microbatch.num_rows, _counts(self._after, leaving))
            self._returning.append(self._after.receive(microbatch.num_rows))
        else:
            leaving = _summed_loss(leaving, microbatch.batch, self._label_weights).div(batch_size)
        return _LivePass(microbatch.num_rows, entering, leaving)

    def _run_backward(self, live: _LivePass, losses: list[Tensor], weight_gradients: WeightGradients) -> None:
        gradient = None
        if self._after is None:
            losses.append(live.leaving.detach())
        else:
            gradient = self._wait_for(self._returning.popleft(), weight_gradients)
        torch.autograd.backward(live.leaving, gradient)
        if self._before is not None:
            assert live.entering is not None
            assert live.entering.grad is not None
            self._before.send(live.entering.grad, live.num_rows, _counts(self._before, live.entering))

    def predict(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Run forward passes only, in evaluation mode.

        Returns:
            On the last stage the logits of this replica's rows, [B] or [B, labels], in the order of micro-batches,
            on the host; else empty.
        """
        logits = []
        arriving: deque[Arriving] = deque()
        self._set_mode(is_training=False)
        with torch.no_grad():
            if self._before is not None:
                arriving.extend(self._before.receive(microbatch.num_rows) for microbatch in microbatches)
            for microbatch in microbatches:
                entering = None if self._before is None else arriving.popleft().wait()
                for table, looked_up in microbatch.announced:
                    table.expect(looked_up)
                leaving = self._run_layers(microbatch.batch, entering)
                if self._after is not None:
                    self._after.send(leaving, microbatch.num_rows, _counts(self._after, leaving))
                else:
                    logits.append(leaving.squeeze(1))
            # Copied before neighbours may write over what arrived.
            found = torch.cat(logits).cpu() if logits else torch.empty(0, device=CPU)
            self._end_step(is_drained=True)
        return found

    def _set_mode(self, *, is_training: bool) -> None:
        if self._modules.training != is_training:
            self._modules.train(is_training)

    def _boundary(self, neighbour: int, width: int, columns: SequenceColumns | None) -> Boundary | None:
        place, dtype = self.place, getattr(torch, self._config.wire_dtype)
        if not 0 <= neighbour < place.num_stages:
            return None
        side = StageSide(layout=place.layout, stage=place.stage, replica=place.replica, neighbour=neighbour)
        limit_s, found = _FIRST_SILENCE_LIMIT_S, place.neighbours[neighbour]
        if isinstance(found, SharedNeighbour):
            return SharedMemoryBoundary(
                side=side, width=width, columns=columns, silence_limit_s=limit_s, shared=found, dtype=dtype
            )
        return StageBoundary(
            side=side,
            width=width,
            columns=columns,
            silence_limit_s=limit_s,
            connections=found,
            device=place.device,
            dtype=dtype,
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this replica has sent to other stages."""
        return sum(boundary.sent_bytes for boundary in self._boundaries)

    @property
    def _boundaries(self) -> list[Boundary]:
        return [boundary for boundary in (self._before, self._after) if boundary is not None]

    def _post_receive(self, row_counts: Iterator[int]) -> bool:
        """Begin to receive a micro-batch; returns False where none is left or no stage sends any."""
        num_rows = next(row_counts, None)
        if self._before is None or num_rows is None:
            return False
        self._arriving.append(self._before.receive(num_rows))
        return True

    def _wait_for(self, receiving: Arriving, weight_gradients: WeightGradients) -> Tensor:
        """Return a slice that arrives, and work out weight gradients until it is there."""
        while weight_gradients and not receiving.is_there():
            weight_gradients.work_out_next()
        started_s = time.perf_counter()
        rows_BW = receiving.wait()
        self.waited_seconds += time.perf_counter() - started_s
        return rows_BW

    def _end_step(self, *, is_drained: bool) -> None:
        for boundary in self._boundaries:
            boundary.end_step(is_drained=is_drained)
