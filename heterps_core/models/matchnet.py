"""MATCHNET: a user tower and an item tower, one after the other in the chain, compared by their cosine.

Structure after the public example of the PaddlePaddle heterogeneous pipeline: user 12 slots x 10 -> 400 -> 400 -> 50,
item 14 slots x 10 + 13 dense -> 400 -> 400 -> 50, ReLU after each. There the loss ranks a clicked item above drawn
ones by a margin; here the cosine, scaled and shifted by two learned numbers, is the logit of a click.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError
from heterps_core.models.embedding_layers import add_embeddings
from heterps_core.models.slot_embedding import TailLinear, add_tower

EMBEDDING_DIMENSION = 10
TOWER_WIDTHS = (400, 400, 50)
USER_SLOT_SHARE = 12 / 26
"""Slots of the user, which come first; the item has the others and the dense features."""

INITIAL_SCALE, INITIAL_SHIFT = 10.0, -5.0
"""The cosine of two vectors without negative parts lies in [0, 1]; logits then span -5 to 5. Chosen here."""


class Cosine(nn.Module):
    """Compares the two halves of the columns: [B, 2 * width] -> [B, 1] in [-1, 1]."""

    def forward(self, activation_BW: Tensor) -> Tensor:
        """Return the cosine [B, 1]; 0 where a half is zero."""
        left, right = activation_BW.chunk(2, dim=1)
        return F.cosine_similarity(left, right, dim=1).unsqueeze(1)


def build(
    features: FeatureSpec,
    *,
    hidden_widths: Sequence[int] = TOWER_WIDTHS,
    embedding_dim: int = EMBEDDING_DIMENSION,
) -> nn.Sequential:
    """Build the chain for the given slots and dense features.

    Raises:
        ConfigurationError: There are fewer than two slots, one for each tower.
    """
    if features.num_slots < 2:
        raise ConfigurationError(
            f"matchnet needs at least 2 slots, one for each tower, got {features.num_slots}; take ctrdnn"
        )
    num_user_slots = max(1, round(USER_SLOT_SHARE * features.num_slots))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    user_width = add_embeddings(
        layers,
        features,
        dimension=embedding_dim,
        slots=range(num_user_slots),
        prefix="user_",
        include_dense=False,
    )
    width = add_tower(layers, user_width, hidden_widths, prefix="user_")
    item_width = add_embeddings(
        layers,
        features,
        dimension=embedding_dim,
        slots=range(num_user_slots, features.num_slots),
        input_width=width,
        prefix="item_",
    )
    item_width -= width
    for number, hidden in enumerate(hidden_widths, start=1):
        layers[f"item_fc{number}"] = TailLinear(width, item_width, hidden)
        # The user's vector has no negative parts left, so it passes unchanged.
        layers[f"item_relu{number}"] = nn.ReLU()
        item_width = hidden
    layers["cosine"] = Cosine()
    output = nn.Linear(1, features.num_labels)
    nn.init.constant_(output.weight, INITIAL_SCALE)
    nn.init.constant_(output.bias, INITIAL_SHIFT)
    layers["output"] = output
    return nn.Sequential(layers)
