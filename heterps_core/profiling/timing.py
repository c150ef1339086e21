"""Times of phases: warm-up, repeats within a time budget, median and spread.

All phases run in turns, round after round, so a slow second slows all alike, and caches are as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.units import MS_PER_S

_MIN_REPEATS = 5
_NUM_WARMUP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Median and spread of repeated measurements, or an estimate without repeats."""

    median_ms: float
    low_ms: float
    """A tenth of the repeats took less."""

    high_ms: float
    """A tenth of the repeats took more."""

    num_repeats: int
    """0 for an estimate, and where there was nothing to run."""

    @classmethod
    def from_repeats(cls, times_ms: Sequence[float]) -> Timing:
        """Summarise measurements; quantiles are interpolated linearly between the sorted values.

        Example:
            >>> Timing.from_repeats([1.0, 2.0, 3.0, 4.0, 15.0]).median_ms
            3.0
        """
        low_ms, median_ms, high_ms = np.quantile(times_ms, [0.1, 0.5, 0.9]).tolist()
        return cls(median_ms=median_ms, low_ms=low_ms, high_ms=high_ms, num_repeats=len(times_ms))

    @classmethod
    def estimated(cls, time_ms: float, *, measured: Timing | None = None) -> Timing:
        """Return a time that was not measured, without repeats; of a measured one it has the relative spread."""
        estimate = cls(median_ms=time_ms, low_ms=time_ms, high_ms=time_ms, num_repeats=0)
        if measured is None or measured.median_ms <= 0:
            return estimate
        low, high = measured.low_ms / measured.median_ms, measured.high_ms / measured.median_ms
        return replace(estimate, low_ms=low * time_ms, high_ms=high * time_ms)

    def scaled(self, factor: float) -> Timing:
        """Return `factor` times the time, with the same relative spread."""
        return replace(
            self,
            median_ms=factor * self.median_ms,
            low_ms=factor * self.low_ms,
            high_ms=factor * self.high_ms,
        )


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing to run in each round."""

    name: str | None
    run: Callable[[], object]


def time_phases(
    phases: Sequence[Phase],
    *,
    budget_s: float,
    max_repeats: int = 200,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run all phases in turns and time each by itself; a phase may prepare things for the next one.

    No new round begins after `budget_s`, once there are `_MIN_REPEATS`; the warm-up is part of the budget.
    """
    times_ms: dict[str, list[float]] = {phase.name: [] for phase in phases if phase.name is not None}
    stop_s = clock() + budget_s
    for num_repeats in range(-_NUM_WARMUP, max_repeats):
        if num_repeats >= _MIN_REPEATS and clock() >= stop_s:
            break
        for phase in phases:
            started_s = clock()
            phase.run()
            ended_s = clock()
            if phase.name is not None and num_repeats >= 0:
                times_ms[phase.name].append((ended_s - started_s) * MS_PER_S)
    return {name: Timing.from_repeats(times) for name, times in times_ms.items()}
