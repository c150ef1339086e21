"""The training loop of one worker: batches in the order of the cursor, metrics, checkpoints, evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.training.checkpoint import save_checkpoint
from heterps_core.training.cursor import TrainingCursor
from heterps_core.training.job import TrainingConfig
from heterps_core.training.run_directory import STOP, RunDirectory
from heterps_core.training.stage_exchange import RowSlice
from heterps_core.training.stage_model import StageModel
from heterps_core.training.stage_runner import MicroBatch, StageRunner
from heterps_core.training.step_metrics import MetricWriter, StepMetrics

CONTROL_INTERVAL_STEPS = 20
"""Steps between two looks at whether a stop was asked for; all workers must agree, which costs a broadcast."""


def remaining_share(step: int, num_steps: int) -> float:
    """Return the share of the learning rates that step `step` (from 0) trains with: from 1 down to 1 / num_steps.

    A straight fall to nothing gave a better log-loss than constant rates in four of five settings on real clicks
    (docs/LOG.md).
    """
    return 1.0 - step / num_steps


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """What one worker needs to train and evaluate."""

    runner: StageRunner
    model: StageModel
    dataset: PreparedDataset
    config: TrainingConfig
    run: RunDirectory
    group: ProcessGroup | None
    """The replicas of this stage; None where this worker is alone."""

    metrics: MetricWriter | None
    """Only on the one worker that reports: the first replica of the last stage."""

    on_step: Callable[[int], None]
    """Told the number of each finished step, so that an error can name the last one."""

    def train(self, cursor: TrainingCursor) -> TrainingCursor:
        """Train from `cursor` to the end, or until a stop is asked for.

        Returns:
            The cursor behind the last batch; its epoch is below the number of epochs after a stop.
        """
        started_s = time.monotonic()
        batches_per_epoch = self.dataset.num_batches(self.config.batch_size)
        num_steps = self.config.num_epochs * batches_per_epoch
        saved_step = cursor.step
        while cursor.epoch < self.config.num_epochs:
            loss = self.runner.train_step(self._training_batch(cursor))
            share = remaining_share(cursor.step, num_steps)
            self.model.apply_gradients(
                dense_learning_rate=self.config.dense_learning_rate * share,
                embedding_learning_rate=self.config.embedding_learning_rate * share,
            )
            epoch, cursor = cursor.epoch, cursor.after_batch(batches_per_epoch)
            self.on_step(cursor.step)
            if self.metrics is not None:
                self.metrics.add(
                    StepMetrics(
                        step=cursor.step,
                        epoch=epoch,
                        num_samples=self.config.batch_size,
                        loss=loss,
                        elapsed_s=time.monotonic() - started_s,
                    )
                )
            if cursor.step % self.config.checkpoint_interval_steps == 0:
                save_checkpoint(self.run, self.model, cursor, group=self.group)
                saved_step = cursor.step
            if cursor.step % CONTROL_INTERVAL_STEPS == 0 and self._stop_is_asked_for():
                break
        if saved_step != cursor.step:
            save_checkpoint(self.run, self.model, cursor, group=self.group)
        if self.metrics is not None:
            self.metrics.flush("evaluating")
        return cursor

    def predict_held_out(self) -> npt.NDArray[np.float32] | None:
        """Return the logits of all held-out rows in order, on the reporting worker; None elsewhere."""
        parts = []
        for first in range(0, self.dataset.num_eval_rows, self.config.batch_size):
            stop = min(first + self.config.batch_size, self.dataset.num_eval_rows)
            slices = self.runner.row_slices(stop - first, self.config.num_microbatches)
            microbatches = [
                MicroBatch(num_rows, self._held_out_slice(first, rows)) for num_rows, rows in slices
            ]
            logits = self.runner.predict(microbatches)
            if self.runner.is_last:
                parts.append(self._in_row_order(logits, [rows for _, rows in slices], stop - first))
        if self.metrics is None or not parts:
            return None
        return torch.cat(parts).numpy()

    def _training_batch(self, cursor: TrainingCursor) -> list[MicroBatch]:
        slices = self.runner.row_slices(self.config.batch_size, self.config.num_microbatches)
        if not (self.model.reads_batch or self.runner.is_last):
            return [MicroBatch(size, _NO_ROWS) for size, _ in slices]
        rows = np.concatenate(
            [
                self.dataset.batch_rows(
                    cursor.epoch,
                    cursor.batch_index,
                    batch_size=self.config.batch_size,
                    seed=self.config.seed,
                    lo=mine.first,
                    hi=mine.stop,
                )
                for _, mine in slices
            ]
        )
        batch = self.dataset.train_batch(rows)
        parts = _split(batch, [mine.num_rows for _, mine in slices])
        return [MicroBatch(size, part) for (size, _), part in zip(slices, parts, strict=True)]

    def _held_out_slice(self, first: int, rows: RowSlice) -> ClickBatch:
        if not (self.model.reads_batch or self.runner.is_last):
            return _NO_ROWS
        return self.dataset.eval_batch(first + rows.first, first + rows.stop)

    def _in_row_order(self, logits: Tensor, slices: list[RowSlice], num_rows: int) -> Tensor:
        """Bring the logits of all replicas of the last stage together, in the order of rows."""
        ordered = torch.zeros(num_rows)
        for rows, part in zip(slices, torch.split(logits, [rows.num_rows for rows in slices]), strict=True):
            ordered[rows.first : rows.stop] = part
        if self.runner.num_replicas > 1:
            dist.all_reduce(ordered, group=self.group)
        return ordered

    def _stop_is_asked_for(self) -> bool:
        answer = torch.tensor([dist.get_rank() == 0 and self.run.exists(STOP)])
        dist.broadcast(answer, src=0)
        return bool(answer)


_NO_ROWS = ClickBatch(
    dense=torch.empty(0, 0), ids=torch.empty(0, 0, dtype=torch.int64), labels=torch.empty(0)
)
"""For stages that neither look rows up nor see labels."""


def _split(batch: ClickBatch, sizes: list[int]) -> list[ClickBatch]:
    return [
        ClickBatch(dense=dense, ids=ids, labels=labels)
        for dense, ids, labels in zip(
            torch.split(batch.dense, sizes),
            torch.split(batch.ids, sizes),
            torch.split(batch.labels, sizes),
            strict=True,
        )
    ]
