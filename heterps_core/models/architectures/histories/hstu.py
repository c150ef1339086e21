r"""HSTU (Zhai et al. 2024, "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers").

Attention without softmax: weights are :math:`\mathrm{SiLU}(q \cdot k) / T`, so how much of a taste a history holds is
kept, and a gate stands for the fully connected layers of a transformer. The paper's bias for the distance and time
between two values is left out: positions are added to the values.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.models.architectures.histories.history_model import HistoryEncoder, in_heads


class HSTU(HistoryEncoder):
    """Blocks of pointwise attention."""

    def block(self, dimension: int) -> nn.Module:
        """Return a block."""
        return _Block(dimension, self.HEADS)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mixed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.Linear(width, 4 * width)
        self.output = nn.Linear(width, width)

    def forward(self, tokens_BTD: Tensor, sees_BTT: Tensor) -> Tensor:
        """Return [B, T, D]."""
        gate_BTD, query, key, value = F.silu(self.projections(self.norm(tokens_BTD))).chunk(4, dim=2)
        query_BHTD, key_BHTD, value_BHTD = (in_heads(each, self.heads) for each in (query, key, value))
        weights_BHTT = F.silu(query_BHTD @ key_BHTD.transpose(2, 3)) * sees_BTT.unsqueeze(1)
        mixed_BTD = (weights_BHTT @ value_BHTD).transpose(1, 2).flatten(2) / tokens_BTD.shape[1]
        left_BTD: Tensor = tokens_BTD + self.output(self.mixed_norm(mixed_BTD) * gate_BTD)
        return left_BTD
