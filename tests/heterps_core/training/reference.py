"""The same models and steps written again in plain PyTorch, in one process, to compare the engine with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.models.slot_embedding import SlotEmbedding


class PlainEmbedding(nn.Module):
    """A SlotEmbedding with one ordinary parameter and a dense gradient."""

    def __init__(self, layer: SlotEmbedding, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.layer = layer

    def forward(self, batch: ClickBatch, activation: Tensor | None) -> Tensor:
        ids = batch.ids[:, list(self.layer.slots)]
        if self.layer.rows_per_slot is not None:
            ids = ids % self.layer.rows_per_slot
        vectors = F.embedding(ids + self.layer.offsets_S, self.weight).flatten(1)
        parts = [vectors] if activation is None else [activation, vectors]
        return torch.cat([*parts, batch.dense] if self.layer.include_dense else parts, 1)


class PlainModel(nn.Module):
    """A chain whose embeddings are PlainEmbeddings with the given initial rows."""

    def __init__(self, chain: nn.Sequential, embedding_weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.chain = nn.ModuleDict(
            {
                name: PlainEmbedding(layer, embedding_weights[name]) if name in embedding_weights else layer
                for name, layer in chain.named_children()
            }
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        activation = None
        for layer in self.chain.values():
            activation = layer(batch, activation) if isinstance(layer, PlainEmbedding) else layer(activation)
        assert activation is not None
        return activation.squeeze(1)


def train_plainly(
    model: PlainModel,
    batches: list[ClickBatch],
    *,
    dense_learning_rate: float,
    embedding_learning_rate: float,
) -> list[float]:
    """Train with SGD; returns the loss of each step."""
    tables = [layer.weight for layer in model.chain.values() if isinstance(layer, PlainEmbedding)]
    dense = [parameter for parameter in model.parameters() if all(parameter is not table for table in tables)]
    optimizer = torch.optim.SGD(
        [{"params": dense, "lr": dense_learning_rate}, {"params": tables, "lr": embedding_learning_rate}]
    )
    losses = []
    for batch in batches:
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
