"""Shares of each batch that follow the replicas' speeds, measured while they train.

All replicas of a stage wait for the slowest one at the end of a step, so each should have as many rows as it works on
in the same time. Workers measure the seconds of a step in which they wait for no other; between two steps, where no
row is under way, they exchange these and compute the same shares. A replica's other work, such as the update of the
rows of tables that it owns, counts as if it grew with its rows: the next shares correct that error. Each replica
keeps the rows of tables that it owns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from heterps_core.transport.rank_layout import RankLayout

LEAST_GAIN = 1.05
"""Speed of a stage after a change over that before; a smaller one is within what two measurements differ by."""

_FEWEST_STEPS = 20
"""Fewer do not say how fast a replica is."""

_FIRST_STEP = 32
"""The first comparison comes after so many steps of an attempt, and then after twice as many each."""

_SLOWER = 1.25
"""Ratio of the seconds of a step to those before, from which on the machines count as changed."""


class StepSeconds(NamedTuple):
    """Mean seconds of a worker's steps since the last comparison; None where they are not known."""

    own_s: float | None = None
    """Without waits for others."""

    whole_s: float | None = None


class OwnWork:
    """Measures the steps of one replica without its waits for others.

    Args:
        waited_s: Returns the seconds for which this worker has waited so far, beside those in `waiting`.
    """

    def __init__(self, waited_s: Callable[[], float]) -> None:
        self._waited_s, self._waiting_s = waited_s, 0.0
        self.begin_again()

    def begin_again(self) -> None:
        """Forget all steps; the next one, which fills caches, is not counted either."""
        self._num_steps, self._own_s, self._whole_s = -1, 0.0, 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step, which runs in the block."""
        started_s, waited_s = time.perf_counter(), self._waited_s() + self._waiting_s
        yield
        self._num_steps += 1
        if self._num_steps:
            whole_s = time.perf_counter() - started_s
            self._whole_s += whole_s
            self._own_s += whole_s - (self._waited_s() + self._waiting_s - waited_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out the time of the block, in which this worker waits for others."""
        started_s = time.perf_counter()
        yield
        self._waiting_s += time.perf_counter() - started_s

    def take(self) -> StepSeconds:
        """Return the means since the last call, or nothing where the steps are too few, which count on."""
        if self._num_steps < _FEWEST_STEPS:
            return StepSeconds()
        found = StepSeconds(self._own_s / self._num_steps, self._whole_s / self._num_steps)
        self.begin_again()
        return found


class MeasuredShares:
    """Chooses the shares of stages on several machines from the steps of all workers; alike on each of them.

    A change after which steps take longer is undone: a replica with a quota of processor time is as fast as the
    others until it has as many rows. Then shares stay until steps take `_SLOWER` times as long.

    Args:
        layout: Ranks of all stages.
        machines: By rank, the name of the machine or None.
        first_step: The first step of this attempt (from 1): other machines may take part than before.
    """

    def __init__(self, layout: RankLayout, machines: Sequence[str | None], *, first_step: int = 1) -> None:
        self._first_step = first_step
        self._stages = {
            stage
            for stage, ranks in enumerate(layout.ranks)
            if len(ranks) > 1 and len({machines[rank] for rank in ranks}) > 1
        }
        self._before: dict[int, tuple[tuple[int, ...], float]] = {}
        """By stage the shares before the last change, and the seconds of a step with them."""

        self._settled_s: dict[int, float] = {}
        """By stage, where a change was undone, the seconds of a step without it."""

    def are_compared_after(self, step: int, *, is_drained: bool) -> bool:
        """Tell whether all workers compare their steps after a step (from 1); early, and then less and less often.

        Args:
            is_drained: No row is under way, so that it costs nothing.
        """
        num_steps = step - self._first_step + 1
        return bool(self._stages) and (
            is_drained or (num_steps >= _FIRST_STEP and num_steps.bit_count() == 1)
        )

    def following(
        self, layout: RankLayout, measured: Sequence[StepSeconds], *, num_rows: int
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shares of all stages, those that are in use where others would gain too little.

        Args:
            measured: By rank. A stage of a replica that is not known keeps its shares.
            num_rows: Of a micro-batch, at least one for each replica.
        """
        return tuple(
            self._of_stage(stage, layout.shares_of(stage), [measured[rank] for rank in ranks], num_rows)
            for stage, ranks in enumerate(layout.ranks)
        )

    def _of_stage(
        self, stage: int, shares: tuple[int, ...], measured: Sequence[StepSeconds], num_rows: int
    ) -> tuple[int, ...]:
        own_s = [each.own_s for each in measured if each.own_s is not None]
        step_s = max((each.whole_s or 0.0 for each in measured), default=0.0)
        is_settled = step_s < _SLOWER * self._settled_s.get(stage, 0.0)
        if stage not in self._stages or len(own_s) < len(shares) or is_settled:
            return shares
        before, before_s = self._before.pop(stage, (shares, step_s))
        if step_s > before_s:
            self._settled_s[stage] = before_s
            return before
        following = shares_by_speed(shares, own_s, num_rows=num_rows)
        if following != shares:
            self._before[stage] = shares, step_s
        return following


def shares_by_speed(
    shares: tuple[int, ...], step_seconds: Sequence[float], *, num_rows: int
) -> tuple[int, ...]:
    """Return the rows of a micro-batch that each replica works on in the same time, at least one.

    Args:
        shares: In use while the steps were measured; returned where others would not gain `LEAST_GAIN`.
        step_seconds: Of each replica's own work, above 0.
        num_rows: Of a micro-batch.

    Example:
        >>> shares_by_speed((1, 1), [0.1, 0.3], num_rows=64)
        (48, 16)
        >>> shares_by_speed((48, 16), [0.15, 0.151], num_rows=64)
        (48, 16)
    """
    speeds = np.divide(shares, step_seconds)
    # A step of speeds / sum(speeds) takes each replica sum(shares) / sum(speeds).
    if max(step_seconds) * speeds.sum() < LEAST_GAIN * sum(shares):
        return shares
    # One row each first; of the rest whole rows, and those that are left over to the largest fractions.
    wanted = np.maximum(num_rows * speeds / speeds.sum(), 1.0) - 1.0
    rest = num_rows - len(shares)
    wanted *= rest / max(wanted.sum(), 1e-9)
    rows = np.floor(wanted).astype(np.int64)
    rows[np.argsort(rows - wanted, kind="stable")[: rest - rows.sum()]] += 1
    return tuple((rows + 1).tolist())
