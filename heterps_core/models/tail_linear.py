"""A fully connected layer for a chain in which the state of another tower travels along."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TailLinear(nn.Module):
    """Passes the first `kept_width` columns through and applies a linear layer to the rest."""

    def __init__(self, kept_width: int, tail_width: int, output_width: int) -> None:
        super().__init__()
        self.kept_width = kept_width
        self.linear = nn.Linear(tail_width, output_width)

    def forward(self, activation_BW: Tensor) -> Tensor:
        """Return [B, kept_width + output_width]."""
        kept, tail = activation_BW[:, : self.kept_width], activation_BW[:, self.kept_width :]
        return torch.cat([kept, self.linear(tail)], 1)
