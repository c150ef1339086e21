"""The training loop of one worker: batches in the order of the cursor, metrics, checkpoints, evaluation."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.embeddings.row_range import RowRange
from heterps_core.embeddings.sharded_table import RowExchange, ShardedTable
from heterps_core.models.row_dropout import keys_of_rows
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.batch_feed import BatchFeed
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.gradients.finite_gradients import check_gradients, check_losses
from heterps_core.training.gradients.gradient_sum import take_buffers_of_first_replica
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.step_metrics import MetricWriter, StepMetrics
from heterps_core.training.stop_question import StopQuestion
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.swept_batches import SweptBatches

logger = logging.getLogger(__name__)


def remaining_share(step: int, num_steps: int) -> float:
    """Return the share of the learning rates that step `step` (from 0) trains with: from 1 down to 1 / num_steps.

    A straight fall to nothing gave a better log-loss than constant rates in four of five settings on real clicks
    (docs/LOG.md).
    """
    return 1.0 - step / num_steps


def spread(
    num_rows: int, num_microbatches: int, slices: Sequence[tuple[int, RowRange]]
) -> npt.NDArray[np.int64]:
    """Return the positions in a batch of the rows of a replica's slices, one after the other.

    Micro-batch j of m takes positions j, j + m, j + 2 m, ..., so that the slices of a replica are neighbours in the
    batch, whose positions stand for places in the files. A batch that m does not divide is cut as it lies.

    Example:
        >>> spread(8, 2, [(4, RowRange(2, 4)), (4, RowRange(6, 8))]).tolist()
        [4, 6, 5, 7]
    """
    places = np.concatenate([np.arange(mine.first, mine.stop) for _, mine in slices])
    if num_rows % num_microbatches:
        return places
    size = num_rows // num_microbatches
    positions: npt.NDArray[np.int64] = places % size * num_microbatches + places // size
    return positions


def _noise_seed(seed: int, *, step: int, stage: int, replica: int) -> int:
    """Return the seed of what a replica's layers draw in a step (from 0) beside dropout, in 0..2**64 - 1.

    Each step begins with a seed of its own, so that a run that is resumed draws what it would have drawn without the
    break. Within a step a stage runs the forward passes of its micro-batches in order and never one twice, so the
    seed fixes all draws. Replicas draw differently, as they see different rows; so does a plan with another cut.
    Masks of `RowDropout` depend on neither.
    """
    sequence = np.random.SeedSequence([seed, step, stage, replica])
    return int(sequence.generate_state(1, np.uint64)[0])


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """What one worker needs to train and evaluate."""

    runner: StageRunner
    model: StageModel
    dataset: PreparedDataset
    config: TrainingConfig
    run: RunDirectory
    checkpoints: CheckpointWriter | None = None
    """None where what is trained is thrown away."""

    metrics: MetricWriter | None = None
    """Only on the one worker that reports: the first replica of the last stage."""

    on_step: Callable[[int], None] = lambda step: None
    """Takes the number of each finished step, so that an error can name the last one."""

    @classmethod
    def of(
        cls,
        model: str,
        dataset: PreparedDataset,
        config: TrainingConfig,
        stages: Sequence[Stage],
        place: StagePlace,
        *,
        run: RunDirectory,
        scratch: Path = Path(),
        on_step: Callable[[int], None] = lambda step: None,
    ) -> TrainingLoop:
        """Build the part of a model that a worker trains; raises and takes what `build_stage_model` does."""
        part = build_stage_model(model, dataset.features, config, stages, place, scratch=scratch)
        runner = StageRunner(part, config, place)
        return cls(runner=runner, model=part, dataset=dataset, config=config, run=run, on_step=on_step)

    @property
    def place(self) -> StagePlace:
        """The place of this worker."""
        return self.runner.place

    def train(self, cursor: TrainingCursor) -> TrainingCursor:
        """Train from `cursor` to the end, or until a stop is asked for.

        Returns:
            The cursor after the last batch; its epoch is below the number of epochs after a stop.
        """
        started_s = time.monotonic()
        batches_per_epoch = self.dataset.num_batches(self.config.batch_size)
        num_steps = self.config.num_epochs * batches_per_epoch
        cursors = self._cursors(cursor, batches_per_epoch)
        source = self._swept(map(self.training_batch, cursors), writes=True)
        feed = BatchFeed(lambda _: source.next_batch(), self._cursors(cursor, batches_per_epoch))
        batches = iter(feed)
        # What is trained and not updated yet; its place among all batches.
        trained: deque[TrainingCursor] = deque()
        with source, StopQuestion(self.run, first_step=cursor.step + 1) as stop:
            coming, is_stopping = next(batches, None), False
            if self.checkpoints is not None and coming is not None:
                self.checkpoints.begin(cursor.step)
            while coming is not None:
                (at, microbatches), coming = coming, next(batches, None)
                cursor = at.after_batch(batches_per_epoch)
                is_last = is_stopping or coming is None
                is_saved = is_last or cursor.step % self.config.checkpoint_interval_steps == 0
                is_saved = is_saved and self.checkpoints is not None
                # A checkpoint holds the parameters after a batch, so none may be under way.
                following = [] if is_last or is_saved or coming is None else coming[1]
                trained.append(at)
                for losses in self._train_step(microbatches, step=at.step, following=following):
                    self._update_dense(trained.popleft(), losses, num_steps=num_steps, started_s=started_s)
                share = remaining_share(at.step, num_steps)
                self.model.update_rows(self.config.embedding_learning_rate * share)
                source.finish_step()
                self.on_step(cursor.step)
                if self.checkpoints is not None:
                    self.checkpoints.check()
                    if is_saved:
                        take_buffers_of_first_replica(self.model.layers.values(), group=self.place.group)
                        if self.metrics is not None:
                            # Steps after a checkpoint may be trained again, earlier ones are not.
                            self.metrics.flush("training")
                        self.checkpoints.save(cursor, is_last=is_last)
                if is_stopping:
                    break
                # The step that has begun already comes to its end.
                is_stopping = stop.is_asked_for(
                    cursor.step,
                    limit_s=self.runner.silence_limit_s,
                    lost_first_worker=partial(self.runner.lost_worker, 0),
                )
        blocked_s = 0.0 if self.checkpoints is None else self.checkpoints.blocked_s
        logger.info(
            "waited %.2f s of %.2f s for data and %.2f s for checkpoints, up to step %d",
            feed.waited_s,
            time.monotonic() - started_s,
            blocked_s,
            cursor.step,
        )
        if self.checkpoints is not None:
            self.checkpoints.finish()
        batches.close()
        source.close()
        if self.metrics is not None:
            self.metrics.flush("evaluating" if self.is_complete(cursor) else "stopped")
        return cursor

    def is_complete(self, end: TrainingCursor) -> bool:
        """Tell whether training came to its end, rather than to a stop that was asked for."""
        return end.epoch >= self.config.num_epochs

    def predict_held_out(self) -> Iterator[tuple[ClickBatch, npt.NDArray[np.float32]]]:
        """Yield the held-out rows that this replica of the last stage predicts, some at a time, and their logits.

        These are corrected for rows that are left out of training.
        All workers must go through it at once; those of other stages yield nothing.
        """
        num_batches = -(-self.dataset.num_eval_rows // self.config.batch_size)
        with self._swept(map(self._held_out_batch, range(num_batches)), writes=False) as source:
            for _, microbatches in BatchFeed(lambda _: source.next_batch(), range(num_batches)):
                logits = self.runner.predict(microbatches)
                source.finish_step()
                if self.runner.is_last:
                    logits += self.dataset.manifest.schema.logit_shift
                    parts = [microbatch.batch for microbatch in microbatches]
                    firsts = accumulate((part.num_rows for part in parts), initial=0)
                    for part, first in zip(parts, firsts, strict=False):
                        yield part, logits[first : first + part.num_rows].numpy()
        source.close()

    def training_batch(self, cursor: TrainingCursor) -> list[MicroBatch]:
        """Read this replica's rows of a batch, cut them into micro-batches, and exchange what they look up.

        All replicas of a stage must do so for the same batches in the same order.

        Raises:
            DataError: An id lies outside of its slot's table.
        """
        batch_size, num_microbatches = self.config.batch_size, self.config.num_microbatches
        slices = self.runner.row_slices(batch_size, num_microbatches)
        rows = self.dataset.batch_rows(
            cursor.epoch,
            cursor.batch_index,
            batch_size=batch_size,
            seed=self.config.seed,
            positions=spread(batch_size, num_microbatches, slices),
        )
        keys = keys_of_rows(rows, seed=self.config.seed, epoch=cursor.epoch).to(self.model.device)
        return self._microbatches(rows, slices, keys)

    def _held_out_batch(self, index: int) -> list[MicroBatch]:
        """Read this replica's rows of a held-out batch, as `training_batch` does of one that is trained."""
        batch_size, num_microbatches = self.config.batch_size, self.config.num_microbatches
        num_rows = min(batch_size, self.dataset.num_eval_rows - index * batch_size)
        slices = self.runner.row_slices(num_rows, num_microbatches)
        positions = spread(num_rows, num_microbatches, slices)
        rows = self.dataset.held_out_rows(index, batch_size=batch_size, positions=positions)
        return self._microbatches(rows, slices)

    def _microbatches(
        self, rows: npt.NDArray[np.int64], slices: Sequence[tuple[int, RowRange]], keys: Tensor | None = None
    ) -> list[MicroBatch]:
        parts = self._batches(rows, slices)
        keys_of_parts: Sequence[Tensor | None] = [None] * len(slices)
        if keys is not None:
            keys_of_parts = torch.split(keys, [mine.num_rows for _, mine in slices])
        return [
            MicroBatch(size, part, exchanges, own_keys)
            for (size, _), part, exchanges, own_keys in zip(
                slices, parts, self._exchanges(parts), keys_of_parts, strict=True
            )
        ]

    def _swept(self, batches: Iterable[list[MicroBatch]], *, writes: bool) -> SweptBatches:
        tables = list(self.model.swept_tables.values())
        return SweptBatches(batches, tables, group=self.place.ids_group, writes=writes)

    def _train_step(
        self, microbatches: Sequence[MicroBatch], *, step: int, following: Sequence[MicroBatch]
    ) -> Iterator[list[float]]:
        stage, replica = self.place.stage, self.place.replica
        torch.manual_seed(_noise_seed(self.config.seed, step=step, stage=stage, replica=replica))
        return self.runner.train_step(microbatches, following=following)

    def _update_dense(
        self, at: TrainingCursor, losses: list[float], *, num_steps: int, started_s: float
    ) -> None:
        """Update dense parameters by the gradients of the batch at a cursor, and tell its loss."""
        check_losses(losses, step=at.step + 1, config=self.config)
        check_gradients(self.model.layers, step=at.step + 1, config=self.config)
        learning_rate = self.config.dense_learning_rate * remaining_share(at.step, num_steps)
        self.model.update_dense(learning_rate)
        if self.metrics is not None:
            self.metrics.add(
                StepMetrics(
                    step=at.step + 1,
                    epoch=at.epoch,
                    num_samples=self.config.batch_size,
                    loss=sum(losses),
                    elapsed_s=time.monotonic() - started_s,
                )
            )

    def _exchanges(self, parts: Sequence[ClickBatch]) -> list[list[tuple[ShardedTable, RowExchange]]]:
        """Tell the owners of rows what each micro-batch will look up; replicas that share a table need not.

        What takes time beside the training is done here: rows of dynamic ids are found, and rows on disk listed.
        """
        exchanges: list[list[tuple[ShardedTable, RowExchange]]] = [[] for _ in parts]
        for layer in self.model.layers.values():
            if isinstance(layer, SlotEmbedding) and layer.table is not None and layer.table.looks_ahead:
                for exchange, part in zip(exchanges, parts, strict=True):
                    rows_BS = layer.row_numbers(part)
                    asked = layer.table.exchange_row_numbers(rows_BS, group=self.place.ids_group)
                    exchange.append((layer.table, asked))
        return exchanges

    def _cursors(self, cursor: TrainingCursor, batches_per_epoch: int) -> Iterator[TrainingCursor]:
        """Yield the batches from `cursor` to the end of the last epoch."""
        while cursor.epoch < self.config.num_epochs:
            yield cursor
            cursor = cursor.after_batch(batches_per_epoch)

    def _batches(
        self, rows: npt.NDArray[np.int64], slices: Sequence[tuple[int, RowRange]]
    ) -> list[ClickBatch]:
        """Read what this stage needs of this replica's rows, cut into micro-batches."""
        if self.model.reads_batch:
            batch = self.dataset.batch(rows)
        elif self.runner.is_last:
            batch = self.dataset.target_batch(rows)
        else:
            return [_NO_ROWS for _ in slices]
        ends = accumulate((mine.num_rows for _, mine in slices), initial=0)
        return [batch.rows(first, stop).to(self.model.device) for first, stop in pairwise(ends)]


_NO_ROWS = ClickBatch(
    dense=torch.empty(0, 0, device=CPU),
    ids=torch.empty(0, 0, dtype=torch.int64, device=CPU),
    labels=torch.empty(0, device=CPU),
)
"""For stages that neither look rows up nor see labels."""
