"""Models that read each sequence of a row beside its context: all other vectors, and the dense features.

Shapes: B rows, R histories, C candidates of each, T values of a sequence, X = T + C tokens, D values of a vector, W
columns, L labels, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.sequence_columns import SequenceColumns
from heterps_core.errors import ConfigurationError
from heterps_core.models.architectures.parts import ClickModel
from heterps_core.models.sequence_encoding import encode_by_length
from heterps_core.models.slot_embedding import SlotEmbedding


class HistoryModel(ClickModel):
    """Looks slots up, and hands sequences and context out apart."""

    def make_embedding(self, features: FeatureSpec, dimension: int) -> None:
        """Make the embedding, and note its columns."""
        self.embedding = SlotEmbedding(
            features, dimension=dimension, keeps_sequences=True, packs_sequences=True
        )
        self.columns = self.embedding.sequence_columns
        self.context_width = self.columns.before + self.columns.after

    def looked_up(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """Return the embedding's output and the context [B, W] in it."""
        columns_BW = self.embedding(batch)
        return columns_BW, self.columns.without_values(columns_BW)


class HistoryEncoder(HistoryModel):
    """Blocks over the values of a sequence and, after them, each candidate; deep layers over context and candidate.

    Which column is the candidate the schema does not say, so it is a learned projection of the context. A value sees
    itself and those before it; learned positions count back from the newest.
    """

    BLOCKS, HEADS = 2, 2

    def block(self, dimension: int, *, most: int) -> nn.Module:
        """Return a block, which makes tokens [R, X, D] of tokens, values and then candidates.

        A value sees itself and those before it. The block is called with `sees`, bool [R, 1, C, X], what each
        candidate sees, and whether it is the last one, of which the candidates alone are returned [R, C, D].

        Args:
            most: Tokens of the longest sequence with one candidate.
        """
        raise NotImplementedError

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers.

        Raises:
            ConfigurationError: Vectors cannot be shared out among the heads.
        """
        if dimension % self.HEADS:
            raise ConfigurationError(
                f"embedding_dim must be a multiple of {self.HEADS}, the heads of attention, got {dimension}"
            )
        self.make_embedding(features, dimension)
        self.encoders = nn.ModuleList(
            _Encoder(
                self.columns,
                sequences,
                self.context_width,
                [
                    self.block(dimension, most=self.columns.lengths[sequences[0]] + 1)
                    for _ in range(self.BLOCKS)
                ],
            )
            for sequences in self.columns.histories
        )
        self.make_deep(self.context_width + len(self.encoders) * dimension, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, context_BW = self.looked_up(batch)
        encoded = [encoder(columns_BW, context_BW) for encoder in self.encoders]
        logits_BL: Tensor = self.output(self.deep(torch.cat([context_BW, *encoded], 1)))
        return logits_BL


class _Encoder(nn.Module):
    """The candidate after a sequence's blocks."""

    def __init__(
        self,
        columns: SequenceColumns,
        sequences: Sequence[int],
        context_width: int,
        blocks: list[nn.Module],
    ) -> None:
        super().__init__()
        self.columns, self.sequences = columns, sequences
        length, dimension = columns.lengths[sequences[0]], columns.dimension
        self.candidate = nn.Linear(context_width, dimension)
        self.positions = nn.Parameter(torch.empty(length, dimension).normal_(0, dimension**-0.5 / 10))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, activation_BW: Tensor, context_BW: Tensor) -> Tensor:
        """Return [B, D]."""
        return encode_by_length(activation_BW, context_BW, self.columns, self.sequences, self._encoded)

    def _encoded(self, context_RCW: Tensor, values_RTD: Tensor, length_R1: Tensor) -> Tensor:
        num_candidates, places_T = (
            context_RCW.shape[1],
            torch.arange(values_RTD.shape[1], device=values_RTD.device),
        )
        values_RTD = values_RTD + F.embedding((length_R1 - 1 - places_T).clamp(min=0), self.positions)
        tokens_RXD = torch.cat([values_RTD, self.candidate(context_RCW)], 1)
        # A candidate sees all values that are there, and itself; no value sees what fills up a history after it.
        is_there = (places_T < length_R1)[:, None].expand(-1, num_candidates, -1)
        itself = torch.eye(num_candidates, dtype=torch.bool, device=places_T.device).expand(
            is_there.shape[0], -1, -1
        )
        sees = torch.cat([is_there, itself], 2).unsqueeze(1)
        for block in self.blocks:
            tokens_RXD = block(tokens_RXD, sees, is_last=block is self.blocks[-1])
        return tokens_RXD


def in_heads(tokens_BTD: Tensor, heads: int) -> Tensor:
    """Return [B, H, T, D / H]."""
    return torch.unflatten(tokens_BTD, 2, (heads, -1)).transpose(1, 2)
