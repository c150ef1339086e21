"""MATCHNET: a user tower and an item tower, one after the other, compared by their cosine.

Structure after the public example of the PaddlePaddle heterogeneous pipeline: user 12 slots x 10 -> 400 -> 400 -> 50,
item 14 slots x 10 + 13 dense -> 400 -> 400 -> 50, ReLU after each. There the loss ranks a clicked item above drawn
ones by a margin; here the cosine, scaled and shifted by two learned numbers, is the logit of a click.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError
from heterps_core.models.embedding_layers import Embeddings
from heterps_core.models.slot_embedding import add_tower

EMBEDDING_DIMENSION = 10
TOWER_WIDTHS = (400, 400, 50)
USER_SLOT_SHARE = 12 / 26
"""Slots of the user, which come first; the item has the others and the dense features."""

INITIAL_SCALE, INITIAL_SHIFT = 10.0, -5.0
"""The cosine of two vectors without negative parts lies in [0, 1]; logits then span -5 to 5. Chosen here."""


class MatchNet(nn.Module):
    """The scaled and shifted cosine of the vectors that two towers give."""

    def __init__(
        self, features: FeatureSpec, *, hidden_widths: Sequence[int], embedding_dim: int, dropout: float
    ) -> None:
        super().__init__()
        num_user_slots = max(1, round(USER_SLOT_SHARE * features.num_slots))
        self.user = Embeddings(
            features, dimension=embedding_dim, slots=range(num_user_slots), include_dense=False
        )
        self.item = Embeddings(
            features, dimension=embedding_dim, slots=range(num_user_slots, features.num_slots)
        )
        user_tower: dict[str, nn.Module] = {}
        add_tower(user_tower, self.user.width, hidden_widths, prefix="user_", dropout=dropout)
        item_tower: dict[str, nn.Module] = {}
        add_tower(item_tower, self.item.width, hidden_widths, prefix="item_", dropout=dropout)
        # Beside the embeddings, under the names that checkpoints of before know.
        for name, layer in user_tower.items():
            self.add_module(name, layer)
        for name, layer in item_tower.items():
            named = OrderedDict(linear=layer)
            self.add_module(name, nn.Sequential(named) if isinstance(layer, nn.Linear) else layer)
        # Names alone: dropout is replaced in the module once it is built.
        self._user_tower, self._item_tower = list(user_tower), list(item_tower)
        self.cosine = nn.CosineSimilarity(dim=1)
        self.output = nn.Linear(1, features.num_labels)
        nn.init.constant_(self.output.weight, INITIAL_SCALE)
        nn.init.constant_(self.output.bias, INITIAL_SHIFT)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]; the cosine is 0 where a vector is zero."""
        user_BW = self.user(batch)
        for name in self._user_tower:
            user_BW = self.get_submodule(name)(user_BW)
        item_BW = self.item(batch)
        for name in self._item_tower:
            item_BW = self.get_submodule(name)(item_BW)
        logits_BL: Tensor = self.output(self.cosine(user_BW, item_BW).unsqueeze(1))
        return logits_BL


def build(
    features: FeatureSpec,
    *,
    hidden_widths: Sequence[int] = TOWER_WIDTHS,
    embedding_dim: int = EMBEDDING_DIMENSION,
    dropout: float = 0.0,
) -> MatchNet:
    """Build the model for the given slots and dense features.

    Raises:
        ConfigurationError: There are fewer than two slots, one for each tower.
    """
    if features.num_slots < 2:
        raise ConfigurationError(
            f"matchnet needs at least 2 slots, one for each tower, got {features.num_slots}; take ctrdnn"
        )
    return MatchNet(features, hidden_widths=hidden_widths, embedding_dim=embedding_dim, dropout=dropout)
