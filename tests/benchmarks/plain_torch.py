"""A training step as a competent user of plain torch writes it: one table with a sparse gradient, fused Adam."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.chain import load_builder
from heterps_core.models.slot_embedding import SlotEmbedding


class SparseEmbedding(nn.Module):
    """A SlotEmbedding of slots with one value each as users of plain torch write it."""

    def __init__(self, layer: SlotEmbedding) -> None:
        super().__init__()
        self.table = nn.Embedding(layer.num_rows, layer.dimension, sparse=True)
        nn.init.normal_(self.table.weight, 0.0, layer.initial_standard_deviation)
        self.layer = layer

    @torch.compiler.disable
    def forward(self, batch: ClickBatch) -> Tensor:
        vectors = self.table(self.layer.row_numbers(batch)).flatten(1)
        return torch.cat([vectors, batch.dense], 1) if self.layer.include_dense else vectors


def plain_step(
    model: str, features: FeatureSpec, *, seed: int, rate: float, is_compiled: bool = False
) -> Callable[[ClickBatch], float]:
    """Return a step of the module in plain torch, which returns the loss: Adam for dense parameters, SGD for rows.

    Args:
        rate: Of the rows.
    """
    torch.manual_seed(seed)
    plain = load_builder(model)(features)
    for path, layer in list(plain.named_modules()):
        if isinstance(layer, SlotEmbedding):
            plain.set_submodule(path, SparseEmbedding(layer))
    tables = [each.table.weight for each in plain.modules() if isinstance(each, SparseEmbedding)]
    dense = [each for each in plain.parameters() if all(each is not table for table in tables)]
    optimizers = [torch.optim.Adam(dense, fused=True), torch.optim.SGD(tables, lr=rate)]
    run_plain = torch.compile(plain, dynamic=False) if is_compiled else plain

    def step(batch: ClickBatch) -> float:
        loss = F.binary_cross_entropy_with_logits(run_plain(batch).squeeze(1), batch.labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return step


def processor_seconds(step: Callable[[ClickBatch], object], batches: Iterable[ClickBatch]) -> float:
    started = time.process_time()
    for batch in batches:
        step(batch)
    return time.process_time() - started
