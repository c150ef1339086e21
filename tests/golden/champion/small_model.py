"""The model of the champion beside this file."""

from collections import OrderedDict

from torch import nn

from heterps_core.data.features import FeatureSpec
from heterps_core.models.slot_embedding import SlotEmbedding


def build(features: FeatureSpec) -> nn.Sequential:
    embedding = SlotEmbedding(features, dimension=2)
    return nn.Sequential(
        OrderedDict(
            embedding=embedding,
            fc1=nn.Linear(embedding.output_width, 4),
            relu1=nn.ReLU(),
            output=nn.Linear(4, 1),
        )
    )
