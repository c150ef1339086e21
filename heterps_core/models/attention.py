"""Attention over the values of a sequence, in the place of their mean.

A learned query scores each value, as in the attention pooling of Yang et al., "Hierarchical Attention Networks for
Document Classification" (NAACL 2016), without its hidden layer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from heterps_core.models.sequence_encoding import encode_by_length
from heterps_core.models.slot_embedding import SlotEmbedding


class AttentionPooling(nn.Module):
    r"""Replaces the vectors of each sequence, and its length, by their weighted mean.

    With q the sequence's query, of vectors h_1..h_n: :math:`\sum_t \mathrm{softmax}_t(q \cdot h_t) h_t`. All other
    columns of the embedding's output pass as they are.
    """

    def __init__(self, embedding: SlotEmbedding) -> None:
        super().__init__()
        self.columns = embedding.sequence_columns
        self.queries = nn.Parameter(torch.zeros(len(self.columns.lengths), embedding.dimension))
        self.output_width = self.columns.before + self.columns.after + self.queries.numel()

    def forward(self, activation_BW: Tensor) -> Tensor:
        """Return [B, output_width]: the kept columns, then a vector for each sequence."""
        kept_BW = self.columns.without_values(activation_BW)
        pooled = [
            encode_by_length(activation_BW, kept_BW[:, :0], self.columns, [place], partial(_pooled, query_D))
            for place, query_D in enumerate(self.queries)
        ]
        return torch.cat([kept_BW, *pooled], 1)


def _pooled(query_D: Tensor, columns_BCW: Tensor, vectors_BTD: Tensor, lengths_B1: Tensor) -> Tensor:
    places_T = torch.arange(vectors_BTD.shape[1], device=vectors_BTD.device)
    # The first value is always there: an empty sequence has that of a missing one.
    is_there_BT = places_T < lengths_B1.clamp(min=1)
    scores_BT = (vectors_BTD @ query_D).masked_fill(~is_there_BT, float("-inf"))
    pooled_B1D = (scores_BT.softmax(1).unsqueeze(2) * vectors_BTD).sum(1, keepdim=True)
    return pooled_B1D.expand(-1, columns_BCW.shape[1], -1)
