"""DCN-V2, stacked (Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import mlp
from heterps_core.models.embedding_layers import Embeddings

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (400, 400)


class DCN(nn.Module):
    r"""Cross layers, :math:`x_{l+1} = x_0 \odot (W_l x_l + b_l) + x_l`, and fully connected ones after them."""

    def __init__(
        self,
        features: FeatureSpec,
        *,
        hidden_widths: Sequence[int] = HIDDEN_WIDTHS,
        embedding_dim: int = EMBEDDING_DIMENSION,
        dropout: float = 0.0,
        cross_layers: int = 3,
    ) -> None:
        super().__init__()
        self.vectors = Embeddings(features, dimension=embedding_dim)
        width = self.vectors.width
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(cross_layers))
        self.deep = mlp(width, hidden_widths, dropout=dropout)
        self.output = nn.Linear([width, *hidden_widths][-1], features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        first_BW = crossed_BW = self.vectors(batch)
        for cross in self.cross:
            crossed_BW = first_BW * cross(crossed_BW) + crossed_BW
        logits_BL: Tensor = self.output(self.deep(crossed_BW))
        return logits_BL
