"""A step of the trainer with its updates, as the training loop runs it."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner


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
