"""The device of a worker, and the sums of a stage's replicas on CUDA devices.

A stage that is planned for a GPU type runs on CUDA; messages between stages, row indices and checkpoints go through
the host and gloo all the same, so a plan may mix devices as it likes.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from heterps_core.compute_device import CPU
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import is_gpu
from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.rank_layout import RankLayout

_BLOCKING_WAIT_VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"
"""With it a replica that waits in vain gets an error, as with gloo; without it torch kills the process, which then
leaves no last words."""


def stage_device(device_type: str, slot: int, *, num_slots: int, is_dry_run: bool) -> torch.device:
    """Return the device that a worker computes on, and make it this process's own.

    Args:
        device_type: Of the worker's node.
        slot: Number of the worker among those of its stage on this machine, from 0.
        num_slots: How many those are.
        is_dry_run: This machine only stands for the planned one: where it lacks the cards its cores do the work.

    Raises:
        ConfigurationError: The machine was rented for its cards, and torch does not see one for each worker.
    """
    if not is_gpu(device_type):
        return CPU
    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_slots <= num_cards:
        device = torch.device("cuda", slot)
        torch.cuda.set_device(device)
        return device
    if is_dry_run:
        return CPU
    raise ConfigurationError(
        f"a node of {device_type} must have a CUDA device for each of its {num_slots} workers, but torch "
        f"{torch.__version__} sees {num_cards}; give the image a driver and a torch that is built for CUDA, or plan "
        f"without {device_type}"
    )


def join_by_nccl(layout: RankLayout, device: torch.device, *, limit: timedelta) -> ProcessGroup | None:
    """Join the replicas of each stage that computes on CUDA devices, beside the groups that they have on the host.

    Every process of the world must call it, since all make every group in the same order.

    Args:
        layout: Of all workers.
        device: That this one computes on.
        limit: Longest wait of one replica for the others.

    Returns:
        The replicas of this process's stage; None where it computes on the host, or has no other replica.
    """
    kinds = gather_json(device.type)
    os.environ.setdefault(_BLOCKING_WAIT_VARIABLE, "1")
    own = None
    for ranks in layout.ranks:
        if len(ranks) > 1 and all(kinds[rank] == "cuda" for rank in ranks):
            group = dist.new_group(list(ranks), timeout=limit, backend="nccl")
            if dist.get_rank() in ranks:
                own = group
    if own is not None:
        # NCCL connects at the first message, which takes seconds before the first step and none later.
        dist.all_reduce(torch.zeros(1, device=device), group=own)
    return own
