"""Multi-gate mixture of experts.

Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts"; experts of
one label alone: Tang et al. 2020, "Progressive Layered Extraction"; a linear part: Zhao et al. 2019, "Recommending
What Video to Watch Next". Without these two a frequent label loses by a rare one beside it (docs/QUALITY.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, Wide
from heterps_core.models.embedding_layers import Embeddings

SHARED_EXPERTS, OWN_EXPERTS, TOWER_WIDTH = 2, 2, 32


class MMoE(ClickModel):
    """Each label mixes shared experts and own ones by a gate; a tower and a linear part give its logit."""

    WIDTHS = (128, 64)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.vectors = Embeddings(features, dimension=dimension)
        self.wide = Wide(features)
        width, labels = self.vectors.width, range(features.num_labels)
        # The shared ones come first, then those of each label.
        num_experts = SHARED_EXPERTS + OWN_EXPERTS * features.num_labels
        self.experts = nn.ModuleList(self.tower(width) for _ in range(num_experts))
        self.gates = nn.ModuleList(nn.Linear(width, SHARED_EXPERTS + OWN_EXPERTS) for _ in labels)
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.tower_width(width), TOWER_WIDTH), nn.ReLU(), nn.Linear(TOWER_WIDTH, 1)
            )
            for _ in labels
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = self.vectors(batch)
        linear_BL: Tensor = self.wide(batch)
        shares = [gate(columns_BW).softmax(1).unsqueeze(1) for gate in self.gates]
        experts = [expert(columns_BW) for expert in self.experts]
        logits = []
        for label, (share, tower) in enumerate(zip(shares, self.towers, strict=True)):
            first = SHARED_EXPERTS + OWN_EXPERTS * label
            own = [*experts[:SHARED_EXPERTS], *experts[first : first + OWN_EXPERTS]]
            logits.append(tower(torch.bmm(share, torch.stack(own, 1)).squeeze(1)))
        return linear_BL + torch.cat(logits, 1)
