"""DeepFM (Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction")."""

from __future__ import annotations

from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, FactorizationMachine, Fields, Wide


class DeepFM(ClickModel):
    """The sum of a linear part, all products of pairs of vectors, and a deep part over the same vectors."""

    WIDTHS = (400, 400, 400)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.fields = Fields(features, dimension=dimension)
        self.wide = Wide(features)
        self.fm = FactorizationMachine()
        self.make_deep(self.fields.width, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, vectors_BFD = self.fields(batch)
        logits_BL: Tensor = self.wide(batch) + self.fm(vectors_BFD) + self.output(self.deep(columns_BW))
        return logits_BL
