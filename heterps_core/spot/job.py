"""A training run with a deadline, in ticks: how much work, how much time, what starting an instance takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterps_core.errors import ConfigurationError
from heterps_core.spot.trace import TICK_SECONDS
from heterps_core.units import SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True, slots=True)
class NightlyJob:
    """Work on a fixed set of instances that start, run and end together.

    Raises:
        ConfigurationError: A value is out of its range, or not even on-demand could meet the deadline.
    """

    work_ticks: int
    """C: ticks of progress that the job needs."""

    deadline_ticks: int
    """D: from the start of the night."""

    startup_ticks: int
    """d, the changeover: from asking for instances to the first progress on them (start and reload)."""

    checkpoint_interval_ticks: int
    """An interruption loses what was done since the last one. An instance that is left on purpose saves first."""

    def __post_init__(self) -> None:
        for name in ("work_ticks", "deadline_ticks", "startup_ticks", "checkpoint_interval_ticks"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.deadline_ticks < self.work_ticks + self.startup_ticks:
            raise ConfigurationError(
                f"a deadline after {self.deadline_ticks} minutes cannot be met: {self.work_ticks} of work and "
                f"{self.startup_ticks} of start-up are needed even on demand; allow more time"
            )

    @property
    def entry_slack_ticks(self) -> int:
        """Least slack with which to start a spot instance.

        Enough for its start-up, for the loss of a whole checkpoint interval, and for the start of an
        on-demand instance after it.
        """
        return 2 * self.startup_ticks + self.checkpoint_interval_ticks


def nightly_job(
    *,
    work_hours: float,
    slack: float,
    startup_seconds: float,
    checkpoint_interval_seconds: float,
) -> NightlyJob:
    """Return a job in whole ticks; work, start-up and interval are rounded up, the deadline down.

    Args:
        work_hours: Progress that the job needs, positive.
        slack: Deadline over work, above 1.
        startup_seconds: See `NightlyJob.startup_ticks`.
        checkpoint_interval_seconds: See `NightlyJob.checkpoint_interval_ticks`.

    Raises:
        ConfigurationError: A value is out of its range, or the deadline cannot be met.

    Example:
        >>> job = nightly_job(work_hours=2, slack=1.5, startup_seconds=350, checkpoint_interval_seconds=600)
        >>> job.work_ticks, job.deadline_ticks, job.startup_ticks
        (120, 180, 6)
    """
    for name, value in (
        ("work_hours", work_hours),
        ("slack", slack),
        ("startup_seconds", startup_seconds),
        ("checkpoint_interval_seconds", checkpoint_interval_seconds),
    ):
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} must be positive, got {value}")
    work_ticks = math.ceil(work_hours * SECONDS_PER_HOUR / TICK_SECONDS)
    return NightlyJob(
        work_ticks=work_ticks,
        deadline_ticks=math.floor(round(work_ticks * slack, 6)),
        startup_ticks=math.ceil(startup_seconds / TICK_SECONDS),
        checkpoint_interval_ticks=math.ceil(checkpoint_interval_seconds / TICK_SECONDS),
    )
