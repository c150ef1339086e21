"""xDeepFM: compressed interactions of vectors beside a deep part.

Lian et al. 2018, "xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender Systems".
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, Fields, Wide

_CROSS_WIDTHS = (16, 16)
"""Feature maps of each compressed interaction layer; the paper has 100 to 200."""


class XDeepFM(ClickModel):
    """The sum of a linear part, compressed interactions of fields with those of the layer before, and a deep part."""

    DIMENSION = 8

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.fields = Fields(features, dimension=dimension)
        self.wide = Wide(features)
        widths = [features.num_slots, *_CROSS_WIDTHS]
        self.cross = nn.ModuleList(
            nn.Linear(features.num_slots * before, width, bias=False) for before, width in pairwise(widths)
        )
        self.of_cross = nn.Linear(sum(_CROSS_WIDTHS), features.num_labels, bias=False)
        self.make_deep(self.fields.width, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, vectors_BFD = self.fields(batch)
        logits_BL: Tensor = self.wide(batch)
        first_BDF = maps_BDH = vectors_BFD.transpose(1, 2)
        pooled = []
        for cross in self.cross:
            # An outer product, whose gradients are two products too: half the time of a product and sums after it.
            maps_BD1H = maps_BDH.type_as(first_BDF).unsqueeze(2)
            products_BDX = torch.matmul(first_BDF.unsqueeze(3), maps_BD1H).flatten(2)
            maps_BDH = torch.relu(cross(products_BDX))
            pooled.append(maps_BDH.sum(1))
        beside_BL: Tensor = self.of_cross(torch.cat(pooled, 1)) + self.output(self.deep(columns_BW))
        return logits_BL + beside_BL
