"""A step of the trainer with its updates, as the training loop runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.replica_batches import cut_batch, request_rows


def train_one_step(
    model: StageModel,
    runner: StageRunner,
    microbatches: Sequence[MicroBatch],
    *,
    following: Sequence[MicroBatch] = (),
    dense_learning_rate: float,
    embedding_learning_rate: float,
) -> list[float]:
    """Return the losses, over the whole batch, of the batches that dense parameters were updated by."""
    losses = []
    for shares in runner.train_step(microbatches, following=following):
        losses.append(sum(shares))
        model.update_dense(dense_learning_rate)
    model.update_rows(embedding_learning_rate)
    return losses


def announced_microbatches(
    model: StageModel, runner: StageRunner, batch: ClickBatch, *, num_microbatches: int
) -> list[MicroBatch]:
    """Return this replica's slices of a batch; the rows that they look up are requested once, as in training."""
    slices = runner.row_slices(batch.num_rows, num_microbatches)
    rows = torch.cat([torch.arange(mine.first, mine.stop) for _, mine in slices])
    own = ClickBatch(dense=batch.dense[rows], ids=batch.ids[rows], labels=batch.labels[rows])
    (announced,) = request_rows(own, model)
    return cut_batch(own, slices, announced)
