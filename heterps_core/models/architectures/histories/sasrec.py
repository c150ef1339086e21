"""A transformer over the history (Kang and McAuley 2018, "Self-Attentive Sequential Recommendation").

The paper ranks items by their product with the last value. Here the candidate is the last value, as in Chen et al.
2019, "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba", and deep layers give the logit.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.models.architectures.histories.history_model import (
    HistoryEncoder,
    in_heads,
    seen_from,
    token_at,
)


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

    def forward(self, tokens_BTD: Tensor, places_B1: Tensor | None = None) -> Tensor:
        """Return [B, T, D], or [B, 1, D]."""
        query, key, value = self.projections(self.norm(tokens_BTD)).chunk(3, dim=2)
        sees = None
        if places_B1 is not None:
            sees = seen_from(tokens_BTD, places_B1)
            query, tokens_BTD = (token_at(each, places_B1) for each in (query, tokens_BTD))
        query_BHTD, key_BHTD, value_BHTD = (in_heads(each, self.heads) for each in (query, key, value))
        mixed_BHTD = F.scaled_dot_product_attention(
            query_BHTD, key_BHTD, value_BHTD, attn_mask=sees, is_causal=sees is None
        )
        tokens_BTD = tokens_BTD + self.mix(mixed_BHTD.transpose(1, 2).flatten(2))
        left_BTD: Tensor = tokens_BTD + self.deep(tokens_BTD)
        return left_BTD
