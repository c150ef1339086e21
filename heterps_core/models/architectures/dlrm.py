"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, DotInteraction, Fields, mlp

_BOTTOM_WIDTHS = (512, 256)


class DLRM(ClickModel):
    """A vector of the dense features beside those of slots; their products go through the (hidden) top layers."""

    WIDTHS = (512, 256)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.fields = Fields(features, dimension=dimension)
        self.bottom = None
        num_vectors = features.num_slots
        width = 0
        if features.num_dense:
            self.bottom = mlp(features.num_dense, (*_BOTTOM_WIDTHS, dimension))
            num_vectors, width = num_vectors + 1, dimension
        self.interaction = DotInteraction(num_vectors)
        width += num_vectors * (num_vectors - 1) // 2
        self.top = self.tower(width)
        self.output = nn.Linear(self.tower_width(width), features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, vectors_BFD = self.fields(batch)
        if self.bottom is None:
            interacted_BW = self.interaction(vectors_BFD)
        else:
            dense_BD = self.bottom(columns_BW[:, self.fields.vectors_width :])
            vectors_BFD = torch.cat([dense_BD.unsqueeze(1), vectors_BFD], 1)
            interacted_BW = torch.cat([dense_BD, self.interaction(vectors_BFD)], 1)
        logits_BL: Tensor = self.output(self.top(interacted_BW))
        return logits_BL
