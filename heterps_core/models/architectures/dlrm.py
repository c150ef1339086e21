"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import DotInteraction, Fields, mlp

EMBEDDING_DIMENSION = 16
BOTTOM_WIDTHS = (512, 256)
HIDDEN_WIDTHS = (512, 256)


class DLRM(nn.Module):
    """A vector of the dense features beside those of slots; their products go through the (hidden) top layers."""

    def __init__(
        self,
        features: FeatureSpec,
        *,
        hidden_widths: Sequence[int] = HIDDEN_WIDTHS,
        embedding_dim: int = EMBEDDING_DIMENSION,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fields = Fields(features, dimension=embedding_dim)
        self.bottom = None
        num_vectors = features.num_slots
        width = 0
        if features.num_dense:
            self.bottom = mlp(features.num_dense, (*BOTTOM_WIDTHS, embedding_dim))
            num_vectors, width = num_vectors + 1, embedding_dim
        self.interaction = DotInteraction(num_vectors)
        width += num_vectors * (num_vectors - 1) // 2
        self.top = mlp(width, hidden_widths, dropout=dropout)
        self.output = nn.Linear([width, *hidden_widths][-1], features.num_labels)

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
