"""A training in this process alone, judged while it runs: what searches of parameters and benchmarks of quality take.

Layers, tables, optimizers and the order of rows are those of a worker; nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from heterps_core.data.dataset import PreparedDataset
from heterps_core.judging.quality import ClickQuality, measure_quality
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import TrainingConfig
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_place import ALONE
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.storage.run_directory import RunDirectory

_ROWS_PER_PREDICTION = 4096


def train_in_turns(
    dataset: PreparedDataset,
    model: str,
    config: TrainingConfig,
    *,
    rated: tuple[int, int],
    num_turns: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[ClickQuality]:
    """Train a model on the training rows, and yield its quality by the first label after each turn.

    Args:
        model: Registry name or import path.
        config: Updates come after each batch, in whichever mode; its micro-batches are one.
        rated: First and stop of the rows that it is judged on.
        num_turns: Parts of about equal length that the training has, at least 1; no more than it has steps.
        is_over: Asked before each step; where it says so, the iterator ends.

    Raises:
        ConfigurationError: The model cannot be built.
        TrainingError: A loss, a parameter or a prediction is no finite number.
    """
    num_layers = len(build_chain(model, dataset.features, seed=config.seed))
    stages = [Stage(0, num_layers - 1, "cpu", 1)]
    loop = TrainingLoop.of(model, dataset, config, stages, ALONE, run=RunDirectory(""))
    batches_per_epoch = dataset.num_batches(config.batch_size)
    num_steps = config.num_steps(batches_per_epoch)
    ends = {num_steps * turn // num_turns for turn in range(1, num_turns + 1)}
    cursor = TrainingCursor()
    while cursor.step < num_steps and not is_over():
        loop.take_step(cursor, loop.batches.training_batch(cursor), num_steps=num_steps)
        cursor = cursor.after_batch(batches_per_epoch)
        if cursor.step in ends:
            yield _quality(loop.runner, dataset, *rated)


def _quality(runner: StageRunner, dataset: PreparedDataset, first: int, stop: int) -> ClickQuality:
    logits = []
    for start in range(first, stop, _ROWS_PER_PREDICTION):
        rows = np.arange(start, min(start + _ROWS_PER_PREDICTION, stop))
        found = runner.predict([MicroBatch(len(rows), dataset.batch(rows))])
        logits.append(found.reshape(len(rows), -1)[:, 0].numpy())
    labels, weights = dataset.targets(first, stop)
    return measure_quality(labels, np.concatenate(logits), weights)
