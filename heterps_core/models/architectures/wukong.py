"""Wukong (Zhang et al. 2024, "Wukong: Towards a Scaling Law for Large-Scale Recommendation").

Shapes: B rows, F vectors, D values of a vector, K vectors that pairs are compressed to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, Fields, mlp

INTERACTIONS, OF_PAIRS, LINEAR, COMPRESSED, PAIR_WIDTH = 2, 8, 8, 8, 128
"""Layers; vectors that each makes of products of pairs, and of sums; columns of products; width of its deep layer."""


class Wukong(ClickModel):
    """Layers of factorization machines: the n-th has products of up to 2 to the power of n vectors."""

    WIDTHS = (128,)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.fields = Fields(features, dimension=dimension)
        self.of_dense = nn.Linear(features.num_dense, dimension) if features.num_dense else None
        first = features.num_slots + bool(features.num_dense)
        self.interactions = nn.Sequential(
            *(_Interaction(OF_PAIRS + LINEAR if n else first, dimension) for n in range(INTERACTIONS))
        )
        self.make_deep((OF_PAIRS + LINEAR) * dimension, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, vectors_BFD = self.fields(batch)
        if self.of_dense is not None:
            dense_BD = self.of_dense(columns_BW[:, self.fields.vectors_width :])
            vectors_BFD = torch.cat([vectors_BFD, dense_BD.unsqueeze(1)], 1)
        logits_BL: Tensor = self.output(self.deep(self.interactions(vectors_BFD).flatten(1)))
        return logits_BL


class _Interaction(nn.Module):
    """Vectors of compressed products of pairs, and sums of vectors, beside sums of what entered: normalised."""

    def __init__(self, num_vectors: int, dimension: int) -> None:
        super().__init__()
        self.shape = (OF_PAIRS, dimension)
        self.compress = nn.Linear(num_vectors, COMPRESSED, bias=False)
        self.linear = nn.Linear(num_vectors, LINEAR, bias=False)
        self.residual = nn.Linear(num_vectors, OF_PAIRS + LINEAR, bias=False)
        products = num_vectors * COMPRESSED
        self.of_pairs = nn.Sequential(nn.LayerNorm(products), mlp(products, [PAIR_WIDTH]))
        self.vectors = nn.Linear(PAIR_WIDTH, OF_PAIRS * dimension)
        self.norm = nn.LayerNorm((OF_PAIRS + LINEAR, dimension))

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Return [B, F', D]."""
        vectors_BDF = vectors_BFD.transpose(1, 2)
        # X (X^T Y) in place of (X X^T) Y: the same with fewer products.
        products_BFK = torch.bmm(vectors_BFD, self.compress(vectors_BDF))
        of_pairs_BV = self.vectors(self.of_pairs(products_BFK.flatten(1)))
        linear_BFD = self.linear(vectors_BDF).transpose(1, 2)
        beside_BFD = torch.cat([torch.unflatten(of_pairs_BV, 1, self.shape), linear_BFD], 1)
        left_BFD: Tensor = self.norm(beside_BFD + self.residual(vectors_BDF).transpose(1, 2))
        return left_BFD
