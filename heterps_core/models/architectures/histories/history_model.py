"""Models that read each sequence of a row beside its context: all other vectors, and the dense features.

Shapes: B rows, T values of a sequence, D values of a vector, W columns, L labels, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError
from heterps_core.models.architectures.parts import ClickModel
from heterps_core.models.slot_embedding import SlotEmbedding


class HistoryModel(ClickModel):
    """Looks slots up, and hands sequences and context out apart."""

    def make_embedding(self, features: FeatureSpec, dimension: int) -> None:
        """Make the embedding, and note its columns."""
        self.embedding = SlotEmbedding(features, dimension=dimension, keeps_sequences=True)
        columns = self.embedding.vector_columns
        sequences = self.embedding.sequences
        self.sequence_lengths = [features.slot_lengths[slot] for slot in sequences]
        self.sequence_columns = [columns[slot] for slot in sequences]
        self.context_columns = [each for slot, each in enumerate(columns) if slot not in sequences]
        self.lengths = self.embedding.length_columns
        self.context_width = sum(map(len, self.context_columns)) + features.num_dense

    def looked_up(self, batch: ClickBatch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the context [B, W], and for each sequence its vectors side by side [B, T * D] and length [B, 1]."""
        columns_BW = self.embedding(batch)
        context = [columns_BW[:, each.start : each.stop] for each in self.context_columns]
        histories = [
            (columns_BW[:, each.start : each.stop], columns_BW[:, place : place + 1])
            for each, place in zip(self.sequence_columns, self.lengths, strict=True)
        ]
        return torch.cat([*context, columns_BW[:, self.lengths.stop :]], 1), histories


class HistoryEncoder(HistoryModel):
    """Blocks over the values of a sequence and, after them, the candidate; deep layers over context and candidate.

    Which column is the candidate the schema does not say, so it is a learned projection of the context. A value sees
    itself and those before it; learned positions count back from the newest.
    """

    BLOCKS, HEADS = 2, 2

    def block(self, dimension: int) -> nn.Module:
        """Return a block: tokens [B, T + 1, D] and what each sees, bool [B, T + 1, T + 1], in, tokens out."""
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
                length, self.context_width, [self.block(dimension) for _ in range(self.BLOCKS)], dimension
            )
            for length in self.sequence_lengths
        )
        self.make_deep(self.context_width + len(self.encoders) * dimension, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        context_BW, histories = self.looked_up(batch)
        encoded = [
            encoder(context_BW, vectors_BV, length_B1)
            for encoder, (vectors_BV, length_B1) in zip(self.encoders, histories, strict=True)
        ]
        logits_BL: Tensor = self.output(self.deep(torch.cat([context_BW, *encoded], 1)))
        return logits_BL


class _Encoder(nn.Module):
    """The candidate after a sequence's blocks."""

    def __init__(self, length: int, context_width: int, blocks: list[nn.Module], dimension: int) -> None:
        super().__init__()
        self.shape = (length, dimension)
        self.candidate = nn.Linear(context_width, dimension)
        self.positions = nn.Parameter(torch.empty(length, dimension).normal_(0, dimension**-0.5 / 10))
        self.blocks = nn.ModuleList(blocks)
        # The candidate, which comes last, is there whatever the length.
        places = torch.tensor([*range(length), -1])
        self.places: Tensor
        self.is_before: Tensor
        self.is_itself: Tensor
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("is_before", torch.ones(length + 1, length + 1).tril().bool(), persistent=False)
        self.register_buffer("is_itself", torch.eye(length + 1).bool(), persistent=False)

    def forward(self, context_BW: Tensor, vectors_BV: Tensor, length_B1: Tensor) -> Tensor:
        """Return [B, D]."""
        is_there_B1T = (self.places < length_B1).unsqueeze(1)
        # A value after the end sees itself, as what sees nothing has no weights.
        sees_BTT = is_there_B1T & self.is_before | self.is_itself
        places_back_BT = (length_B1 - 1 - self.places[:-1]).clamp(min=0).long()
        values_BTD = torch.unflatten(vectors_BV, 1, self.shape) + F.embedding(places_back_BT, self.positions)
        tokens_BTD = torch.cat([values_BTD, self.candidate(context_BW).unsqueeze(1)], 1)
        for block in self.blocks:
            tokens_BTD = block(tokens_BTD, sees_BTT)
        return tokens_BTD[:, -1]


def in_heads(tokens_BTD: Tensor, heads: int) -> Tensor:
    """Return [B, H, T, D / H]."""
    return torch.unflatten(tokens_BTD, 2, (heads, -1)).transpose(1, 2)
