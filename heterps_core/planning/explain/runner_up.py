"""The next best plan: the cheapest one that places at least one layer on another device type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterps_core.planning.explain.placement import Move, device_type_of_layers, moves_between
from heterps_core.planning.explain.variants import SAME_COST, cheapest_plan, with_layer_seconds
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.units import SECONDS_PER_HOUR

FARTHEST_FACTOR = 20.0
"""Plans that cost more than this many times the cheapest one are not looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """The cheapest plan with another placement."""

    stages: tuple[Stage, ...]
    cost_usd: float
    extra_usd: float
    """Over the cheapest plan."""

    moves: tuple[Move, ...]
    """What is placed elsewhere than in the cheapest plan."""


def find_runner_up(problem: SchedulingProblem, stages: Sequence[Stage], cost_usd: float) -> RunnerUp | None:
    """Return the cheapest plan that differs from the optimum in the device type of at least one layer.

    Exact: such a plan avoids the optimum's device type for some layer, and for each layer the cheapest plan that
    avoids it is found. One such search for each layer, fewer where one of them costs as little as the optimum.

    Args:
        problem: What is planned.
        stages: The cheapest plan.
        cost_usd: What it costs.

    Returns:
        None where every other placement costs over `FARTHEST_FACTOR` times as much, or breaks a constraint.
    """
    best: RunnerUp | None = None
    # Only plans more expensive than the limit keep the layer where it is made too slow to be.
    limit_usd = FARTHEST_FACTOR * cost_usd
    for layer, device_type in enumerate(device_type_of_layers(stages)):
        if best is not None and best.extra_usd <= SAME_COST * cost_usd:
            break  # a tie cannot be undercut
        seconds = _unaffordable_seconds(problem, device_type, limit_usd)
        found = cheapest_plan(with_layer_seconds(problem, layer, device_type, seconds))
        if found is None or found.cost_usd > (best.cost_usd if best else limit_usd):
            continue
        moves = moves_between(stages, found.stages)
        if moves:
            best = RunnerUp(
                stages=found.stages,
                cost_usd=found.cost_usd,
                extra_usd=found.cost_usd - cost_usd,
                moves=moves,
            )
    return best


def _unaffordable_seconds(problem: SchedulingProblem, device_type: str, limit_usd: float) -> float:
    """Return the compute time of one layer with which any plan costs more than the limit.

    The stage of that layer alone costs price * k * CT(k) for each batch, and k * CT(k) = OCT * B/B_o * (k - alpha
    (k - 1)) is least at k = 1. So OCT = limit / (price * steps * B/B_o) is enough.
    """
    unit = problem.device_types[device_type]
    batches = problem.num_steps * problem.batch_size / problem.profile_batch_size
    return limit_usd * SECONDS_PER_HOUR / (unit.price_usd_per_hour * batches)
