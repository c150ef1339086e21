"""From "the model must be ready by 06:00" to the least throughput that a plan must have.

floor = samples of the night * epochs / (time left - what comes before training - what comes after it)
"""

from __future__ import annotations

import math
import re
import time as clock
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from heterps_core.planning.search.optimum import MAX_SECONDS
from tasks.planning import extra_costs

PLANNING_SECONDS = 60.0
"""Assumed, from the question for a floor to the launch: plans are searched, proved and simulated."""

BEFORE_TRAINING_SECONDS = PLANNING_SECONDS + extra_costs.STARTUP_SECONDS

RECORDING_SECONDS = 120.0
"""Assumed, from the end of the machines to a model that can be asked: baseline, records, registering, judging."""

EXPORTED_BYTES_PER_S = 0.25e9
"""Weights and optimizer state that the flow's host exports, hashes twice and judges in a second: 3.6 s of processor
time for 1.06 GB on one EPYC core (2026-11-26), and a second more for reading them from a bucket at 10 Gbit/s."""

INTERRUPTION_SECONDS = (
    extra_costs.CHECKPOINT_INTERVAL_SECONDS + extra_costs.RESTART_SECONDS + PLANNING_SECONDS
)
"""Most seconds that one interruption takes: what was trained since the checkpoint, the next plan, the next start."""

_TIME_OF_DAY = re.compile(r"\d{2}:\d{2}")
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """When a model must be ready, and the throughput that it asks for."""

    ready_by: str
    """As it was given, for instance "06:00"."""

    ready_at: datetime
    """In the time zone that it was meant in."""

    asked_at: datetime

    num_samples: float
    """Samples that are left to train, of all epochs."""

    training_seconds: float
    """In which they must be trained."""

    after_training_seconds: float
    """From the last step to a model that can be asked."""

    @property
    def floor_samples_per_s(self) -> float:
        """What is asked of a plan without interruptions."""
        return self.num_samples / self.training_seconds

    @property
    def spot_floor_samples_per_s(self) -> float:
        """What is asked of a plan with spot machines, so that one interruption leaves it in time; else infinite.

        One is enough: an interrupted run plans again, with what is left of the time, and on-demand machines as fast
        as those that it lost are in time then.
        """
        left_s = self.training_seconds - INTERRUPTION_SECONDS
        return self.num_samples / left_s if left_s > 0 else math.inf

    def seconds_left(self, now: datetime) -> float:
        """Return in how many seconds the last step must be done; below 0 where it is late."""
        return (
            self.ready_at.astimezone(UTC) - now.astimezone(UTC)
        ).total_seconds() - self.after_training_seconds

    def spot_until(self, samples_per_s: float) -> datetime:
        """Return until when a plan of this speed may be launched on spot and be interrupted once."""
        spare_s = self.training_seconds - self.num_samples / samples_per_s - INTERRUPTION_SECONDS
        return self.asked_at + timedelta(seconds=spare_s)

    def with_crossing(self, crossing: extra_costs.Crossing) -> Deadline:
        """Return what is left where bytes cross between regions before the first step and after the last."""
        left_s = self.training_seconds - crossing.seconds_before - crossing.seconds_after
        after_s = self.after_training_seconds + crossing.seconds_after
        # No plan reaches the floor of a time that is over.
        return replace(self, training_seconds=max(left_s, 1e-3), after_training_seconds=after_s)

    @property
    def text(self) -> str:
        """The floor and where it comes from, in one line."""
        return (
            f"floor {self.floor_samples_per_s:,.0f} samples/s, to be ready by {self.ready_by} "
            f"({self.ready_at:%Y-%m-%d %H:%M %Z})"
        )


class PlanningTime:
    """The seconds that the proofs of one planning share: of zones, of floors, with and without spot machines.

    The time begins to run when the object is made.

    Args:
        seconds: Of this process's processor time, for all proofs together, so that a busy machine cuts none short.
    """

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._ends_s = clock.process_time() + seconds
        self.num_plans = 1
        """Plans that are still to be made in this time, one for each region."""

    def share(self, num_proofs: int) -> float:
        """Return the seconds of the next proof where so many are still to be made; what one saves others have."""
        return max(self._ends_s - clock.process_time(), 0.0) / num_proofs / self.num_plans


def parse_time_of_day(text: str) -> time:
    """Read a time of day.

    Raises:
        ConfigurationError: It is none of the form HH:MM.

    Example:
        >>> parse_time_of_day("06:00")
        datetime.time(6, 0)
    """
    try:
        if _TIME_OF_DAY.fullmatch(text):
            return time.fromisoformat(text)
    except ValueError:
        pass
    raise ConfigurationError(f"ready_by must be a time of day such as 06:00, got {text!r}")


def _next_time_of_day(wanted: time, *, now: datetime, zone: ZoneInfo) -> datetime:
    """Return the first instant after `now` at which the clocks of a zone show a time of day.

    A time that is shown twice (the clocks go back) comes at its first showing that is still ahead. One that is
    skipped (the clocks go forward) comes at the moment of the change.
    """
    now = now.astimezone(UTC)
    today = now.astimezone(zone).date()
    for day in (today, today + timedelta(days=1)):
        naive = datetime.combine(day, wanted)
        earlier, later = sorted(naive.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        if _shown(earlier, zone) == naive:
            instants = [earlier, later]
        else:
            # Skipped: neither reading shows it, and the clocks change between them.
            instant = earlier
            while _shown(instant, zone) < naive:
                instant += _MINUTE
            instants = [instant]
        for instant in instants:
            if instant > now:
                return instant.astimezone(zone)
    raise AssertionError("a day later every time of day is ahead")


def deadline_for(
    ready_by: str,
    *,
    now: datetime,
    zone: ZoneInfo,
    num_samples: float,
    num_epochs: int,
    pause_share: float = 0.0,
    model_bytes: float = 0.0,
) -> Deadline:
    """Return what a deadline asks of a plan.

    Args:
        pause_share: What pauses add to the time of all steps, as a share of it.
        model_bytes: Weights and optimizer state, which one host exports after the training.

    Raises:
        InfeasiblePlanError: So little time is left that no throughput would do.
        ConfigurationError: It is no time of day.
    """
    ready_at = _next_time_of_day(parse_time_of_day(ready_by), now=now, zone=zone)
    # In UTC: two times of one zone are subtracted as their clocks show them, wrong by an hour on two nights a year.
    left_s = (ready_at.astimezone(UTC) - now.astimezone(UTC)).total_seconds()
    after_s = extra_costs.TEARDOWN_SECONDS + RECORDING_SECONDS + model_bytes / EXPORTED_BYTES_PER_S
    training_s = (left_s - BEFORE_TRAINING_SECONDS - after_s) / (1 + pause_share)
    if training_s <= 0:
        raise InfeasiblePlanError(
            "deadline",
            f"the model must be ready by {ready_at:%Y-%m-%d %H:%M %Z}, in {left_s / 60:.1f} minutes, but "
            f"{BEFORE_TRAINING_SECONDS / 60:.1f} pass before the first step and {after_s / 60:.1f} "
            f"after the last; start earlier, or move ready_by",
        )
    return Deadline(
        ready_by=ready_by,
        ready_at=ready_at,
        asked_at=now,
        num_samples=num_samples * num_epochs,
        training_seconds=training_s,
        after_training_seconds=after_s,
    )


def floor_with(deadline: Deadline | None, floor_samples_per_s: float) -> float:
    """Return the floor that holds where one was asked for beside a deadline: the larger one."""
    return floor_samples_per_s if deadline is None else max(deadline.floor_samples_per_s, floor_samples_per_s)


def floor_text(deadline: Deadline | None, floor_samples_per_s: float, *, planned_with: float = 0.0) -> str:
    """Say where the floor of a plan comes from, to follow its summary; nothing where there is no deadline.

    Args:
        planned_with: The floor of the plan, where it is raised for machines on spot.
    """
    if deadline is None:
        return ""
    if planned_with > max(floor_samples_per_s, deadline.floor_samples_per_s):
        return f"; {deadline.text}, and {planned_with:,.0f} on spot, to wait for machines and be interrupted"
    if floor_samples_per_s > deadline.floor_samples_per_s:
        return f"; floor {floor_samples_per_s:,.0f} samples/s as asked, more than ready_by {deadline.ready_by} needs"
    return f"; {deadline.text}"


@contextmanager
def explained_by(deadline: Deadline | None) -> Iterator[None]:
    """Name the deadline where a plan fails by the floor that came from it.

    Raises:
        InfeasiblePlanError: The block raised it; with what the deadline asks for and the fix.
    """
    try:
        yield
    except InfeasiblePlanError as error:
        if deadline is None:
            raise
        detail = str(error).partition(": ")[2]
        raise InfeasiblePlanError(
            error.constraint,
            f"{detail}; the floor comes from the deadline, to be ready by {deadline.ready_by} "
            f"({deadline.ready_at:%Y-%m-%d %H:%M %Z}): move ready_by, start earlier, allow faster or more device "
            f"types, or train on fewer samples",
        ) from error


def _shown(instant: datetime, zone: ZoneInfo) -> datetime:
    """Return what the clocks of a zone show at an instant."""
    return instant.astimezone(zone).replace(tzinfo=None)
