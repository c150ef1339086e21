"""A log with the checkpoint that it follows is the state behind each of the last steps."""

from __future__ import annotations

import numpy as np
import pytest

from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.redo import step_log
from heterps_core.training.redo.step_log import KEPT_STEPS, DenseChange, LoggedWorker, StepChanges, StepLog

NUM_ROWS, NUM_STEPS, INTERVAL_STEPS = 60, 47, 10
WORKER = LoggedWorker(
    generation=1,
    rank=0,
    world_size=1,
    stage=0,
    num_stages=1,
    shards={"table": (0, NUM_ROWS)},
    has_dense=True,
)


def dense_change(step: int) -> DenseChange:
    """Return the dense part, which is the number of its step, whole in every fifth one from the first on."""
    if step % 5 == 1:
        return DenseChange(values={"dense": np.full(3, step)})
    return DenseChange(values={}, gradients={"dense": np.ones(3)}, learning_rate=step / 100)


class Training:
    """Rows that change by chance, and what they were behind each step."""

    def __init__(self, seed: int) -> None:
        self.drawn = np.random.default_rng(seed)
        self.states = [np.zeros((NUM_ROWS, 2))]
        self.changed = [np.empty(0, dtype=np.int64)]

    def step(self, *, delay: int = 0) -> StepChanges:
        number = len(self.states)
        rows = np.unique(self.drawn.zipf(1.3, 12) % NUM_ROWS)
        state = self.states[-1].copy()
        state[rows] = self.drawn.random((len(rows), 2))
        self.states.append(state)
        self.changed.append(rows)
        dense = {number - delay: dense_change(number - delay)} if number > delay else {}
        return StepChanges(
            cursor=TrainingCursor(step=number),
            dense=dense,
            rows={"table": (rows, {"weight": state[rows]})},
            begins_checkpoint=number % INTERVAL_STEPS == 0,
        )


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("late", [0, 3, 12])
def test_the_newest_checkpoint_and_the_log_are_the_state_behind_each_of_the_last_steps(delay, late):
    """Checkpoints are complete some steps after they were begun."""
    training, log = Training(seed=late), StepLog(WORKER, 0)
    for step in range(1, NUM_STEPS + 1):
        complete = max(step - late, 0) // INTERVAL_STEPS * INTERVAL_STEPS
        log.add(training.step(delay=delay), complete_step=complete or None)

        summary = log.summary()

        assert summary is not None
        assert summary.base_step <= complete
        expected = range(max(step - KEPT_STEPS, 0) + 1, step + 1 - delay)
        assert list(summary.cursors) == list(expected)
        for known in summary.cursors:
            dense, rows = log.state(known)
            whole, *gradients = dense
            assert whole.values["dense"].tolist() == [known - len(gradients)] * 3
            steps = range(known - len(gradients) + 1, known + 1)
            assert [each.learning_rate for each in gradients] == [step / 100 for step in steps]
            numbers, values = rows["table"]
            assert (np.diff(numbers) > 0).all()
            # What changed before a checkpoint is there with the values of later, too.
            if known >= complete:
                state = training.states[complete].copy()
                state[numbers] = values["weight"]
                assert np.array_equal(state, training.states[known])


def test_a_log_forgets_what_is_in_a_complete_checkpoint():
    training, log = Training(seed=1), StepLog(WORKER, 0)
    for step in range(1, 4 * INTERVAL_STEPS + KEPT_STEPS + 2):
        log.add(training.step(), complete_step=max(step - 1, 0) // INTERVAL_STEPS * INTERVAL_STEPS or None)

    summary = log.summary()
    assert summary is not None
    assert summary.base_step == 4 * INTERVAL_STEPS
    _, rows = log.state(len(training.states) - 1)

    later = np.unique(np.concatenate(training.changed[4 * INTERVAL_STEPS + 1 :]))
    assert rows["table"][0].tolist() == later.tolist()


def test_a_log_that_is_too_long_begins_again_behind_the_next_checkpoint(monkeypatch):
    monkeypatch.setattr(step_log, "LOG_BYTES", 300)
    training, log = Training(seed=2), StepLog(WORKER, 0)
    bases = []
    for _ in range(2 * INTERVAL_STEPS):
        log.add(training.step(), complete_step=None)
        summary = log.summary()
        bases.append(None if summary is None else summary.base_step)

    assert bases[0] == 0
    assert None in bases
    assert bases[INTERVAL_STEPS + KEPT_STEPS - 1] == INTERVAL_STEPS
