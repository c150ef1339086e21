"""What a worker has changed since a checkpoint, kept for it in another process: with that checkpoint it is its state.

Changes of the last steps are kept apart, as workers are some steps apart when one of them is lost; older ones are
merged. Nothing here needs torch. Shapes: U rows of a shard, distinct and ascending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from heterps_core.training.checkpoint import TrainingCursor

Values: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""By the name of a tensor."""

Rows: TypeAlias = tuple[npt.NDArray[np.int64], Values]
"""Rows [U], and what the tensors of their table hold of them, [U, ...]."""

KEPT_STEPS = 4
"""With delayed updates workers are at most two steps apart, and what is kept of one may be one more behind."""

WHOLE_INTERVAL_STEPS = 8
"""So often the whole dense part is sent, with what its optimizer has accumulated; else gradients suffice."""

MERGED_RUNS = 8
"""Changes of so many steps are merged at once: more hold more rows twice, fewer merge each row more often."""

LOG_BYTES = 256 * 1024**2
"""Most bytes of a log; where more has changed since the last checkpoint, it begins again behind the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedWorker:
    """Whose changes a log has, and which of them."""

    generation: int
    rank: int
    world_size: int
    stage: int
    num_stages: int
    shards: Mapping[str, tuple[int, int]]
    """By table: the first row of its shard, and the rows of the whole table."""

    has_dense: bool
    """The log has the dense part of the stage, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseChange:
    """What makes the dense part that is behind a step."""

    values: Values
    """Of all its tensors, or beside gradients of those that no gradient changes."""

    gradients: Values | None = None
    """By parameter, for the optimizer's step from the dense part before; None where the values are all there is."""

    learning_rate: float = 0.0
    """Of that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChanges:
    """What a worker changed in a step."""

    cursor: TrainingCursor
    """The batch behind the step."""

    dense: Mapping[int, DenseChange]
    """By step, the dense part after it; with delayed updates that is the step before."""

    rows: Mapping[str, Rows]
    """By table, with the new values."""

    begins_checkpoint: bool
    """A checkpoint of the state behind the step is written."""

    def without_dense(self) -> StepChanges:
        """Return the rows alone."""
        return replace(self, dense={})


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSummary:
    """Behind which steps the state of a worker can be had."""

    worker: LoggedWorker
    base_step: int
    """Of the earliest checkpoint that the log may follow."""

    cursors: Mapping[int, TrainingCursor]
    """By step."""


class StepLog:
    """The changes of one worker.

    Args:
        worker: Whose.
        step: Behind which its training began.
    """

    def __init__(self, worker: LoggedWorker, step: int) -> None:
        self._worker = worker
        self._base_step: int | None = step
        """None where too much has changed since the last checkpoint."""

        self._later: deque[StepChanges] = deque()
        self._dense: dict[int, DenseChange] = {}
        self._segments: deque[_Segment] = deque([_Segment()])
        """Between checkpoints, oldest first."""

    def add(self, changes: StepChanges, *, complete_step: int | None) -> None:
        """Take in what a step changed; steps come in order.

        Args:
            complete_step: Of the newest checkpoint that the worker knows to be complete.
        """
        self._later.append(changes)
        self._dense |= changes.dense
        if newest := self._newest_dense():
            whole = self._whole_before(newest[0])
            self._dense = {step: change for step, change in self._dense.items() if step >= whole}
        while len(self._later) > KEPT_STEPS:
            self._settle(self._later.popleft())
        while len(self._segments) > 1 and self._segments[0].last_step <= (complete_step or 0):
            forgotten = self._segments.popleft()
            if self._base_step is not None:
                self._base_step = max(self._base_step, forgotten.last_step)

    def summary(self) -> LogSummary | None:
        """Return behind which steps the worker's state can be had; None where the log is too long."""
        if self._base_step is None:
            return None
        steps = {changes.cursor.step: changes.cursor for changes in self._later}
        known = {step: cursor for step, cursor in steps.items() if step in self._newest_dense()}
        is_whole = not self._worker.has_dense
        return LogSummary(
            worker=self._worker, base_step=self._base_step, cursors=steps if is_whole else known
        )

    def state(self, step: int) -> tuple[list[DenseChange], dict[str, Rows]]:
        """Return what makes the dense part after one of these steps, and all rows that changed up to it by table.

        The first of the dense changes is a whole one.
        """
        runs: list[Mapping[str, Rows]] = [segment.rows() for segment in self._segments]
        runs += [changes.rows for changes in self._later if changes.cursor.step <= step]
        tables = dict.fromkeys(chain.from_iterable(runs))
        rows = {table: merged([run[table] for run in runs if table in run]) for table in tables}
        dense = []
        if step in self._dense:
            whole = self._whole_before(step)
            dense = [self._dense[each] for each in sorted(self._dense) if whole <= each <= step]
        return dense, rows

    def _newest_dense(self) -> list[int]:
        """Return the last steps whose dense part can be made."""
        return sorted(self._dense)[-KEPT_STEPS - 1 :]

    def _whole_before(self, step: int) -> int:
        """Return the last step up to one whose dense part is kept whole."""
        return max(each for each, change in self._dense.items() if each <= step and change.gradients is None)

    def _settle(self, changes: StepChanges) -> None:
        if self._base_step is not None:
            self._segments[-1].add(changes)
            if sum(segment.num_bytes for segment in self._segments) > LOG_BYTES:
                self._base_step = None
                self._segments = deque([_Segment()])
        if changes.begins_checkpoint:
            self._segments.append(_Segment())
            if self._base_step is None:
                self._base_step = changes.cursor.step


@dataclass(slots=True)
class _Segment:
    """What changed between two checkpoints."""

    last_step: int = 0
    runs: dict[str, list[tuple[int, Rows]]] = field(default_factory=dict)
    """By table, the newest last, with how often each was merged; as many as `MERGED_RUNS` alike become one."""

    def add(self, changes: StepChanges) -> None:
        self.last_step = changes.cursor.step
        for table, rows in changes.rows.items():
            runs = self.runs.setdefault(table, [])
            runs.append((0, rows))
            while len(runs) >= MERGED_RUNS and runs[-MERGED_RUNS][0] == runs[-1][0]:
                runs[-MERGED_RUNS:] = [(runs[-1][0] + 1, merged([run for _, run in runs[-MERGED_RUNS:]]))]

    def rows(self) -> dict[str, Rows]:
        return {table: merged([run for _, run in runs]) for table, runs in self.runs.items()}

    @property
    def num_bytes(self) -> int:
        return sum(
            rows_U.nbytes + sum(each.nbytes for each in values.values())
            for runs in self.runs.values()
            for _, (rows_U, values) in runs
        )


def merged(runs: Sequence[Rows]) -> Rows:
    """Return the rows of all runs, each with the values of the last run that has it.

    Example:
        >>> first = np.array([1, 4]), {"weight": np.array([10.0, 40.0])}
        >>> rows, values = merged([first, (np.array([4, 7]), {"weight": np.array([41.0, 70.0])})])
        >>> rows.tolist(), values["weight"].tolist()
        ([1, 4, 7], [10.0, 41.0, 70.0])
    """
    if len(runs) == 1:
        return runs[0]
    rows_N = np.concatenate([rows_U for rows_U, _ in runs])
    # Runs ascend, so a stable sort merges them, and of equal rows the newest comes last.
    order_N = np.argsort(rows_N, kind="stable")
    sorted_N = rows_N[order_N]
    order_U = order_N[np.append(sorted_N[1:] != sorted_N[:-1], np.ones(min(len(sorted_N), 1), dtype=bool))]
    names = runs[0][1]
    return rows_N[order_U], {
        name: np.concatenate([values[name] for _, values in runs])[order_U] for name in names
    }
