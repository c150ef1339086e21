"""CTR-DNN: a vector for each slot, of sequences by attention, beside the dense features, then fully connected layers.

Structure after the public example of the PaddlePaddle heterogeneous pipeline (26 slots, 13 dense features,
400-400-400, ReLU); one logit with a sigmoid loss stands for its two-way softmax, which is the same model.
The HeterPS paper plans it with 16 layers; four more hidden layers of the same width make them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from torch import nn

from heterps_core.data.features import FeatureSpec
from heterps_core.models.embedding_layers import add_embeddings
from heterps_core.models.slot_embedding import add_tower

EMBEDDING_DIMENSION = 16
HIDDEN_WIDTHS = (400, 400, 400)
_HIDDEN_WIDTHS_OF_16_LAYERS = (400,) * 7
"""An embedding, seven pairs of fully connected layer and ReLU, and the output."""


def build(
    features: FeatureSpec,
    *,
    hidden_widths: Sequence[int] = HIDDEN_WIDTHS,
    embedding_dim: int = EMBEDDING_DIMENSION,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build the chain for the given slots and dense features: 8 layers by default.

    Sequences are one layer more, and so is each further width of vectors that slots ask for.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = add_embeddings(layers, features, dimension=embedding_dim)
    width = add_tower(layers, width, hidden_widths, dropout=dropout)
    layers["output"] = nn.Linear(width, features.num_labels)
    return nn.Sequential(layers)


build_16_layers = partial(build, hidden_widths=_HIDDEN_WIDTHS_OF_16_LAYERS)
"""Builds the chain of the paper's depth for given slots and dense features."""
