"""How a run goes on that has lost machines, or lacks some: one rule, by the expected cost of the rest of its work.

USD = (rest of the steps * seconds of a step * stretch by interruptions + seconds to start and end) * USD per hour,

for each way by the planner's cost model at the speed that the run was measured at. The exact solver plans the rest
again. A way that is late or beyond a cap is taken only where all others are, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from heterps_core.errors import InfeasiblePlanError, ProvisioningError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.units import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from tasks.planning.deadline import PLANNING_SECONDS
from tasks.planning.extra_costs import STARTUP_SECONDS, TEARDOWN_SECONDS
from tasks.running.fleet import Fleet

_RESUME_SECONDS = 10.0
"""Assumed, from a change of the fleet to the next step of machines that stay; 3 to 6 were seen
(`tests/benchmarks/elastic.py`)."""

_REPLAN_SECONDS = 10.0
"""Most time of a search whose answer only says what another plan would cost; all machines wait for it."""

_WORTH_A_REPLAN = 0.95
"""Other machines must cost at most this share of going on: no others may be available once these are terminated."""


class Way(StrEnum):
    """How a run goes on."""

    KEEP = "keep"
    """The machines that are left train on."""

    REPLACE = "replace"
    """Missing machines are launched; the others train meanwhile, where they can."""

    REPLAN = "re-plan"
    """All machines are terminated, and the rest is planned again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    """One way to go on, and its expected end."""

    way: Way
    seconds: float = math.inf
    """Until the last step."""

    usd: float = math.inf
    """From now on."""

    refusal: str = ""
    """Why it is impossible; empty where it is possible."""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.way}: {self.refusal}"
        return f"{self.way} {self.usd:.4g} USD and {self.seconds / SECONDS_PER_MINUTE:.1f} min"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """The rest of a run."""

    problem: SchedulingProblem
    """The planning problem of the samples that are left, with times as they were measured."""

    seconds_left: float = math.inf
    """Until the last step must be done."""

    usd_left: float = math.inf
    """Below the cap of the run."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """All ways to go on, the best first."""

    options: tuple[_Option, ...]

    @property
    def way(self) -> Way | None:
        """The best way; None where there is none."""
        return next((option.way for option in self.options if not option.refusal), None)

    @property
    def reason(self) -> str:
        """The best way among all, in one line."""
        return f"{self.way or 'nothing'}, of {', '.join(map(str, self.options))}"

    def can(self, way: Way) -> bool:
        """Return whether a way is possible."""
        return any(option.way is way and not option.refusal for option in self.options)


def decide(
    rest: Rest,
    wanted: Fleet,
    missing: Collection[str],
    *,
    is_training: bool,
    refused: Mapping[Way, str],
    without: Collection[str] = (),
) -> _Decision:
    """Order the ways to go on: possible ones first, then those in time and within the cap, then by USD.

    Where none is in time, the one that ends first is best; equal ways stand in the order keep, replace, re-plan.

    Args:
        wanted: The fleet with its missing machines, at the prices of its purchase; machines that live are
            paid at the prices of their launch.
        missing: Ids of the missing machines.
        is_training: The others train meanwhile.
        refused: Ways that were tried, and why they failed.
        without: Device types that are not available.
    """
    resume_seconds = 0.0 if is_training else _RESUME_SECONDS
    kept = [node for node in wanted.cluster.nodes if node.node_id not in missing]
    kept_usd_per_hour = sum(node.price_usd_per_hour + node.disk_usd_per_hour for node in kept)
    start_seconds = STARTUP_SECONDS
    try:
        left = wanted.without(missing)
    except ProvisioningError as problem:
        keep = _Option(way=Way.KEEP, refusal=str(problem))
    else:
        keep = _with_fleet(rest, left, Way.KEEP, resume_seconds, kept_usd_per_hour, known=wanted)
        if not keep.refusal:
            lost_share = max(1 - _speed(rest, left) / _speed(rest, wanted), 0.0)
            start_seconds = resume_seconds + _RESUME_SECONDS + STARTUP_SECONDS * lost_share
    options = [_Option(way=Way.KEEP, refusal=refused[Way.KEEP]) if Way.KEEP in refused else keep]
    refusal = refused.get(Way.REPLACE, "" if kept else "no machine of the fleet is left")
    if refusal:
        options.append(_Option(way=Way.REPLACE, refusal=refusal))
    else:
        bought = wanted.plans[0].only(missing)
        usd_per_hour = bought.price_usd_per_hour + bought.disk_usd_per_hour
        options.append(
            _with_fleet(
                rest, wanted, Way.REPLACE, start_seconds, kept_usd_per_hour + usd_per_hour, known=wanted
            )
        )
    options.append(_with_plan(rest, wanted, without=without))

    def rank(option: _Option) -> tuple[float, ...]:
        if option.refusal:
            return (2.0,)
        if option.seconds > rest.seconds_left or option.usd > rest.usd_left:
            return (1.0, option.seconds)
        return (0.0, option.usd / (_WORTH_A_REPLAN if option.way is Way.REPLAN else 1.0))

    return _Decision(tuple(sorted(options, key=rank)))


def _speed(rest: Rest, fleet: Fleet) -> float:
    return evaluate(rest.problem, fleet.bought.launch_stages).throughput_samples_per_s


def _with_fleet(
    rest: Rest, fleet: Fleet, way: Way, start_seconds: float, price_usd_per_hour: float, *, known: Fleet
) -> _Option:
    """Return the cost of the rest on a fleet at a price of all its machines.

    Args:
        start_seconds: Until the first step; all machines are paid meanwhile.
        known: A fleet that trained. What the cost model refuses of it (a dry run has fewer workers than the plan) is
            no reason to refuse others.
    """
    evaluation = evaluate(rest.problem, fleet.bought.launch_stages)
    violations = evaluate(rest.problem, known.bought.launch_stages).violations
    accepted = {(each.constraint, each.subject) for each in violations}
    for violation in evaluation.violations:
        # The deadline stands for the floor.
        if (
            violation.constraint != "throughput floor"
            and (violation.constraint, violation.subject) not in accepted
        ):
            return _Option(way=way, refusal=str(violation))
    interruptions_per_hour = fleet.bought.launch_plan.interruptions_per_hour
    stretch = float(objective_of(rest.problem).stretch(interruptions_per_hour))
    seconds = start_seconds + evaluation.run_seconds * stretch
    hourly_usd = price_usd_per_hour + rest.problem.extra_costs.storage_usd_per_hour
    return _Option(way=way, seconds=seconds, usd=(seconds + TEARDOWN_SECONDS) / SECONDS_PER_HOUR * hourly_usd)


def _with_plan(rest: Rest, present: Fleet, *, without: Collection[str]) -> _Option:
    """Return the cost of the best plan for the rest, whose search begins with the present one."""
    training_s = rest.seconds_left - PLANNING_SECONDS - STARTUP_SECONDS
    if training_s <= 0:
        return _Option(way=Way.REPLAN, refusal="no time is left to launch")
    left = rest.problem.device_types.keys() - set(without)
    if not left:
        return _Option(way=Way.REPLAN, refusal="no device type is left that is available")
    problem = rest.problem.of_types(left)
    total = problem.num_samples * problem.num_epochs
    problem = replace(problem, throughput_floor_samples_per_s=total * (1 + problem.pause_share) / training_s)
    stages = present.bought.launch_stages
    known = stages if all(stage.replicas_by_type.keys() <= left for stage in stages) else ()
    try:
        optimum = find_optimum(problem, seconds=_REPLAN_SECONDS, known=known)
    except InfeasiblePlanError as error:
        return _Option(way=Way.REPLAN, refusal=str(error).partition(";")[0])
    evaluation = evaluate(problem, optimum.stages)
    stretch = float(objective_of(problem).stretch(evaluation.interruptions_per_hour))
    start_seconds = STARTUP_SECONDS + evaluation.start_seconds
    seconds = PLANNING_SECONDS + start_seconds + evaluation.run_seconds * stretch
    return _Option(way=Way.REPLAN, seconds=seconds, usd=optimum.cost_usd)
