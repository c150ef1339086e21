"""FinalMLP (Mao et al. 2023, "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction")."""

from __future__ import annotations

from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import BilinearFusion, ClickModel, Gate
from heterps_core.models.embedding_layers import Embeddings

HEADS = 2


class FinalMLP(ClickModel):
    """Two streams of fully connected layers over gated columns, fused by products; their last width is even."""

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.vectors = Embeddings(features, dimension=dimension)
        width = self.vectors.width
        self.first_gate, self.second_gate = Gate(width), Gate(width)
        self.first, self.second = self.tower(width), self.tower(width)
        self.fusion = BilinearFusion(self.tower_width(width), heads=HEADS, num_labels=features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = self.vectors(batch)
        first_BW = self.first(self.first_gate(columns_BW))
        second_BW = self.second(self.second_gate(columns_BW))
        logits_BL: Tensor = self.fusion(first_BW, second_BW)
        return logits_BL
