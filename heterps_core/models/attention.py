"""Attention over the values of a sequence, in the place of their mean.

A learned query scores each value, as in the attention pooling of Yang et al., "Hierarchical Attention Networks for
Document Classification" (NAACL 2016), without its hidden layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_core.models.slot_embedding import SlotEmbedding


class AttentionPooling(nn.Module):
    r"""Replaces the vectors of each sequence, and its length, by their weighted mean.

    With q the sequence's query, of vectors h_1..h_n: :math:`\sum_t \mathrm{softmax}_t(q \cdot h_t) h_t`. All other
    columns of the embedding's output pass as they are.
    """

    def __init__(self, embedding: SlotEmbedding) -> None:
        super().__init__()
        self.columns = [embedding.vector_columns[place] for place in embedding.sequences]
        self.length_columns = embedding.length_columns
        replaced = {column for columns in (*self.columns, self.length_columns) for column in columns}
        self.kept = [column for column in range(embedding.output_width) if column not in replaced]
        self.dimension = embedding.dimension
        self.queries = nn.Parameter(torch.zeros(len(self.columns), self.dimension))
        self.output_width = len(self.kept) + len(self.columns) * self.dimension

    def forward(self, activation_BW: Tensor) -> Tensor:
        """Return [B, output_width]: the kept columns, then a vector for each sequence."""
        parts = [activation_BW[:, self.kept]]
        for columns, length_column, query_D in zip(
            self.columns, self.length_columns, self.queries, strict=True
        ):
            vectors_BLD = activation_BW[:, columns.start : columns.stop].reshape(
                activation_BW.shape[0], len(columns) // self.dimension, self.dimension
            )
            places_L = torch.arange(vectors_BLD.shape[1], device=activation_BW.device)
            # The first value is always there: an empty sequence has that of a missing one.
            is_there_BL = places_L < activation_BW[:, length_column, None].clamp(min=1)
            scores_BL = (vectors_BLD @ query_D).masked_fill(~is_there_BL, float("-inf"))
            parts.append((scores_BL.softmax(1).unsqueeze(2) * vectors_BLD).sum(1))
        return torch.cat(parts, 1)
