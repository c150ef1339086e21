r"""HSTU (Zhai et al. 2024, "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers").

Attention without softmax: weights are :math:`\mathrm{SiLU}(q \cdot k) / T`, so how much of a taste a history holds is
kept, and a gate stands for the fully connected layers of a transformer. The paper's bias for the distance and time
between two values is left out: positions are added to the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.models.architectures.histories.history_model import HistoryEncoder, in_heads


class HSTU(HistoryEncoder):
    """Blocks of pointwise attention."""

    def block(self, dimension: int, *, most: int) -> nn.Module:
        """Return a block."""
        return _Block(dimension, self.HEADS, most)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, most: int) -> None:
        super().__init__()
        self.heads, self.most = heads, most
        self.norm, self.mixed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.Linear(width, 4 * width)
        self.output = nn.Linear(width, width)

    def forward(self, tokens_RXD: Tensor, sees: Tensor, *, is_last: bool) -> Tensor:
        """Return [R, X, D], or [R, C, D]."""
        gate_RXD, query, key, value = F.silu(self.projections(self.norm(tokens_RXD))).chunk(4, dim=2)
        query, key, value = (in_heads(each, self.heads).contiguous() for each in (query, key, value))
        first = tokens_RXD.shape[1] - sees.shape[2]
        mixed: Tensor = (F.silu(query[:, :, first:] @ key.transpose(2, 3)) * sees) @ value
        if is_last:
            gate_RXD, tokens_RXD = gate_RXD[:, first:], tokens_RXD[:, first:]
        else:
            values = (each[:, :, :first] for each in (query, key, value))
            mixed = torch.cat([_PointwiseAttention.apply(*values), mixed], 2)  # type: ignore[no-untyped-call]
        mixed_RXD = mixed.transpose(1, 2).flatten(2) / self.most
        left_RXD: Tensor = tokens_RXD + self.output(self.mixed_norm(mixed_RXD) * gate_RXD)
        return left_RXD


_BLOCK_WEIGHTS = 1 << 21
"""Weights that are in memory at the same time."""


def _blocks(query_BHTD: Tensor) -> Iterator[slice]:
    """Yield tokens of which the weights are worked out together, the last ones, which have most, first.

    So each block finds room in the memory that the one before it freed. An exported network has one block.
    """
    rows, heads, num_tokens, _ = query_BHTD.shape
    size = num_tokens
    if not torch.compiler.is_exporting():
        size = max(_BLOCK_WEIGHTS // max(rows * heads * num_tokens, 1), 64)
    for first in reversed(range(0, num_tokens, size)):
        yield slice(first, min(first + size, num_tokens))


class _PointwiseAttention(torch.autograd.Function):
    """SiLU(q k) v over a token and those before it; weights are worked out again for gradients, block by block."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        ctx.save_for_backward(query_BHTD, key_BHTD, value_BHTD)
        mixed_BHTD = torch.empty_like(query_BHTD)
        for own in _blocks(query_BHTD):
            key, value = key_BHTD[:, :, : own.stop], value_BHTD[:, :, : own.stop]
            scores = query_BHTD[:, :, own] @ key.transpose(2, 3)
            mixed_BHTD[:, :, own] = F.silu(scores, inplace=True).tril_(own.start) @ value
        return mixed_BHTD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (gradient_BHTD,) = gradients
        query_BHTD, key_BHTD, value_BHTD = ctx.saved_tensors
        of_query = torch.empty_like(query_BHTD)
        of_key, of_value = torch.zeros_like(key_BHTD), torch.zeros_like(value_BHTD)
        for own in _blocks(query_BHTD):
            query, gradient = query_BHTD[:, :, own], gradient_BHTD[:, :, own]
            key, value = key_BHTD[:, :, : own.stop], value_BHTD[:, :, : own.stop]
            scores = query @ key.transpose(2, 3)
            of_value[:, :, : own.stop] += F.silu(scores).tril_(own.start).transpose(2, 3) @ gradient
            of_weights = (gradient @ value.transpose(2, 3)).tril_(own.start)
            of_scores = torch.ops.aten.silu_backward(of_weights, scores)
            of_query[:, :, own] = of_scores @ key
            of_key[:, :, : own.stop] += of_scores.transpose(2, 3) @ query
        return of_query, of_key, of_value
