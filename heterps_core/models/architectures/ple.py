"""PLE (Tang et al. 2020, "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model").

With a linear part, as `mmoe` has: without it a frequent label loses by a rare one beside it (docs/QUALITY.md).

Shapes: B rows, W columns, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, Wide, mlp
from heterps_core.models.embedding_layers import Embeddings

EXPERTS, TOWER_WIDTH = 2, 32
"""Of each label, and shared, at each level; width of the tower of a label."""


class PLE(ClickModel):
    """A level of experts for each hidden width, on streams of each label and a shared one; a tower for each label."""

    WIDTHS = (128, 64)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.vectors = Embeddings(features, dimension=dimension)
        self.wide = Wide(features)
        self.num_labels = features.num_labels
        widths = [self.vectors.width, *self._widths]
        self.levels = nn.ModuleList(
            _Level(*each, self.num_labels, is_last=place == len(widths) - 1, dropout=self._dropout)
            for place, each in enumerate(pairwise(widths), 1)
        )
        self.towers = nn.ModuleList(
            nn.Sequential(mlp(widths[-1], [TOWER_WIDTH]), nn.Linear(TOWER_WIDTH, 1))
            for _ in range(self.num_labels)
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        streams = [self.vectors(batch)] * (self.num_labels + 1)
        linear_BL: Tensor = self.wide(batch)
        for level in self.levels:
            streams = level(streams)
        logits = [tower(stream) for tower, stream in zip(self.towers, streams, strict=False)]
        return linear_BL + torch.cat(logits, 1)


class _Level(nn.Module):
    """Experts on the stream of each label and on the shared one, the last; labels mix their own and shared ones."""

    def __init__(
        self, width: int, output_width: int, num_labels: int, *, is_last: bool, dropout: float
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            mlp(width, [output_width], dropout=dropout) for _ in range(EXPERTS * (num_labels + 1))
        )
        # Nothing takes the shared stream of the last level.
        num_mixed = [*[2] * num_labels, *([] if is_last else [num_labels + 1])]
        self.gates = nn.ModuleList(nn.Linear(width, EXPERTS * number) for number in num_mixed)

    def forward(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """Return streams [B, W']."""
        experts = [expert(streams[place // EXPERTS]) for place, expert in enumerate(self.experts)]
        shared = experts[-EXPERTS:]
        mixed = [[*experts[n : n + EXPERTS], *shared] for n in range(0, len(experts) - EXPERTS, EXPERTS)]
        return [
            torch.bmm(gate(stream_BW).softmax(1).unsqueeze(1), torch.stack(own, 1)).squeeze(1)
            for gate, stream_BW, own in zip(self.gates, streams, [*mixed, experts], strict=False)
        ]
