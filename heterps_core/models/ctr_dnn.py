"""CTR-DNN: one vector per slot beside the dense features, then a stack of fully connected layers.

Structure after the public example of the PaddlePaddle heterogeneous pipeline (26 slots, 13 dense features,
400-400-400, ReLU); one logit with a sigmoid loss stands for its two-way softmax, which is the same model.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from heterps_core.data.features import FeatureSpec
from heterps_core.models.slot_embedding import SlotEmbedding

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (400, 400, 400)


def build(features: FeatureSpec) -> nn.Sequential:
    """Build the chain for the given slots and dense features."""
    embedding = SlotEmbedding(features, dimension=EMBEDDING_DIMENSION)
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=embedding)
    width = embedding.output_width
    for number, hidden in enumerate(HIDDEN_WIDTHS, start=1):
        layers[f"fc{number}"] = nn.Linear(width, hidden)
        layers[f"relu{number}"] = nn.ReLU()
        width = hidden
    layers["output"] = nn.Linear(width, 1)
    return nn.Sequential(layers)
