"""With bfloat16 between workers a model learns what one process learns that rounds at the same places.

Rounded are activations after a cut and their gradients, the rows that a look-up by messages brings, and the
gradients of rows, which each replica has summed over its rows of a batch. Everything else is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_exchange import replica_slice
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import StageRunner
from heterps_core.transport.rank_layout import RankLayout
from tests.heterps_core.training.reference import PlainEmbedding, plain_model
from tests.one_step import announced_microbatches, train_one_step
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

FEATURES = FeatureSpec(num_dense=3, slot_rows=(7, 5))
LAYOUT = RankLayout(((0, 1), (2,)))
STAGES = (Stage(0, 2, "cpu", 2), Stage(3, 7, "cpu", 1))
BATCH_ROWS, NUM_MICROBATCHES, NUM_STEPS = 24, 3, 4
RATES = {"dense_learning_rate": 0.05, "embedding_learning_rate": 2.0}


class Learned(NamedTuple):
    rows: list[list[float]]
    """Of this replica's shard."""

    sent_bytes: int
    """To the other stage, and to other replicas of the table."""

    row_bytes: int


def make_batch(step: int) -> ClickBatch:
    drawn = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, rows, (BATCH_ROWS,), generator=drawn) for rows in FEATURES.slot_rows]
    return ClickBatch(
        dense=torch.randn(BATCH_ROWS, FEATURES.num_dense, generator=drawn),
        ids=torch.stack(ids, 1),
        labels=torch.randint(0, 2, (BATCH_ROWS,), generator=drawn).float(),
    )


def train_part(rank: int, wire_dtype: str, shares_memory: bool) -> Learned:
    stage, replica = LAYOUT.position(rank)
    groups = [dist.new_group(list(ranks)) for ranks in LAYOUT.ranks]
    group = groups[stage] if stage == 0 else None
    config = TrainingConfig(
        batch_size=BATCH_ROWS,
        num_microbatches=NUM_MICROBATCHES,
        num_epochs=1,
        seed=1,
        dense_optimizer="sgd",
        embedding_optimizer="sgd",
        wire_dtype=wire_dtype,
    )
    neighbours = connect_neighbours(LAYOUT, rank=rank, shares_memory=shares_memory)
    place = StagePlace(layout=LAYOUT, stage=stage, replica=replica, group=group, neighbours=neighbours)
    model = build_stage_model("ctrdnn", FEATURES, config, STAGES, place)
    runner = StageRunner(model, config, place)
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        parts = announced_microbatches(model, runner, batch, num_microbatches=NUM_MICROBATCHES)
        train_one_step(model, runner, parts, **RATES)
    table = model.tables.get("embedding")
    if table is None:
        return Learned([], runner.sent_bytes, 0)
    return Learned(table.weight_RD.tolist(), runner.sent_bytes, table.sent_bytes)


class Rounded(torch.autograd.Function):
    """Passes a tensor, and its gradient, through bfloat16."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.bfloat16().float()


def in_bfloat16(rows_RD: Tensor) -> Tensor:
    return rows_RD.bfloat16().float()


def train_plainly(rounded: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the rows that one process learns, which takes the slices of micro-batches and replicas in turn."""
    model = plain_model("ctrdnn", FEATURES, seed=1)
    layers = list(model.chain.values())
    embedding = layers[0]
    assert isinstance(embedding, PlainEmbedding)
    master_RD = embedding.weight.detach().clone()
    dense = [parameter for layer in layers[1:] for parameter in layer.parameters()]
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        num_replicas = len(LAYOUT.ranks[0])
        rows_gradients = [torch.zeros_like(master_RD) for _ in range(num_replicas)]
        dense_gradients = [torch.zeros_like(p) for p in dense]
        embedding.weight.data = rounded(master_RD) if rounded else master_RD.clone()
        for index in range(NUM_MICROBATCHES):
            whole = replica_slice(BATCH_ROWS, NUM_MICROBATCHES, index)
            for replica in range(num_replicas):
                own = replica_slice(whole.num_rows, num_replicas, replica)
                part = batch.rows(whole.first + own.first, whole.first + own.stop)
                activation = embedding(part, None)
                for place, layer in enumerate(layers[1:], start=1):
                    if rounded and place == STAGES[1].first_layer:
                        activation = Rounded.apply(activation)
                    activation = layer(activation)
                loss = F.binary_cross_entropy_with_logits(activation[:, 0], part.labels, reduction="sum")
                first, *others = torch.autograd.grad(loss / BATCH_ROWS, [embedding.weight, *dense])
                rows_gradients[replica] += first
                for total, other in zip(dense_gradients, others, strict=True):
                    total += other
        for rows_gradient in rows_gradients:
            received = rounded(rows_gradient) if rounded else rows_gradient
            master_RD -= RATES["embedding_learning_rate"] * received
        with torch.no_grad():
            for parameter, gradient in zip(dense, dense_gradients, strict=True):
                parameter -= RATES["dense_learning_rate"] * gradient
    return master_RD


@pytest.mark.parametrize(
    "shares_memory",
    [False, pytest.param(True, marks=pytest.mark.weekly)],
    ids=["messages", "shared memory"],
)
def test_a_cut_model_learns_what_one_process_learns_that_rounds_alike(shares_memory):
    rounded, plain = train_plainly(in_bfloat16), train_plainly()

    found = run_in_processes(train_part, 3, "bfloat16", shares_memory)
    in_float32 = run_in_processes(train_part, 3, "float32", shares_memory)

    def rows_of(found: list[Learned]) -> Tensor:
        return torch.tensor([row for each in found for row in each.rows])

    effect = (rounded - plain).norm()
    # A sum in another order may be rounded to the next number now and then, no more.
    assert (rows_of(found) - rounded).norm() < 0.1 * effect
    assert (rows_of(in_float32) - plain).norm() < 0.01 * effect
    for half, full in zip(found, in_float32, strict=True):
        assert 2 * half.sent_bytes == full.sent_bytes > 0
        assert 2 * half.row_bytes == full.row_bytes
    # Each replica of the first stage sends its 12 rows of a step, 400 floats of 4 bytes; the second all gradients.
    assert [each.sent_bytes for each in in_float32] == [76_800, 76_800, 153_600]
    assert in_float32[0].row_bytes > 0
