"""AutoInt: fields that attend to each other.

Song et al. 2019, "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks".
"""

from __future__ import annotations

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.architectures.parts import ClickModel, FieldAttention, Fields

ATTENTION_LAYERS, HEADS, HEAD_WIDTH = 2, 2, 16


class AutoInt(ClickModel):
    """The sum of what attended fields give and of a deep part."""

    def make(self, features: FeatureSpec, dimension: int) -> None:
        """Make the layers."""
        self.fields = Fields(features, dimension=dimension)
        widths = [dimension, *[HEADS * HEAD_WIDTH] * ATTENTION_LAYERS]
        self.attention = nn.Sequential(
            *(FieldAttention(width, heads=HEADS, head_width=HEAD_WIDTH) for width in widths[:-1])
        )
        self.of_attention = nn.Linear(features.num_slots * widths[-1], features.num_labels, bias=False)
        self.make_deep(self.fields.width, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        columns_BW, vectors_BFD = self.fields(batch)
        attended_BL = self.of_attention(self.attention(vectors_BFD).flatten(1))
        logits_BL: Tensor = attended_BL + self.output(self.deep(columns_BW))
        return logits_BL
