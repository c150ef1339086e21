"""What replicas of a stage make equal: the sum of dense gradients and losses, once a step, and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU
from heterps_core.transport.shared_memory_link import Outbox, SharedMemoryLink


class GradientSum:
    """Adds up what replicas have, in the same order on all of them, so that their parameters stay the same.

    Args:
        group: The replicas, for tensors on `device`; None for one.
        link: Between them where they sit on one machine.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        group: ProcessGroup | None,
        link: SharedMemoryLink | None,
        device: torch.device = CPU,
    ) -> None:
        self._parameters = parameters
        self._device = device
        self._group = group
        self._outbox: Outbox | None = None if link is None else link.new_outbox()

    def over_replicas(self, losses: Sequence[Tensor]) -> list[float]:
        """Sum the parameters' gradients in place, and return the summed losses.

        Args:
            losses: Of micro-batches, one number each.

        Raises:
            LostWorkerError: Another replica has ended, or was silent for too long, where they share memory.
            RuntimeError: The same, where they do not.
        """
        losses_M = torch.stack(list(losses)) if losses else torch.empty(0, device=self._device)
        if self._group is not None and (self._parameters or losses):
            own = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in self._parameters
            ]
            *gradients, losses_M = self._summed([*own, losses_M])
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter)
        # Read once a step, when nothing is left to compute.
        return losses_M.tolist()

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors that every replica has, flat."""
        if self._outbox is None:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, group=self._group)
            return list(torch.split(flat, [tensor.numel() for tensor in tensors]))
        for tensor in tensors:
            self._outbox.append(tensor.reshape(1, -1))
        sums = []
        for first, second, *others in zip(*self._outbox.exchange(), strict=True):
            total = first + second
            for other in others:
                total += other
            sums.append(total[0])
        return sums


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
