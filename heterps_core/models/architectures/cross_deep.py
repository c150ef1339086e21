"""Cross-deep: low-rank cross layers and a small deep part over vectors, numbers and buckets of numbers; a chain.

Cross layers of low rank: Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons".
Buckets: the piecewise linear encoding of Gorishniy et al. 2022, "On Embeddings for Numerical Features in Tabular
Deep Learning".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heterps_core.data.features import FeatureSpec
from heterps_core.models.embedding_layers import add_embeddings
from heterps_core.models.slot_embedding import add_tower
from heterps_core.models.target_statistics import TargetStatistics

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (128, 64)
_NUM_EDGES, _OUTERMOST = 17, 4.0
"""Edges of the buckets, evenly from -4 to 4 standard deviations of a column."""


class NumberBuckets(nn.Module):
    """Adds to the last D columns, the dense features, how far each has filled its buckets, and whether it is missing.

    [B, W] becomes [B, W + 17 D]. A number above a bucket fills it to 1, so a linear layer after it is
    piecewise linear in the number. A missing number is exactly 0, the mean, which hardly any other number is.
    """

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.num_dense = num_dense
        self.edges: Tensor
        edges = torch.linspace(-_OUTERMOST, _OUTERMOST, _NUM_EDGES)
        self.register_buffer("edges", edges, persistent=False)

    def forward(self, columns_BW: Tensor) -> Tensor:
        """Return the columns, whether each number is missing, and its buckets."""
        numbers_BD1 = columns_BW[:, -self.num_dense :].unsqueeze(2)
        is_missing_BD1 = (numbers_BD1 == 0).to(columns_BW.dtype)
        width = self.edges[1] - self.edges[0]
        filled_BDK = ((numbers_BD1 - self.edges[:-1]) / width).clamp(0, 1).to(columns_BW.dtype)
        return torch.cat([columns_BW, is_missing_BD1.flatten(1), filled_BDK.flatten(1)], 1)


class CrossLayers(nn.Module):
    r"""Cross layers :math:`x_{l+1} = x_0 \odot (U_l V_l x_l + b_l) + x_l` with W x R matrices U, R x W matrices V."""

    def __init__(self, width: int, *, num_layers: int, rank: int) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.wide = nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))

    def forward(self, first_BW: Tensor) -> Tensor:
        """Return [B, W]."""
        crossed_BW = first_BW
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            crossed_BW = first_BW * wide(narrow(crossed_BW)) + crossed_BW
        return crossed_BW


def build(
    features: FeatureSpec,
    *,
    hidden_widths: Sequence[int] = HIDDEN_WIDTHS,
    embedding_dim: int = EMBEDDING_DIMENSION,
    dropout: float = 0.0,
    cross_layers: int = 2,
    cross_rank: int = 64,
) -> nn.Sequential:
    """Build the chain for the given slots and dense features; sequences are weighed by attention, as in `ctrdnn`."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = add_embeddings(layers, features, dimension=embedding_dim)
    if features.num_dense:
        layers["buckets"] = NumberBuckets(features.num_dense)
        width += features.num_dense * _NUM_EDGES
    # A table of dynamic ids has no row for all rows.
    if features.dynamic_ids is None:
        statistics = layers["statistics"] = TargetStatistics(features, input_width=width)
        width = statistics.output_width
    layers["cross"] = CrossLayers(width, num_layers=cross_layers, rank=cross_rank)
    width = add_tower(layers, width, hidden_widths, dropout=dropout)
    layers["output"] = nn.Linear(width, features.num_labels)
    return nn.Sequential(layers)
