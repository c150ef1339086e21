"""The training loop of one worker: batches in the order of the cursor, updates, metrics and checkpoints."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import torch

from heterps_core.compute_device import CPU
from heterps_core.data.dataset import PreparedDataset
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.batch_shares import MeasuredShares, StepSeconds
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.gradients.clipping import clip_gradients
from heterps_core.training.gradients.finite_gradients import check_losses, check_parameters
from heterps_core.training.gradients.gradient_sum import take_buffers_of_first_replica
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.replica_batches import BatchFeed, ReplicaBatches
from heterps_core.training.step_metrics import MetricWriter, StepMetrics
from heterps_core.training.stop_question import StopQuestion
from heterps_core.training.storage.run_directory import SHARES, RunDirectory
from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.token_connections import machine_name

logger = logging.getLogger(__name__)


def rate_share(step: int, num_steps: int, warmup_steps: int | None = None) -> float:
    """Return the share of the learning rates that step `step` (from 0) trains with, in (0, 1].

    It rises in a straight line to 1 at the last step of the warm-up, and then falls in one towards 0 after the last
    step. A straight fall to nothing gave a better log-loss than constant rates in four of five settings on real
    clicks (docs/LOG.md).

    Example:
        >>> [rate_share(step, 6, warmup_steps=2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    first = warmup_steps or 0
    return (step + 1) / first if step < first else 1.0 - (step - first) / (num_steps - first)


def _noise_seed(seed: int, *, step: int, stage: int, replica: int) -> int:
    """Return the seed of what a replica's layers draw in a step (from 0) beside dropout, in 0..2**64 - 1.

    Each step begins with a seed of its own, so that a run that is resumed draws what it would have drawn without the
    break. Within a step a stage runs the forward passes of its micro-batches in order and never one twice, so the
    seed fixes all draws. Replicas draw differently, as they see different rows; so does a plan with another cut.
    Masks of `RowDropout` depend on neither.
    """
    # NumPy's SeedSequence takes 10 times as long.
    drawn = hashlib.blake2b(f"{seed} {step} {stage} {replica}".encode(), digest_size=8)
    return int.from_bytes(drawn.digest(), "little")


class _Reading:
    """The batches of a training, which a thread reads ahead; a context, in which they are trained.

    Args:
        cursor: Of the first batch.
    """

    def __init__(self, loop: TrainingLoop, cursor: TrainingCursor) -> None:
        self._loop, self._waited_s = loop, 0.0
        self._begin(cursor)

    def _begin(self, cursor: TrainingCursor) -> None:
        batches, cursors = self._loop.batches, self._loop.cursors
        self.source = batches.swept(map(batches.training_batch, cursors(cursor)), writes=True)
        self._feed = BatchFeed(lambda _: self.source.next_batch(), cursors(cursor))
        self._batches = iter(self._feed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.__exit__()

    @property
    def waited_s(self) -> float:
        """Time for which the training had nothing to do but wait for data."""
        return self._waited_s + self._feed.waited_s

    def next_batch(self) -> tuple[TrainingCursor, list[MicroBatch]] | None:
        """Return the next batch and its cursor; None after the last."""
        return next(self._batches, None)

    def begin_again(self, cursor: TrainingCursor) -> None:
        """Forget what is read ahead, and read from a cursor on by other shares."""
        self.close()
        self._waited_s = self.waited_s
        self._loop.batches.follow_shares()
        self._begin(cursor)

    def close(self) -> None:
        """End the thread; after the last batch that is trained."""
        self.source.__exit__()
        self._batches.close()
        self.source.close()


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """The parts with which one worker trains."""

    runner: StageRunner
    model: StageModel
    batches: ReplicaBatches
    dataset: PreparedDataset
    config: TrainingConfig
    run: RunDirectory
    checkpoints: CheckpointWriter | None = None
    """None where what is trained is thrown away."""

    metrics: MetricWriter | None = None
    """Only on the one worker that reports: the first replica of the last stage."""

    on_step: Callable[[int], None] = lambda step: None
    """Takes the number of each finished step, so that an error can name the last one."""

    _trained: deque[TrainingCursor] = field(default_factory=deque, init=False)
    """Batches that are trained, and whose update is still to come."""

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
        batches = ReplicaBatches(dataset, config, part, runner)
        return cls(
            runner=runner,
            model=part,
            batches=batches,
            dataset=dataset,
            config=config,
            run=run,
            on_step=on_step,
        )

    @property
    def place(self) -> StagePlace:
        """The place of this worker."""
        return self.runner.place

    def train(self, cursor: TrainingCursor) -> TrainingCursor:
        """Train from `cursor` to the end, or until a stop is asked for.

        Returns:
            The cursor after the last batch, which is not the last one of the training after a stop.
        """
        started_s = time.monotonic()
        batches_per_epoch = self.dataset.num_batches(self.config.batch_size)
        num_steps = self.config.num_steps(batches_per_epoch)
        has_replicas = any(len(ranks) > 1 for ranks in self.place.layout.ranks)
        machines = gather_json(machine_name()) if has_replicas else []
        measured = MeasuredShares(self.place.layout, machines, first_step=cursor.step + 1)
        with (
            _Reading(self, cursor) as reading,
            StopQuestion(self.run, first_step=cursor.step + 1) as stop,
        ):
            coming, is_stopping = reading.next_batch(), False
            if self.checkpoints is not None and coming is not None:
                self.checkpoints.begin(cursor.step)
            while coming is not None:
                (at, microbatches), coming = coming, reading.next_batch()
                cursor = at.after_batch(batches_per_epoch)
                is_last = is_stopping or coming is None
                is_saved = is_last or cursor.step % self.config.checkpoint_interval_steps == 0
                is_saved = is_saved and self.checkpoints is not None
                is_compared = not is_last and measured.are_compared_after(cursor.step, is_drained=is_saved)
                # A checkpoint holds the parameters after a batch, so none may be under way.
                following = [] if is_last or is_saved or is_compared or coming is None else coming[1]
                self.take_step(
                    at, microbatches, following=following, num_steps=num_steps, started_s=started_s
                )
                reading.source.finish_step()
                self.on_step(cursor.step)
                if self.checkpoints is not None:
                    self.checkpoints.check()
                    if is_saved:
                        self._save(self.checkpoints, cursor, is_last=is_last)
                if is_stopping:
                    break
                if is_compared and self._take_shares(measured):
                    reading.begin_again(cursor)
                    coming = reading.next_batch()
                # The step that has begun already comes to its end.
                is_stopping = stop.is_asked_for(
                    cursor.step,
                    limit_s=self.runner.silence_limit_s,
                    lost_first_worker=partial(self.runner.lost_worker, 0),
                )
        blocked_s = 0.0 if self.checkpoints is None else self.checkpoints.blocked_s
        logger.info(
            "waited %.2f s of %.2f s for data and %.2f s for checkpoints, up to step %d",
            reading.waited_s,
            time.monotonic() - started_s,
            blocked_s,
            cursor.step,
        )
        if self.checkpoints is not None:
            self.checkpoints.finish()
        reading.close()
        if self.metrics is not None:
            self.metrics.flush("evaluating" if self.is_complete(cursor) else "stopped")
        return cursor

    def _save(self, checkpoints: CheckpointWriter, cursor: TrainingCursor, *, is_last: bool) -> None:
        take_buffers_of_first_replica(self.model.layers.values(), group=self.place.group)
        if self.metrics is not None:
            # Steps after a checkpoint may be trained again, earlier ones are not.
            self.metrics.flush("training")
        checkpoints.save(cursor, is_last=is_last)

    def _take_shares(self, measured: MeasuredShares) -> bool:
        """Let shares follow the speeds of replicas; tells whether this worker's batches change.

        A stage on cards, whose work runs beside its processes, and one with rows on disk, which are read long before
        their batches, keep the shares that they have. Requests are cut where the parts of any stage begin.
        """
        layout, stage = self.place.layout, self.place.stage
        own = self.runner.own_work.take()
        if self.model.device != CPU or self.model.swept_tables:
            own = StepSeconds()
        of_all = [StepSeconds(*each) for each in gather_json(own)]
        shares = measured.following(layout, of_all, num_rows=self.config.microbatch_size)
        before = tuple(map(layout.shares_of, range(layout.num_stages)))
        has_requests = self.dataset.has_requests
        if shares == before or (has_requests and self.config.embedding_memory_bytes is not None):
            return False
        logger.info("shares of batches %s after %s", shares, before)
        if self.metrics is not None:
            with suppress(OSError):
                self.run.write_json(SHARES, shares)
        self.runner.take_shares(shares)
        return has_requests or shares[stage] != before[stage]

    def is_complete(self, end: TrainingCursor) -> bool:
        """Tell whether training came to its end, rather than to a stop that was asked for."""
        return end.step >= self.config.num_steps(self.dataset.num_batches(self.config.batch_size))

    def take_step(
        self,
        at: TrainingCursor,
        microbatches: Sequence[MicroBatch],
        *,
        following: Sequence[MicroBatch] = (),
        num_steps: int,
        started_s: float = 0.0,
    ) -> None:
        """Train on a batch, and update what may be updated then.

        Args:
            at: The place of the batch among all.
            microbatches, following: See `StageRunner.train_step`.
            num_steps: Of the whole training, over which learning rates fall.
            started_s: Of this attempt, by the monotonic clock; for metrics.

        Raises:
            TrainingError: A loss, a parameter or a gradient is not finite.
        """
        stage, replica = self.place.stage, self.place.replica
        seed = _noise_seed(self.config.seed, step=at.step, stage=stage, replica=replica)
        # torch.manual_seed asks all kinds of devices, which takes 85 times as long.
        torch.default_generator.manual_seed(seed)
        if self.model.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self._trained.append(at)
        with self.runner.own_work.step():
            for losses in self.runner.train_step(microbatches, following=following):
                self._update_dense(self._trained.popleft(), losses, num_steps=num_steps, started_s=started_s)
            share = rate_share(at.step, num_steps, self.config.warmup_steps)
            self.model.update_rows(self.config.embedding_learning_rate * share)

    def _update_dense(
        self, at: TrainingCursor, losses: list[float], *, num_steps: int, started_s: float
    ) -> None:
        """Update dense parameters by the gradients of the batch at a cursor, and tell its loss."""
        check_losses(losses, step=at.step + 1, config=self.config)
        if self.config.clip_norm is not None:
            gradients = [each.grad for each in self.model.dense_optimizer.state if each.grad is not None]
            with self.runner.own_work.waiting():
                clip_gradients(gradients, self.place, longest=self.config.clip_norm)
        share = rate_share(at.step, num_steps, self.config.warmup_steps)
        self.model.update_dense(self.config.dense_learning_rate * share)
        check_parameters(self.model.layers, step=at.step + 1, config=self.config)
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

    def cursors(self, cursor: TrainingCursor) -> Iterator[TrainingCursor]:
        """Yield the batches from `cursor` to the end of the last epoch."""
        batches_per_epoch = self.dataset.num_batches(self.config.batch_size)
        while cursor.step < self.config.num_steps(batches_per_epoch):
            yield cursor
            cursor = cursor.after_batch(batches_per_epoch)
