"""Models as users bring them, whose layers work otherwise in training than in predictions."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.target_statistics import TargetStatistics

WITH_DROPOUT = f"{__name__}:build_with_dropout"
WITH_BATCH_NORM = f"{__name__}:build_with_batch_norm"
WITH_STATISTICS = f"{__name__}:WithStatistics"
OWN_MODELS = (WITH_DROPOUT, WITH_BATCH_NORM, WITH_STATISTICS)


class WithStatistics(nn.Module):
    """A linear model of target statistics, beside one of vectors."""

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__()
        self.vectors = SlotEmbedding(features, dimension=4)
        self.statistics = TargetStatistics(features)
        self.of_vectors = nn.Linear(self.vectors.output_width, features.num_labels)
        self.of_statistics = nn.Linear(self.statistics.output_width, features.num_labels)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return logits [B, labels]."""
        logits_BL: Tensor = self.of_vectors(self.vectors(batch)) + self.of_statistics(self.statistics(batch))
        return logits_BL


def build_with_dropout(features: FeatureSpec) -> nn.Sequential:
    """Two hidden layers; half of what the first gives is dropped."""
    return _two_hidden_layers(features, dropout=nn.Dropout(0.5))


def build_with_batch_norm(features: FeatureSpec) -> nn.Sequential:
    """Two hidden layers; what the first gives is normalized."""
    return _two_hidden_layers(features, batch_norm=nn.BatchNorm1d(128))


def _two_hidden_layers(features: FeatureSpec, **between: nn.Module) -> nn.Sequential:
    embedding = SlotEmbedding(features, dimension=16)
    return nn.Sequential(
        OrderedDict(
            embedding=embedding,
            hidden_1=nn.Linear(embedding.output_width, 128),
            **between,
            relu_1=nn.ReLU(),
            hidden_2=nn.Linear(128, 64),
            relu_2=nn.ReLU(),
            output=nn.Linear(64, 1),
        )
    )
