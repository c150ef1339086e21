"""Makes the buffers of a stage, such as the running statistics of batch normalization, equal on all replicas.

Gradients are summed over replicas, so their parameters stay equal. Buffers follow each replica's own rows: those of
the first replica count, as in torch's DistributedDataParallel. Rows are shuffled, so they are a fair sample.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup


def take_buffers_of_first_replica(layers: Iterable[nn.Module], *, group: ProcessGroup | None) -> None:
    """Replace the buffers that a checkpoint holds by those of the first replica, in place.

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
