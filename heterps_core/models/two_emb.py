"""2EMB: a main tower over all slots, and a second small table over the first slots that joins late.

Structure after the public example of the PaddlePaddle heterogeneous pipeline: main 26 x 10 + 13 -> 400 -> 400 -> 50;
second table of 100 rows, 10 wide, over 5 slots -> 128; both joined -> output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from heterps_core.data.features import FeatureSpec
from heterps_core.models.embedding_layers import add_embeddings
from heterps_core.models.slot_embedding import SlotEmbedding, TailLinear, add_tower

EMBEDDING_DIMENSION = 10
MAIN_WIDTHS = (400, 400, 50)
SECOND_ROWS_PER_SLOT = 100
SECOND_SLOTS = 5
SECOND_WIDTH = 128


def build(
    features: FeatureSpec,
    *,
    hidden_widths: Sequence[int] = MAIN_WIDTHS,
    embedding_dim: int = EMBEDDING_DIMENSION,
) -> nn.Sequential:
    """Build the chain for the given slots and dense features."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    main_width = add_embeddings(layers, features, dimension=embedding_dim, prefix="main_")
    width = add_tower(layers, main_width, hidden_widths)
    second = SlotEmbedding(
        features,
        dimension=embedding_dim,
        slots=range(min(SECOND_SLOTS, features.num_slots)),
        rows_per_slot=SECOND_ROWS_PER_SLOT,
        include_dense=False,
        input_width=width,
    )
    layers["second_embedding"] = second
    layers["second_fc"] = TailLinear(width, second.output_width - width, SECOND_WIDTH)
    layers["output"] = nn.Linear(width + SECOND_WIDTH, features.num_labels)
    return nn.Sequential(layers)
