"""Why a plan is the cheapest, what would change it, and what more throughput costs: one noun for all of it.

The explanation is about the cheapest plan. Where the chosen plan is more expensive, as a heuristic's may be,
the explanation says by how much and what it places elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from heterps_core.hardware import hardware_name
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.planning.cost_model.evaluation import StageEvaluation, evaluate
from heterps_core.planning.explain.changes import (
    FloorPrice,
    PriceFlip,
    PriceOfThroughput,
    next_price_flip,
    out_of_reach,
    price_of_floor,
    price_of_throughput,
)
from heterps_core.planning.explain.placement import Move, moves_between
from heterps_core.planning.explain.reasons import (
    OtherPlan,
    RunnerUp,
    TypeRole,
    find_nearest,
    find_roles,
    find_runner_up,
)
from heterps_core.planning.explain.variants import SAME_COST
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import Optimum, find_optimum
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.units import SAMPLES_PER_MILLION

MORE_THROUGHPUT = 1.1

MAX_RUNS_FOR_FULL = 2_200
"""Runs of layers times device types up to which a plan is explained in full unasked: 32 layers x 4 types are 2,112.
The example night over all device types has 3,240 and takes four times as long in full."""


class Detail(StrEnum):
    """How much is explained."""

    SHORT = "short"
    """What a handful of searches tells: reasons, the price of the floor and of more throughput, spreads of times."""

    FULL = "full"
    """All; one search for each layer, several for each device type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanExplanation(JsonDocument):
    """What is known about the cheapest plan besides itself."""

    json_form = JsonForm(version=5)

    detail: Detail
    """Where it is `SHORT`, the parts that say so are empty because they were not looked for."""

    stages: tuple[Stage, ...]
    """The cheapest plan: the chosen one, unless that is more expensive."""

    cost_usd: float
    cost_lower_bound_usd: float
    usd_per_million_samples: float
    throughput_samples_per_s: float
    chosen_extra_usd: float
    """What the chosen plan costs more; 0 where it is the cheapest."""

    chosen_moves: tuple[Move, ...]
    roles: tuple[TypeRole, ...]
    floor_price: FloorPrice | None
    """None where the floor costs nothing."""

    ten_percent_more: PriceOfThroughput
    spreads: Mapping[str, float]
    """By quantity, hardware in use and origin of its times: their largest spread as a share; exact times are left
    out."""

    runner_up: RunnerUp | None
    """Only in full; None where no other placement comes near."""

    price_flips: tuple[PriceFlip, ...]
    """The next one by price; only in full, and empty where no price that is near enough changes the placement."""

    reading_limit: str = ""
    """How reading rows limits the slowest stage, for people; empty where it does not."""

    nearest: tuple[OtherPlan, ...] = ()
    """Without each processor and card of the plan, the nearest first."""

    not_rentable: OtherPlan | None = None
    """A cheaper plan with device types that have no machine image; None where there is none."""

    region: str = ""
    """Where the machines are, the nearest region that lost, and what crosses, for people; empty where all is in one
    region that alone was asked for."""


def default_detail(problem: SchedulingProblem) -> Detail:
    """Return how much can be explained in about a second."""
    num_runs = problem.num_layers * (problem.num_layers + 1) // 2 * len(problem.device_types)
    return Detail.FULL if num_runs <= MAX_RUNS_FOR_FULL else Detail.SHORT


def explain_plan(
    problem: SchedulingProblem,
    chosen: Sequence[Stage],
    *,
    detail: Detail,
    proven_usd: float = 0.0,
    not_rentable: OtherPlan | None = None,
    region: str = "",
) -> PlanExplanation:
    """Explain a plan by what other problems, each changed in one thing, would make of it.

    Args:
        proven_usd: A cost that no plan undercuts; where the chosen plan reaches it, no cheaper one is searched.
        not_rentable: A cheaper plan with device types that have no machine image.
        region: Where the machines are and why, for people.
    """
    chosen_usd = evaluate(problem, chosen).cost_usd
    if chosen_usd <= proven_usd * (1 + SAME_COST):
        optimum = Optimum(stages=tuple(chosen), cost_usd=chosen_usd, cost_lower_bound_usd=proven_usd)
    else:
        optimum = find_optimum(problem)
    is_cheapest = chosen_usd <= optimum.cost_usd * (1 + SAME_COST)
    stages = tuple(chosen) if is_cheapest else optimum.stages
    evaluation = evaluate(problem, stages)
    cost_usd, throughput = evaluation.cost_usd, evaluation.throughput_samples_per_s
    is_full = detail is Detail.FULL
    flip = next_price_flip(problem, stages) if is_full else None
    # A plan on free units costs its time alone, so that the cheapest is the fastest.
    extra = problem.extra_costs
    is_free = extra.machine_usd_per_hour + extra.storage_usd_per_hour > 0 and not any(
        unit.price_usd_per_hour or unit.interruptions_per_hour for unit in problem.device_types.values()
    )
    if not is_free or optimum.cost_lower_bound_usd < cost_usd * (1 - SAME_COST):
        more = price_of_throughput(problem, MORE_THROUGHPUT * throughput, cost_usd)
    else:
        more = out_of_reach(MORE_THROUGHPUT * throughput, highest_samples_per_s=throughput)
    return PlanExplanation(
        detail=detail,
        stages=stages,
        cost_usd=cost_usd,
        cost_lower_bound_usd=min(optimum.cost_lower_bound_usd, cost_usd),
        usd_per_million_samples=cost_usd / (problem.num_epochs * problem.num_samples) * SAMPLES_PER_MILLION,
        throughput_samples_per_s=throughput,
        chosen_extra_usd=0.0 if is_cheapest else chosen_usd - cost_usd,
        chosen_moves=moves_between(chosen, stages),
        roles=find_roles(problem, evaluation),
        floor_price=price_of_floor(problem, cost_usd),
        ten_percent_more=more,
        spreads=_spreads(problem, dict.fromkeys(name for stage in stages for name in stage.replicas_by_type)),
        runner_up=find_runner_up(problem, stages, cost_usd) if is_full else None,
        price_flips=() if flip is None else (flip,),
        reading_limit=_reading_limit(problem, evaluation.bottleneck),
        nearest=find_nearest(problem, stages, cost_usd),
        not_rentable=not_rentable,
        region=region,
    )


def _reading_limit(problem: SchedulingProblem, part: StageEvaluation) -> str:
    if not part.is_limited_by_reading:
        return ""
    stage, rows_per_s = part.stage, problem.batch_size / part.reading_seconds / part.stage.num_replicas
    return (
        f"limits layers {stage.first_layer}..{stage.last_layer} on {stage.device_types}: the core that reads for "
        f"each worker reaches {rows_per_s:,.0f} rows/s"
    )


def _spreads(problem: SchedulingProblem, used: Collection[str]) -> dict[str, float]:
    """Return the largest spread of times of the device types in use, by quantity and hardware.

    Hardware is as fast in both markets.
    """
    spreads: dict[str, float] = {}
    for name in used:
        unit = problem.device_types[name]
        computing = max(layer.compute_relative_spread.get(name, 0.0) for layer in problem.layers)
        hardware, origin = hardware_name(name), f" ({unit.times_from})" if unit.times_from else ""
        for key, spread in (
            (f"computing on {hardware}{origin}", computing),
            (f"communication on {hardware}", unit.communication_relative_spread),
        ):
            spreads[key] = max(spread, spreads.get(key, 0.0))
    return {key: spread for key, spread in spreads.items() if spread > 0}
