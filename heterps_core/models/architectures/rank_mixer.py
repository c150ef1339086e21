"""RankMixer (Zhu et al. 2025, "RankMixer: Scaling Up Ranking Models in Industrial Recommenders"), without experts.

Shapes: B rows, T tokens, D values of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel
from heterps_core.models.embedding_layers import Embeddings

TOKENS, TOKEN_WIDTH, BLOCKS, EXPANSION = 8, 64, 2, 2


class RankMixer(ClickModel):
    """Columns in order as tokens of equal width, blocks over them, and deep layers over the mean of tokens."""

    WIDTHS = (64,)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.vectors = Embeddings(features, dimension=dimension)
        # Zeros fill the last token.
        self.padding = -self.vectors.width % TOKENS
        self.tokens = TokenLinear((self.vectors.width + self.padding) // TOKENS, TOKEN_WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(BLOCKS)))
        self.make_deep(TOKEN_WIDTH, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = F.pad(self.vectors(batch), (0, self.padding))
        tokens_BTD = self.tokens(torch.unflatten(columns_BW, 1, (TOKENS, -1)))
        logits_BL: Tensor = self.output(self.deep(self.blocks(tokens_BTD).mean(1)))
        return logits_BL


class TokenLinear(nn.Module):
    """A fully connected layer for each token: [B, T, I] -> [B, T, O]."""

    def __init__(self, width: int, output_width: int) -> None:
        super().__init__()
        limit = width**-0.5
        self.weights = nn.Parameter(torch.empty(TOKENS, width, output_width).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.zeros(TOKENS, output_width))

    def forward(self, tokens_BTI: Tensor) -> Tensor:
        """Return [B, T, O]."""
        return torch.bmm(tokens_BTI.transpose(0, 1), self.weights).transpose(0, 1) + self.bias


class _Block(nn.Module):
    """Tokens that swap their parts, then two layers for each; both beside what entered, and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed_norm, self.norm = nn.LayerNorm(TOKEN_WIDTH), nn.LayerNorm(TOKEN_WIDTH)
        self.wide = TokenLinear(TOKEN_WIDTH, EXPANSION * TOKEN_WIDTH)
        self.narrow = TokenLinear(EXPANSION * TOKEN_WIDTH, TOKEN_WIDTH)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return [B, T, D]."""
        # Part h of every token makes token h.
        swapped_BTD = torch.unflatten(tokens_BTD, 2, (TOKENS, -1)).transpose(1, 2).flatten(2)
        mixed_BTD = self.mixed_norm(swapped_BTD + tokens_BTD)
        left_BTD: Tensor = self.norm(self.narrow(F.gelu(self.wide(mixed_BTD))) + mixed_BTD)
        return left_BTD
