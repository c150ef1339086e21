"""Models that read each sequence of a row beside its context: all other vectors, and the dense features.

Shapes: B rows, T values of a sequence, D values of a vector, W columns, L labels, H heads.
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
    """Blocks over the values of a sequence and, after them, the candidate; deep layers over context and candidate.

    Which column is the candidate the schema does not say, so it is a learned projection of the context. A value sees
    itself and those before it; learned positions count back from the newest.
    """

    BLOCKS, HEADS = 2, 2

    def block(self, dimension: int, *, most: int) -> nn.Module:
        """Return a block: tokens [B, T, D] in and out, each sees itself and those before it.

        Called with places [B, 1] too, it returns the tokens there alone [B, 1, D].

        Args:
            most: Tokens of the longest sequence.
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

    def _encoded(self, context_BW: Tensor, values_BTD: Tensor, length_B1: Tensor) -> Tensor:
        places = torch.arange(values_BTD.shape[1] + 1, device=values_BTD.device)
        places_back_BT = (length_B1 - 1 - places[:-1]).clamp(min=0)
        values_BTD = values_BTD + F.embedding(places_back_BT, self.positions)
        # The candidate follows the last value, and no value that is there sees what fills up a row after it.
        is_candidate_BT1 = (places == length_B1).unsqueeze(2)
        candidate_B1D = self.candidate(context_BW).unsqueeze(1)
        tokens_BTD = candidate_B1D.where(is_candidate_BT1, F.pad(values_BTD, (0, 0, 0, 1)))
        *others, last = self.blocks
        for block in others:
            tokens_BTD = block(tokens_BTD)
        encoded_B1D: Tensor = last(tokens_BTD, length_B1)
        return encoded_B1D.squeeze(1)


def token_at(tokens_BTD: Tensor, places_B1: Tensor) -> Tensor:
    """Return a token of each row [B, 1, D]."""
    return tokens_BTD.gather(1, places_B1.unsqueeze(2).expand(-1, 1, tokens_BTD.shape[2]))


def seen_from(tokens_BTD: Tensor, places_B1: Tensor) -> Tensor:
    """Return the tokens at a place and before it, bool [B, 1, 1, T]."""
    return (torch.arange(tokens_BTD.shape[1], device=tokens_BTD.device) <= places_B1)[:, None, None]


def in_heads(tokens_BTD: Tensor, heads: int) -> Tensor:
    """Return [B, H, T, D / H]."""
    return torch.unflatten(tokens_BTD, 2, (heads, -1)).transpose(1, 2)
