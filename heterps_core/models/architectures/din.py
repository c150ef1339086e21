"""DIN (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction"): history seen from the candidate.

The paper's candidate and history share one table, as they do here where the schema's `tables` say so. Which column is
the candidate it does not say, so the query is a learned projection of all vectors that are no history.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, HistoryAttention
from heterps_core.models.slot_embedding import SlotEmbedding


class DIN(ClickModel):
    """Fully connected layers over the vectors of slots, the dense features, and what attention makes of sequences."""

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.embedding = SlotEmbedding(features, dimension=dimension, keeps_sequences=True)
        columns = self.embedding.vector_columns
        sequences = self.embedding.sequences
        self.sequence_columns = [columns[slot] for slot in sequences]
        self.context_columns = [each for slot, each in enumerate(columns) if slot not in sequences]
        self.lengths = self.embedding.length_columns
        context_width = sum(map(len, self.context_columns)) + features.num_dense
        self.history = nn.ModuleList(
            HistoryAttention(features.slot_lengths[slot], context_width=context_width, dimension=dimension)
            for slot in sequences
        )
        width = context_width + len(sequences) * dimension
        self.make_deep(width, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW = self.embedding(batch)
        context = [columns_BW[:, each.start : each.stop] for each in self.context_columns]
        context_BW = torch.cat([*context, columns_BW[:, self.lengths.stop :]], 1)
        parts = [context_BW]
        for place, (history, each) in enumerate(zip(self.history, self.sequence_columns, strict=True)):
            length_column = self.lengths.start + place
            lengths_B1 = columns_BW[:, length_column : length_column + 1]
            parts.append(history(context_BW, columns_BW[:, each.start : each.stop], lengths_B1))
        logits_BL: Tensor = self.output(self.deep(torch.cat(parts, 1)))
        return logits_BL
