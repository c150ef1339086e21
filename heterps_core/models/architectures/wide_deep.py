"""Wide & deep: a linear part beside a deep one.

Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems".
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import Wide, mlp
from heterps_core.models.embedding_layers import Embeddings

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (400, 400, 400)


class WideDeep(nn.Module):
    """The sum of the linear part's logit and the deep part's."""

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
        self.wide = Wide(features)
        self.deep = mlp(self.vectors.width, hidden_widths, dropout=dropout)
        self.output = nn.Linear([self.vectors.width, *hidden_widths][-1], features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = self.vectors(batch)
        logits_BL: Tensor = self.wide(batch) + self.output(self.deep(columns_BW))
        return logits_BL
