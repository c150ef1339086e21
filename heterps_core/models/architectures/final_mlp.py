"""FinalMLP (Mao et al. 2023, "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import BilinearFusion, Gate, mlp
from heterps_core.models.embedding_layers import Embeddings

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (400, 400)
HEADS = 2


class FinalMLP(nn.Module):
    """Two streams of fully connected layers over gated columns, fused by products; their last width is even."""

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
        self.first_gate, self.second_gate = Gate(width), Gate(width)
        self.first = mlp(width, hidden_widths, dropout=dropout)
        self.second = mlp(width, hidden_widths, dropout=dropout)
        self.fusion = BilinearFusion([width, *hidden_widths][-1], heads=HEADS, num_labels=features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = self.vectors(batch)
        first_BW = self.first(self.first_gate(columns_BW))
        second_BW = self.second(self.second_gate(columns_BW))
        logits_BL: Tensor = self.fusion(first_BW, second_BW)
        return logits_BL
