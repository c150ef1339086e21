"""Values that replicas of a stage keep equal: the sum of dense gradients and losses, once a step, and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.transport.shared_memory_link import Outbox


class GradientSum:
    """Adds up what replicas have, in the same order on all of them, so that their parameters stay the same.

    Sums travel beside what other groups exchange.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], place: StagePlace) -> None:
        self._parameters, self._device = parameters, place.device
        self._group = place.sum_group or place.device_group
        self._outbox: Outbox | None = None if place.link is None else place.link.new_outbox()

    def begin(self, gradients: Sequence[Tensor | None], losses: Sequence[Tensor]) -> PendingSum:
        """Begin to sum the gradients of a batch, one for each parameter, and its losses.

        Args:
            gradients: Written over by the sums; None for zeros.
            losses: Of micro-batches, one number each.
        """
        losses_M = torch.stack(list(losses)) if losses else torch.empty(0, device=self._device)
        if self._group is None or not (self._parameters or losses):
            return PendingSum(self._parameters, [*gradients, losses_M])
        own = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        own += [losses_M]
        if self._outbox is not None:
            # Replicas on one machine read each other's where they lie, when all have come to the end of the sum.
            return PendingSum(self._parameters, own, outbox=self._outbox)
        flat = torch.cat([tensor.reshape(-1) for tensor in own])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        parts = torch.split(flat, [tensor.numel() for tensor in own])
        return PendingSum(self._parameters, parts, work=work)


@dataclass(slots=True)
class PendingSum:
    """A sum that is under way."""

    _parameters: Sequence[nn.Parameter]
    _tensors: Sequence[Tensor | None]
    """A gradient for each parameter, and the losses."""

    work: dist.Work | None = None
    outbox: Outbox | None = None

    def finish(self) -> list[float]:
        """Leave the sums in the parameters' gradients, and return the summed losses; sums end in their order.

        Raises:
            LostWorkerError: Another replica has ended, or was silent for too long, where they share memory.
            RuntimeError: The same, where they do not.
        """
        if self.work is not None:
            self.work.wait()
        if self.outbox is not None:
            self._tensors = _summed(self.outbox, self._tensors)
        *gradients, losses_M = self._tensors
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not parameter.grad:
                parameter.grad = None if gradient is None else gradient.view_as(parameter)
        assert losses_M is not None
        # Read once a step, when nothing is left to compute.
        return losses_M.tolist()


def _summed(outbox: Outbox, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    own = [tensor for tensor in tensors if tensor is not None]
    outbox.append_flat(own)
    (first,), (second,), *others = outbox.exchange()
    total = first[0] + second[0]
    for (other,) in others:
        total += other[0]
    return list(torch.split(total, [tensor.numel() for tensor in own]))


def take_buffers_of_first_replica(layers: Iterable[nn.Module], *, group: ProcessGroup | None) -> None:
    """Replace the buffers that a checkpoint holds, such as running statistics, by the first replica's, in place.

    Gradients are summed over replicas, so their parameters stay equal; buffers follow each replica's own rows. Rows
    are shuffled, so those of the first are a fair sample, as in torch's DistributedDataParallel.

    Args:
        layers: Of the stage; all replicas of `group` call this with the same ones.
        group: The replicas, for tensors on the host; None for one.
    """
    if group is None:
        return
    for layer in layers:
        saved = layer.state_dict().keys()
        for name, buffer in layer.named_buffers():
            if name in saved:
                on_host = buffer.cpu()
                dist.broadcast(on_host, group=group, group_src=0)
                buffer.copy_(on_host)
