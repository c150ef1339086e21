"""Which machines a run goes on with where its fleet may change, by what the rest of its work is expected to cost.

USD = (rest of the steps * seconds of a step * stretch by interruptions + seconds to start and end) * USD per hour,

for each way by the planner's cost model at the speed that the run was measured at; the whole plan is searched again
by the exact solver, warm with the present one. What is late or beyond a cap is taken only where all else is, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from heterps_core.cluster import Cluster
from heterps_core.errors import InfeasiblePlanError, ProvisioningError
from heterps_core.planning.calibration import with_scaled_times
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.units import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from tasks.planning.deadline import PLANNING_SECONDS
from tasks.planning.extra_costs import STARTUP_SECONDS, TEARDOWN_SECONDS
from tasks.provisioning import Provisioning
from tasks.running.replacement import plans_of_fleet, smaller

RESUME_SECONDS = 10.0
"""Assumed, from a loss to the next step of machines that stay; 3 to 6 were seen (`tests/benchmarks/elastic.py`)."""

REPLAN_SECONDS = 10.0
"""Most time of a search whose answer only says what another plan would cost; all machines wait for it."""

WORTH_A_REPLAN = 0.95
"""Other machines must cost at most this share of going on: ending those that are at hand may find no others."""


class Way(StrEnum):
    """How a run goes on."""

    STAY = "stay"
    REPLACE = "replace"
    SHRINK = "shrink"
    GROW = "grow"
    REPLAN = "re-plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to go on, and what it leads to."""

    way: Way
    seconds: float = math.inf
    """Until the last step."""

    usd: float = math.inf
    """From now on; with what was paid before, it is held against the cap of the run."""

    refusal: str = ""
    """Why it cannot be; empty where it can."""

    stages: tuple[Stage, ...] = ()
    """Of another plan."""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.way}: {self.refusal}"
        return f"{self.way} {self.usd:.4g} USD and {self.seconds / SECONDS_PER_MINUTE:.1f} min"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """What is left of a run where its fleet may change."""

    problem: SchedulingProblem
    """Of the samples that are left, with times as they were measured."""

    seconds_left: float = math.inf
    """Until the last step must be done."""

    usd_left: float = math.inf
    """Below the cap of the run."""

    @classmethod
    def of(
        cls, problem: SchedulingProblem, *, share_left: float, slowness: float = 1.0, **limits: float
    ) -> Rest:
        """Return what is left of a planned job.

        Args:
            share_left: Of its samples, above 0.
            slowness: Seconds of a step as measured over those that were planned.
            limits: `seconds_left` and `usd_left`.
        """
        rest = replace(problem, num_samples=problem.num_samples * share_left)
        return cls(problem=with_scaled_times(rest, dict.fromkeys(problem.device_types, slowness)), **limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """All ways to go on, the best first."""

    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option | None:
        """The best way; None where there is none."""
        return next((option for option in self.options if not option.refusal), None)

    @property
    def reason(self) -> str:
        """What was decided and why, in one line."""
        name = "nothing" if self.chosen is None else self.chosen.way
        return f"{name}, of {', '.join(map(str, self.options))}"


def decide(options: Sequence[Option], rest: Rest) -> Decision:
    """Order the ways to go on: possible ones before others, in time and within the cap, then by USD.

    Where none is in time, the one that is done first is best; equal ways stand in the order in which they are given.
    """

    def rank(option: Option) -> tuple[float, ...]:
        if option.refusal:
            return (2.0,)
        if option.seconds > rest.seconds_left or option.usd > rest.usd_left:
            return (1.0, option.seconds)
        return (0.0, option.usd / (WORTH_A_REPLAN if option.way is Way.REPLAN else 1.0))

    return Decision(options=tuple(sorted(options, key=rank)))


def decide_on_loss(
    rest: Rest,
    provisioning: Provisioning,
    cluster: Cluster,
    lost_ids: Collection[str],
    *,
    refused: Mapping[Way, str],
    without: Collection[str] = (),
) -> Decision:
    """Decide how a fleet goes on that has lost machines.

    Where those that are left can train, they do so until others are up, or to the end; else they wait for them.

    Args:
        provisioning: What was bought, at the prices of now; what stays is paid at those of its launch.
        refused: Ways that were tried, and why they failed.
        without: Device types that cannot be had.
    """
    options = [Option(way=way, refusal=why) for way, why in refused.items()]
    options.append(with_plan(rest, provisioning.launch_stages, without=without))
    kept_usd_per_hour = sum(
        node.price_usd_per_hour + node.disk_usd_per_hour
        for node in cluster.nodes
        if node.node_id not in lost_ids
    )
    way, start_seconds = Way.REPLACE, STARTUP_SECONDS
    try:
        left = smaller(provisioning, cluster, lost_ids)
    except ProvisioningError as problem:
        shrunk = Option(way=Way.SHRINK, refusal=str(problem))
    else:
        shrunk = _with_purchase(rest, left, Way.SHRINK, RESUME_SECONDS, kept_usd_per_hour, provisioning)
        if not shrunk.refusal:
            way, start_seconds = Way.GROW, RESUME_SECONDS + seconds_to_grow(rest, left, provisioning)
    options.append(shrunk)
    if kept_usd_per_hour == 0:
        options.append(Option(way=way, refusal="no machine of the fleet is left"))
    elif way not in refused:
        bought = plans_of_fleet(provisioning, cluster)[0].only(lost_ids)
        usd_per_hour = (
            kept_usd_per_hour + bought.price_usd_per_hour + len(lost_ids) * bought.disk_usd_per_hour
        )
        options.append(_with_purchase(rest, provisioning, way, start_seconds, usd_per_hour, provisioning))
    return decide(options, rest)


def decide_on_growth(
    rest: Rest,
    *,
    now: Provisioning,
    cluster: Cluster,
    planned: Provisioning,
    whole: Cluster,
    refused: Mapping[Way, str],
    without: Collection[str] = (),
) -> Decision:
    """Decide whether a fleet that shrank stays as it is.

    Args:
        now: What the cluster was bought by.
        planned: What was bought before it shrank.
        whole: The cluster as it is with the machines that it lacks in their places.
        refused: As in `decide_on_loss`, like `without`.
    """
    present = {node.node_id for node in cluster.nodes}
    missing = [node.node_id for node in whole.nodes if node.node_id not in present]
    usd_per_hour = cluster.price_usd_per_hour
    options = [
        _with_purchase(rest, now, Way.STAY, 0.0, usd_per_hour, now),
        with_plan(rest, now.launch_stages, without=without),
        *(Option(way=way, refusal=why) for way, why in refused.items()),
    ]
    if Way.GROW not in refused:
        usd_per_hour += plans_of_fleet(planned, whole)[0].only(missing).price_usd_per_hour
        start_seconds = seconds_to_grow(rest, now, planned)
        options.append(_with_purchase(rest, planned, Way.GROW, start_seconds, usd_per_hour, now))
    return decide(options, rest)


def seconds_to_grow(rest: Rest, present: Provisioning, grown: Provisioning) -> float:
    """Return the seconds of the grown fleet's work that are lost until it is there, as the present one trains."""
    speeds = [
        evaluate(rest.problem, fleet.launch_stages).throughput_samples_per_s for fleet in (present, grown)
    ]
    return RESUME_SECONDS + STARTUP_SECONDS * max(1 - speeds[0] / speeds[1], 0.0)


def _with_purchase(
    rest: Rest,
    bought: Provisioning,
    way: Way,
    start_seconds: float,
    price_usd_per_hour: float,
    present: Provisioning,
) -> Option:
    return with_fleet(
        rest,
        bought.launch_stages,
        way=way,
        start_seconds=start_seconds,
        price_usd_per_hour=price_usd_per_hour,
        interruptions_per_hour=bought.launch_plan.interruptions_per_hour,
        present=present.launch_stages,
    )


def with_fleet(
    rest: Rest,
    stages: Sequence[Stage],
    *,
    way: Way,
    start_seconds: float,
    price_usd_per_hour: float,
    interruptions_per_hour: float,
    present: Sequence[Stage],
) -> Option:
    """Return what going on with machines for these stages costs.

    Args:
        start_seconds: Until the first step; all machines are paid meanwhile.
        price_usd_per_hour: Of all machines.
        interruptions_per_hour: Of all machines.
        present: Stages before the change; what the plan's model refuses of them (a dry run has fewer workers than the
            plan) is no ground to refuse others.
    """
    evaluation = evaluate(rest.problem, stages)
    # That the floor is missed, the deadline tells.
    known = {(each.constraint, each.subject) for each in evaluate(rest.problem, present).violations}
    for violation in evaluation.violations:
        if (
            violation.constraint != "throughput floor"
            and (violation.constraint, violation.subject) not in known
        ):
            return Option(way=way, refusal=str(violation))
    seconds = start_seconds + evaluation.run_seconds * float(
        objective_of(rest.problem).stretch(interruptions_per_hour)
    )
    hourly_usd = price_usd_per_hour + rest.problem.extra_costs.storage_usd_per_hour
    return Option(way=way, seconds=seconds, usd=(seconds + TEARDOWN_SECONDS) / SECONDS_PER_HOUR * hourly_usd)


def with_plan(rest: Rest, present: Sequence[Stage], *, without: Collection[str] = ()) -> Option:
    """Return what ending all machines and launching the best plan for the rest costs.

    Args:
        present: A plan to begin the search with.
        without: Device types that cannot be had.
    """
    training_s = rest.seconds_left - PLANNING_SECONDS - STARTUP_SECONDS
    if training_s <= 0:
        return Option(way=Way.REPLAN, refusal="no time is left to launch")
    problem = without_types(rest.problem, without)
    if problem is None:
        return Option(way=Way.REPLAN, refusal="no device type is left that could be had")
    total = problem.num_samples * problem.num_epochs
    floor = 0.0 if math.isinf(training_s) else total * (1 + problem.pause_share) / training_s
    problem = replace(problem, throughput_floor_samples_per_s=floor)
    known = present if all(stage.device_type in problem.device_types for stage in present) else ()
    try:
        optimum = find_optimum(problem, seconds=REPLAN_SECONDS, known=known)
    except InfeasiblePlanError as error:
        return Option(way=Way.REPLAN, refusal=str(error).partition(";")[0])
    evaluation = evaluate(problem, optimum.stages)
    stretch = float(objective_of(problem).stretch(evaluation.interruptions_per_hour))
    seconds = PLANNING_SECONDS + STARTUP_SECONDS + evaluation.run_seconds * stretch
    return Option(way=Way.REPLAN, seconds=seconds, usd=optimum.cost_usd, stages=optimum.stages)


def without_types(problem: SchedulingProblem, names: Collection[str]) -> SchedulingProblem | None:
    """Return a problem without some device types; None where none is left."""
    kept = [name for name in problem.device_types if name not in names]
    if not kept:
        return None
    layers = tuple(
        replace(
            layer,
            compute_seconds={name: layer.compute_seconds[name] for name in kept},
            communication_seconds={name: layer.communication_seconds[name] for name in kept},
            compute_relative_spread={
                name: spread for name, spread in layer.compute_relative_spread.items() if name in kept
            },
        )
        for layer in problem.layers
    )
    return replace(problem, layers=layers, device_types={name: problem.device_types[name] for name in kept})
