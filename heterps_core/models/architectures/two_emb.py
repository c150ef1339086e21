"""2EMB: a main tower over all slots, and a second small table over the first slots that joins late.

Structure after the public example of the PaddlePaddle heterogeneous pipeline: main 26 x 10 + 13 -> 400 -> 400 -> 50;
second table of 100 rows, 10 wide, over 5 slots -> 128; both joined -> output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel
from heterps_core.models.embedding_layers import Embeddings
from heterps_core.models.slot_embedding import SlotEmbedding

_SECOND_ROWS_PER_SLOT = 100
_SECOND_SLOTS = 5
_SECOND_WIDTH = 128


class TwoEmb(ClickModel):
    """The main tower beside the output of the second table."""

    DIMENSION = 10
    WIDTHS = (400, 400, 50)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.main = Embeddings(features, dimension=dimension)
        self.main_tower = self.tower(self.main.width)
        self.second_embedding = SlotEmbedding(
            features,
            dimension=dimension,
            slots=range(min(_SECOND_SLOTS, features.num_slots)),
            rows_per_slot=_SECOND_ROWS_PER_SLOT,
            include_dense=False,
        )
        self.second_fc = nn.Linear(self.second_embedding.output_width, _SECOND_WIDTH)
        self.output = nn.Linear(self.tower_width(self.main.width) + _SECOND_WIDTH, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        main_BW = self.main_tower(self.main(batch))
        second_BW = self.second_fc(self.second_embedding(batch))
        logits_BL: Tensor = self.output(torch.cat([main_BW, second_BW], 1))
        return logits_BL
