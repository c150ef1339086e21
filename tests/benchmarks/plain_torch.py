"""Training as a competent user of plain torch writes it: one table with a sparse gradient, fused Adam.

`python -m tests.benchmarks.plain_torch FILE MODEL` trains one epoch of a file in the Criteo format and judges it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.models.chain import load_builder
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.training.job import default_batch_size

HELD_OUT_SHARE = 0.2


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


def plain_module(model: str, features: FeatureSpec, *, seed: int) -> nn.Module:
    """Return the module of a registered model with tables of plain torch."""
    torch.manual_seed(seed)
    plain = load_builder(model)(features)
    for path, layer in list(plain.named_modules()):
        if isinstance(layer, SlotEmbedding):
            plain.set_submodule(path, SparseEmbedding(layer))
    return plain


def plain_step(
    model: str | nn.Module, features: FeatureSpec, *, seed: int, rate: float, is_compiled: bool = False
) -> Callable[[ClickBatch], float]:
    """Return a step of the module in plain torch, which returns the loss: Adam for dense parameters, SGD for rows.

    Args:
        model: Its name, or what `plain_module` made.
        rate: Of the rows.
    """
    plain = plain_module(model, features, seed=seed) if isinstance(model, str) else model
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


def read_file(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Return labels [N], logarithms of counts [N, 13], indices of categories [N, 26], and the rows of tables."""
    counts, categories = ([f"{kind}{i}" for i in range(1, n + 1)] for kind, n in (("I", 13), ("C", 26)))
    types = dict.fromkeys(counts, pa.float32()) | dict.fromkeys(
        categories, pa.dictionary(pa.int32(), pa.string())
    )
    table = pa_csv.read_csv(
        path,
        read_options=pa_csv.ReadOptions(column_names=["label", *counts, *categories], use_threads=False),
        parse_options=pa_csv.ParseOptions(delimiter="\t"),
        convert_options=pa_csv.ConvertOptions(column_types=types),
    )
    labels = table["label"].to_numpy().astype(np.float32)
    dense = np.stack([np.log1p(np.nan_to_num(table[name].to_numpy()).clip(0)) for name in counts], axis=1)
    columns = [table[name].unify_dictionaries().combine_chunks() for name in categories]
    sizes = [len(column.dictionary) + 1 for column in columns]
    ids = [column.indices.fill_null(size - 1).to_numpy() for column, size in zip(columns, sizes, strict=True)]
    return labels, dense.astype(np.float32), np.stack(ids, axis=1).astype(np.int32), sizes


def train_file(path: str, model: str) -> float:
    """Train one epoch of the first rows of a file, and return the AUC of the latest fifth."""
    torch.set_num_threads(1)
    labels, dense, ids, sizes = read_file(path)
    num_train = int(len(labels) * (1 - HELD_OUT_SHARE))
    dense = (dense - dense[:num_train].mean(0)) / (dense[:num_train].std(0) + 1e-6)
    features = CRITEO_SCHEMA.features(sizes)
    plain = plain_module(model, features, seed=0)
    step = plain_step(plain, features, seed=0, rate=0.05)
    batch_size = default_batch_size(num_train)

    def batch(rows: np.ndarray | slice) -> ClickBatch:
        return ClickBatch.from_numpy(dense[rows], ids[rows], labels[rows])

    order = np.random.default_rng(0).permutation(num_train)
    for first in range(0, num_train - batch_size + 1, batch_size):
        step(batch(np.sort(order[first : first + batch_size])))
    plain.eval()
    with torch.no_grad():
        parts = [
            plain(batch(slice(first, first + batch_size)))
            for first in range(num_train, len(labels), batch_size)
        ]
    with tempfile.TemporaryFile() as file:
        torch.save(plain.state_dict(), file)
    return float(roc_auc_score(labels[num_train:], torch.cat(parts).flatten().numpy()))


if __name__ == "__main__":
    print(train_file(*sys.argv[1:]))
