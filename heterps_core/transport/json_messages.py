"""JSON that the members of a group exchange; torch's own exchange of objects unpickles, and may run what it gets."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_json(value: object, group: ProcessGroup | None = None) -> list[Any]:
    """Return what each member of a group on the host gives, by its number in the group; all members call it.

    Args:
        value: Plain JSON values.
        group: By default the whole world.

    Raises:
        ValueError: A member has sent no JSON.
    """
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(each.numpy().tobytes()) for each in gather_bytes(content, group)]


def gather_bytes(content: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return the bytes [n] that each member of a group gives, by its number in the group; all members call it."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
    # Members send as many bytes as the one with the most.
    padded = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    own = torch.zeros_like(padded[0])
    own[: len(content)] = content
    dist.all_gather(padded, own, group=group)
    return [each[: int(size)] for each, size in zip(padded, sizes, strict=True)]
