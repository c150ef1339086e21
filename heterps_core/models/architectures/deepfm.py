"""DeepFM (Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import FactorizationMachine, Fields, Wide, mlp

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (400, 400, 400)


class DeepFM(nn.Module):
    """The sum of a linear part, all products of pairs of vectors, and a deep part over the same vectors."""

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
        self.wide = Wide(features)
        self.fm = FactorizationMachine()
        self.deep = mlp(self.fields.width, hidden_widths, dropout=dropout)
        self.output = nn.Linear([self.fields.width, *hidden_widths][-1], features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, vectors_BFD = self.fields(batch)
        logits_BL: Tensor = self.wide(batch) + self.fm(vectors_BFD) + self.output(self.deep(columns_BW))
        return logits_BL
