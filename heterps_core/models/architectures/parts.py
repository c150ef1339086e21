"""Layers that several click models share.

Shapes: B rows, F fields (slots), D values of a vector, W columns, L labels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.sequence_columns import SequenceColumns
from heterps_core.models.sequence_encoding import encode_by_length
from heterps_core.models.slot_embedding import SlotEmbedding, add_tower

_HISTORY_WIDTHS = (36,)
"""Widths of the layers that compare a value of a sequence with the query; those of the paper of DIN."""


class ClickModel(nn.Module):
    """Base of models whose deep part has the same settings: fully connected layers of some widths, with dropout.

    Args:
        hidden_widths: Of the fully connected layers; by default `WIDTHS`.
        embedding_dim: Width of a vector (D); by default `DIMENSION`.
    """

    DIMENSION: ClassVar[int] = 16
    WIDTHS: ClassVar[Sequence[int]] = (400, 400)

    def __init__(
        self,
        features: FeatureSpec,
        *,
        hidden_widths: Sequence[int] | None = None,
        embedding_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self._widths, self._dropout = self.WIDTHS if hidden_widths is None else hidden_widths, dropout
        self.make(features, self.DIMENSION if embedding_dim is None else embedding_dim)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers, in the order in which their initial values are drawn."""
        raise NotImplementedError

    def tower(self, width: int) -> nn.Sequential:
        """Return fully connected layers of the model's widths."""
        return mlp(width, self._widths, dropout=self._dropout)

    def tower_width(self, width: int) -> int:
        """Return the columns that leave a tower of so many columns."""
        return [width, *self._widths][-1]

    def make_deep(self, width: int, num_labels: int) -> None:
        """Make the deep part and its logits, the last layers of a model."""
        self.deep = self.tower(width)
        self.output = nn.Linear(self.tower_width(width), num_labels)


class Fields(nn.Module):
    """A vector for each slot, and the dense features: [B, F * D + dense] and, of the same values, [B, F, D]."""

    def __init__(self, features: FeatureSpec, *, dimension: int) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(features, dimension=dimension)
        self.num_fields = features.num_slots
        self.dimension = dimension
        self.vectors_width = self.num_fields * dimension
        self.width = self.embedding.output_width

    def forward(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """Return the flat columns and the vectors."""
        flat_BW = self.embedding(batch)
        return flat_BW, self.vectors_of(flat_BW)

    def vectors_of(self, flat_BW: Tensor) -> Tensor:
        """Return [B, F, D] of flat columns."""
        vectors_BV = flat_BW[:, : self.vectors_width]
        return torch.unflatten(vectors_BV, 1, (self.num_fields, self.dimension))


class Wide(nn.Module):
    """The linear part: a weight for each row of each slot, one for each dense feature, and a bias: [B, L].

    All begin at 0: a drawn weight of a column has no others that make up for it, and stays for hundreds of steps.
    """

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__()
        self.weights = SlotEmbedding(features, dimension=features.num_labels, initial_standard_deviation=0.0)
        self.num_fields, self.num_labels = features.num_slots, features.num_labels
        self.of_dense, self.bias = None, nn.Parameter(torch.zeros(features.num_labels))
        if features.num_dense:
            self.of_dense = nn.Linear(features.num_dense, features.num_labels, bias=False)
            nn.init.zeros_(self.of_dense.weight)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return [B, L]."""
        columns_BW = self.weights(batch)
        of_slots = columns_BW[:, : self.num_fields * self.num_labels]
        logits_BL: Tensor = torch.unflatten(of_slots, 1, (self.num_fields, self.num_labels)).sum(1)
        if self.of_dense is not None:
            logits_BL = logits_BL + self.of_dense(columns_BW[:, self.num_fields * self.num_labels :])
        return logits_BL + self.bias


class FactorizationMachine(nn.Module):
    r"""The products of all pairs of fields, the mean over D instead of the sum: [B, F, D] -> [B, 1].

    :math:`\sum_{i<j} v_i \cdot v_j = \frac12 \sum_d ((\sum_i v_{id})^2 - \sum_i v_{id}^2)`, Rendle 2010,
    "Factorization Machines", over D: a step of row-wise Adagrad moves each value by about the learning rate however
    many there are, so the sum would move the logit by more the wider vectors are.
    """

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Return [B, 1]."""
        sums_BD = vectors_BFD.sum(1)
        squares_BD = vectors_BFD.square().sum(1)
        return 0.5 * (sums_BD.square() - squares_BD).mean(1, keepdim=True)


class DotInteraction(nn.Module):
    """The products of all pairs of vectors: [B, F, D] -> [B, F * (F - 1) / 2]."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, -1).unbind()
        self.pairs: Tensor
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Return the products."""
        products_BFF = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2))
        return products_BFF.flatten(1).index_select(1, self.pairs)


class HistoryAttention(nn.Module):
    """The values of a sequence, weighed each by its fit to a query; weights do not sum up to 1, as in the paper.

    They begin near 1: from near 0 neither the values nor their fit would learn for long.
    """

    def __init__(self, columns: SequenceColumns, sequences: Sequence[int], *, context_width: int) -> None:
        super().__init__()
        self.columns, self.sequences, dimension = columns, sequences, columns.dimension
        self.query = nn.Linear(context_width, dimension)
        self.unit = mlp(4 * dimension, _HISTORY_WIDTHS)
        self.weight = nn.Linear(_HISTORY_WIDTHS[-1], 1)
        nn.init.ones_(self.weight.bias)

    def forward(self, activation_BW: Tensor, context_BW: Tensor) -> Tensor:
        """Return [B, D]."""
        return encode_by_length(activation_BW, context_BW, self.columns, self.sequences, self._pooled)

    def _pooled(self, context_RCW: Tensor, values_RTD: Tensor, lengths_R1: Tensor) -> Tensor:
        value_R1TD = values_RTD.unsqueeze(1)
        query_RC1D = self.query(context_RCW).unsqueeze(2)
        query, value = (
            query_RC1D.expand(-1, -1, values_RTD.shape[1], -1),
            value_R1TD.expand(-1, context_RCW.shape[1], -1, -1),
        )
        beside = torch.cat([query, value, query - value, query * value], 3)
        weights_RCT1 = self.weight(self.unit(beside))
        places_T = torch.arange(values_RTD.shape[1], device=values_RTD.device)
        is_there_RT = (places_T < lengths_R1).float()
        pooled_RCD: Tensor = (weights_RCT1 * is_there_RT[:, None, :, None] * value_R1TD).sum(2)
        return pooled_RCD


def mlp(width: int, hidden_widths: Sequence[int], *, dropout: float = 0.0) -> nn.Sequential:
    """Return fully connected layers with a ReLU each and, where asked for, dropout after it."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    add_tower(layers, width, hidden_widths, dropout=dropout)
    return nn.Sequential(layers)
