"""MATCHNET: a user tower and an item tower, one after the other, compared by their cosine.

Structure after the public example of the PaddlePaddle heterogeneous pipeline: user 12 slots x 10 -> 400 -> 400 -> 50,
item 14 slots x 10 + 13 dense -> 400 -> 400 -> 50, ReLU after each. There the loss ranks a clicked item above drawn
ones by a margin; here the cosine, scaled and shifted by two learned numbers, is the logit of a click.
"""

from __future__ import annotations

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError
from heterps_core.models.architectures.parts import ClickModel
from heterps_core.models.embedding_layers import Embeddings

_USER_SLOT_SHARE = 12 / 26
"""Slots of the user, which come first; the item has the others and the dense features."""

INITIAL_SCALE, INITIAL_SHIFT = 10.0, -5.0
"""The cosine of two vectors without negative parts lies in [0, 1]; logits then span -5 to 5. Chosen here."""


class MatchNet(ClickModel):
    """The scaled and shifted cosine of the vectors that two towers give."""

    DIMENSION = 10
    WIDTHS = (400, 400, 50)

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers.

        Raises:
            ConfigurationError: There are fewer than two slots, one for each tower.
        """
        if features.num_slots < 2:
            raise ConfigurationError(
                f"matchnet needs at least 2 slots, one for each tower, got {features.num_slots}; take ctrdnn"
            )
        num_user_slots = max(1, round(_USER_SLOT_SHARE * features.num_slots))
        self.user = Embeddings(
            features, dimension=dimension, slots=range(num_user_slots), include_dense=False
        )
        self.item = Embeddings(features, dimension=dimension, slots=range(num_user_slots, features.num_slots))
        self.user_tower, self.item_tower = self.tower(self.user.width), self.tower(self.item.width)
        self.cosine = nn.CosineSimilarity(dim=1)
        self.output = nn.Linear(1, features.num_labels)
        nn.init.constant_(self.output.weight, INITIAL_SCALE)
        nn.init.constant_(self.output.bias, INITIAL_SHIFT)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]; the cosine is 0 where a vector is zero."""
        user_BW, item_BW = self.user_tower(self.user(batch)), self.item_tower(self.item(batch))
        logits_BL: Tensor = self.output(self.cosine(user_BW, item_BW).unsqueeze(1))
        return logits_BL
