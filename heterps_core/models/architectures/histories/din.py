"""DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction"): history seen from the candidate.

The paper's candidate and history share one table, as they do here where the schema's `tables` say so. Which column is
the candidate it does not say, so the query is a learned projection of all vectors that are no history.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.histories.history_model import HistoryModel
from heterps_core.models.architectures.parts import HistoryAttention


class DIN(HistoryModel):
    """Fully connected layers over the vectors of slots, the dense features, and what attention makes of sequences."""

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.make_embedding(features, dimension)
        self.history = nn.ModuleList(
            HistoryAttention(self.columns, sequences, context_width=self.context_width)
            for sequences in self.columns.histories
        )
        self.make_deep(self.context_width + len(self.history) * dimension, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, context_BW = self.looked_up(batch)
        pooled = [attention(columns_BW, context_BW) for attention in self.history]
        logits_BL: Tensor = self.output(self.deep(torch.cat([context_BW, *pooled], 1)))
        return logits_BL
