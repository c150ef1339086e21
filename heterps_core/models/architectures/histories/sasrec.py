"""A transformer over the history (Kang and McAuley 2018, "Self-Attentive Sequential Recommendation").

The paper ranks items by their product with the last value. Here the candidate is the last value, as in Chen et al.
2019, "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba", and deep layers give the logit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.models.architectures.histories.history_model import HistoryEncoder, in_heads


class SASRec(HistoryEncoder):
    """Blocks of softmax attention and two fully connected layers."""

    def block(self, dimension: int, *, most: int) -> nn.Module:
        """Return a block."""
        return _Block(dimension, self.HEADS)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.deep = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )

    def forward(self, tokens_RXD: Tensor, sees: Tensor, *, is_last: bool) -> Tensor:
        """Return [R, X, D], or [R, C, D]."""
        query, key, value = self.projections(self.norm(tokens_RXD)).chunk(3, dim=2)
        query, key, value = (in_heads(each, self.heads) for each in (query, key, value))
        first = tokens_RXD.shape[1] - sees.shape[2]
        mixed = F.scaled_dot_product_attention(query[:, :, first:], key, value, attn_mask=sees)
        if is_last:
            tokens_RXD = tokens_RXD[:, first:]
        else:
            query, key, value = (each[:, :, :first] for each in (query, key, value))
            of_values = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed = torch.cat([of_values, mixed], 2)
        tokens_RXD = tokens_RXD + self.mix(mixed.transpose(1, 2).flatten(2))
        left_RXD: Tensor = tokens_RXD + self.deep(tokens_RXD)
        return left_RXD
