"""MMoE (Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import mlp
from heterps_core.models.embedding_layers import Embeddings

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (128, 64)
EXPERTS, TOWER_WIDTH = 4, 32


class MMoE(nn.Module):
    """Experts that all labels share; each label mixes them by a gate of its own, and has a tower behind it."""

    def __init__(
        self,
        features: FeatureSpec,
        *,
        hidden_widths: Sequence[int] = HIDDEN_WIDTHS,
        embedding_dim: int = EMBEDDING_DIMENSION,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vectors = Embeddings(features, dimension=embedding_dim)
        width = self.vectors.width
        self.experts = nn.ModuleList(mlp(width, hidden_widths, dropout=dropout) for _ in range(EXPERTS))
        expert_width = [width, *hidden_widths][-1]
        self.gates = nn.ModuleList(nn.Linear(width, EXPERTS) for _ in range(features.num_labels))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(expert_width, TOWER_WIDTH), nn.ReLU(), nn.Linear(TOWER_WIDTH, 1))
            for _ in range(features.num_labels)
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = self.vectors(batch)
        shares = [gate(columns_BW).softmax(1).unsqueeze(1) for gate in self.gates]
        experts_BEW = torch.stack([expert(columns_BW) for expert in self.experts], 1)
        mixed = [torch.bmm(share, experts_BEW).squeeze(1) for share in shares]
        return torch.cat([tower(each) for tower, each in zip(self.towers, mixed, strict=True)], 1)
