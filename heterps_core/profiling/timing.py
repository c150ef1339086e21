"""How long things take: warm-up, repeats within a time budget, median and spread.

All phases run in turns, round after round, so a slow second slows all alike, and caches are as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterps_core.errors import ConfigurationError
from heterps_core.units import MS_PER_S

LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9
"""The spread that is shown: a tenth of the repeats lies below it, a tenth above."""


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
        ordered = sorted(times_ms)
        return cls(
            median_ms=statistics.median(ordered),
            low_ms=_quantile(ordered, LOW_QUANTILE),
            high_ms=_quantile(ordered, HIGH_QUANTILE),
            num_repeats=len(ordered),
        )

    @classmethod
    def estimated(cls, time_ms: float) -> Timing:
        """Return a time that nobody measured: no spread, no repeats."""
        return cls(median_ms=time_ms, low_ms=time_ms, high_ms=time_ms, num_repeats=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatLimits:
    """How often to repeat."""

    budget_s: float
    """No new round begins after this time, once there are `min_repeats`."""

    min_repeats: int = 5
    max_repeats: int = 200
    num_warmup: int = 3
    """Rounds that are run first and not counted; part of the budget."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_repeats <= self.max_repeats:
            raise ConfigurationError(
                f"repeats must satisfy 1 <= min_repeats <= max_repeats, "
                f"got {self.min_repeats} and {self.max_repeats}"
            )


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing to run in each round."""

    name: str | None
    """None for preparations that are not timed."""

    run: Callable[[], object]


def time_phases(
    phases: Sequence[Phase], limits: RepeatLimits, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Run all phases in turns and time each by itself.

    Returns:
        A timing for each named phase.
    """
    times_ms: dict[str, list[float]] = {phase.name: [] for phase in phases if phase.name is not None}
    stop_s = clock() + limits.budget_s
    for round_index in range(limits.num_warmup + limits.max_repeats):
        num_repeats = round_index - limits.num_warmup
        if num_repeats >= limits.min_repeats and clock() >= stop_s:
            break
        for phase in phases:
            started_s = clock()
            phase.run()
            ended_s = clock()
            if phase.name is not None and num_repeats >= 0:
                times_ms[phase.name].append((ended_s - started_s) * MS_PER_S)
    return {name: Timing.from_repeats(times) for name, times in times_ms.items()}


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
