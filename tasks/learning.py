"""What past runs teach the next one: predictions that are corrected where corrections have proven themselves.

The record of runs is MLflow: each finished run carries its predicted and measured speed as a tag, and is read back
from there. Two things are learned, and neither stands in for the other. A dry run says how far predictions for this
machine are off. A run on rented machines says how far the times of their device types are off and how much longer a
step is than its slowest stage, with which the next plan is made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.errors import ConfigurationError
from heterps_core.planning.calibration.correction import (
    NO_CORRECTION,
    Correction,
    corrected_problem,
    learn_correction,
)
from heterps_core.planning.calibration.run_speed import RunSpeed, workers_text
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage
from infra.workspace import Workspace
from tasks.records.past_runs import PastRun, past_trainings

MOST_RUNS = 90
"""About a season of nights: machines and software change, and what they were is no guide for ever."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """What past runs told about predictions."""

    speeds: tuple[RunSpeed, ...] = ()
    """The oldest first."""

    def of_step(self, stages: Sequence[Stage], *, hardware: str, model: str) -> Correction:
        """Return the correction for the step time of a dry run of stages with so many workers."""
        answers = [speed.step for speed in self.speeds if speed.is_dry_run]
        return learn_correction(answers, (hardware, model, workers_text(stages)))

    def of_device_types(self, names: Sequence[str], *, model: str) -> dict[str, Correction]:
        """Return the correction for the times of each device type that was ever rented."""
        answers = [answer for speed in self.speeds for answer in speed.rented_stages]
        learned = {name: learn_correction(answers, (name, model)) for name in names}
        return {name: correction for name, correction in learned.items() if correction.num_answers}

    def of_waits(self, *, model: str) -> Correction:
        """Return the correction for a rented run's step beside its slowest stage: waits, of which no stage tells."""
        answers = [speed.waits for speed in self.speeds]
        return learn_correction([answer for answer in answers if answer is not None], ("waits", model))

    def factors(self, problem: SchedulingProblem) -> dict[str, float]:
        """Return by what past runs multiply the times of each device type of a problem, waits included."""
        learned = self.of_device_types(problem.device_type_names, model=problem.model)
        waits = self.of_waits(model=problem.model).factor
        return {name: waits * learned.get(name, NO_CORRECTION).factor for name in problem.device_type_names}

    def corrected(self, problem: SchedulingProblem) -> SchedulingProblem:
        """Return the planning problem with the times that past runs make likely."""
        return corrected_problem(problem, self.factors(problem))

    def summary(self, problem: SchedulingProblem) -> str:
        """What the plan's times were corrected by, in one line."""
        learned = self.of_device_types(problem.device_type_names, model=problem.model)
        learned |= {"waits between stages": self.of_waits(model=problem.model)}
        factors = ", ".join(f"{name} {found.factor:.3f}" for name, found in learned.items() if found.depth)
        if factors:
            return f"times of device types multiplied, as past runs have shown: {factors}"
        return f"speeds of past runs: {len(self.speeds)}; the times of device types stand as they are"


@task(name="learn from past runs", cache_policy=NO_CACHE)
def learn_from_runs(workspace: Workspace, *, run_id: str) -> Learning:
    """Read the speeds of past runs from the record; `run_id` itself, which may be resumed, is left out."""
    past = readable_past(workspace, most=MOST_RUNS)
    speeds = [run.speed for run in past if run.run_id != run_id]
    return Learning(speeds=tuple(speed for speed in speeds if speed is not None))


def readable_past(workspace: Workspace, *, most: int) -> list[PastRun]:
    """Return the newest training runs, the newest last; none where the record does not answer: no run waits."""
    try:
        return past_trainings(workspace, most=most)
    except ConfigurationError as error:
        logger.warning("past runs cannot be read now: %s", error)
        return []
