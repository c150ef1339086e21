"""2EMB: a main tower over all slots, and a second small table over the first slots that joins late.

Structure after the public example of the PaddlePaddle heterogeneous pipeline: main 26 x 10 + 13 -> 400 -> 400 -> 50;
second table of 100 rows, 10 wide, over 5 slots -> 128; both joined -> output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.embedding_layers import Embeddings
from heterps_core.models.slot_embedding import SlotEmbedding, add_tower

EMBEDDING_DIMENSION = 10
MAIN_WIDTHS = (400, 400, 50)
SECOND_ROWS_PER_SLOT = 100
SECOND_SLOTS = 5
SECOND_WIDTH = 128


class TwoEmb(nn.Module):
    """The main tower beside what the second table gives."""

    def __init__(
        self, features: FeatureSpec, *, hidden_widths: Sequence[int], embedding_dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.main = Embeddings(features, dimension=embedding_dim)
        tower: dict[str, nn.Module] = {}
        width = add_tower(tower, self.main.width, hidden_widths, dropout=dropout)
        # Beside the embeddings, under the names that checkpoints of before know.
        for name, layer in tower.items():
            self.add_module(name, layer)
        # Names alone: dropout is replaced in the module once it is built.
        self._tower = list(tower)
        self.second_embedding = SlotEmbedding(
            features,
            dimension=embedding_dim,
            slots=range(min(SECOND_SLOTS, features.num_slots)),
            rows_per_slot=SECOND_ROWS_PER_SLOT,
            include_dense=False,
        )
        self.second_fc = nn.Sequential()
        self.second_fc.add_module("linear", nn.Linear(self.second_embedding.output_width, SECOND_WIDTH))
        self.output = nn.Linear(width + SECOND_WIDTH, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        main_BW = self.main(batch)
        for name in self._tower:
            main_BW = self.get_submodule(name)(main_BW)
        second_BW = self.second_fc(self.second_embedding(batch))
        logits_BL: Tensor = self.output(torch.cat([main_BW, second_BW], 1))
        return logits_BL


def build(
    features: FeatureSpec,
    *,
    hidden_widths: Sequence[int] = MAIN_WIDTHS,
    embedding_dim: int = EMBEDDING_DIMENSION,
    dropout: float = 0.0,
) -> TwoEmb:
    """Build the model for the given slots and dense features."""
    return TwoEmb(features, hidden_widths=hidden_widths, embedding_dim=embedding_dim, dropout=dropout)
