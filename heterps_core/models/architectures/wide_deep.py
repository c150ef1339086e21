"""Wide & deep: a linear part beside a deep one.

Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems".
"""

from __future__ import annotations

from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, Wide
from heterps_core.models.embedding_layers import Embeddings


class WideDeep(ClickModel):
    """The sum of the linear part's logit and the deep part's."""

    WIDTHS = (400, 400, 400)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.vectors = Embeddings(features, dimension=dimension)
        self.wide = Wide(features)
        self.make_deep(self.vectors.width, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = self.vectors(batch)
        logits_BL: Tensor = self.wide(batch) + self.output(self.deep(columns_BW))
        return logits_BL
