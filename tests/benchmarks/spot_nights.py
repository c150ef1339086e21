"""What nights with a deadline would have cost on recorded spot markets, by what decides where each launch buys.

Nights begin every eleven hours of SkyPilot's traces (`shared/data/spot_traces`, not part of the project); a night has
so many unit-hours of work and so many hours for it. At its begin and after every interruption the run plans as the
flow does, `search_in_time` over units on-demand and on spot, with the time and the work that are left; where spot is
not to be had, it is waited for while there is time, then the launch is on-demand. Beside it the same without waiting,
the rule that was there before (on-demand after two losses) and on-demand alone. A unit on spot costs 0.3 of one
on-demand; all units of a pool are there or not; a launch waits for a minute of planning and two of starting, which
is paid; what was trained since the last of the checkpoints, ten minutes apart, is lost.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterps_core.errors import InfeasiblePlanError
from heterps_core.hardware import Market
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.schedulers.exact import ExactScheduler
from heterps_core.units import SECONDS_PER_HOUR
from infra.machines.failover import SPOT_RETRY_S
from infra.prices.spot_charges import with_interruptions
from tasks.planning.deadline import PLANNING_SECONDS, Deadline
from tasks.planning.extra_costs import CHECKPOINT_INTERVAL_SECONDS, STARTUP_SECONDS
from tasks.scheduling import Searches, search_in_time
from tests.benchmarks.planner import figure, show
from tests.infra.builders import offer
from tests.paths import PROJECT
from tests.tasks.builders import make_spot_problem, without_spot

TRACES = PROJECT.parent / "shared" / "data" / "spot_traces" / "skypilot"
FOLDERS = ("availability/1-node", "preemption/1-node")
SPOT_PRICE_SHARE = 0.3
MOST_UNITS = 8
JOBS = ((2.0, 2.5), (4.0, 6.0), (6.0, 3.0), (8.0, 12.0), (12.0, 2.0))
"""Unit-hours of work and hours until the deadline."""

HOURS_BETWEEN_NIGHTS = 11

[_CPU_ON_SPOT] = with_interruptions([offer(market=Market.SPOT)])
INTERRUPTIONS_PER_HOUR = _CPU_ON_SPOT.interruptions_per_hour


@dataclass(frozen=True, slots=True)
class Pool:
    """A recorded market."""

    name: str
    tick_seconds: float
    is_up: NDArray[np.bool_]

    def up_until(self, second: float) -> float:
        """Return from when on the pool is down, or `second` where it is down then."""
        tick = int(second // self.tick_seconds)
        if not self.is_up[tick]:
            return second
        down = np.flatnonzero(~self.is_up[tick:])
        return (tick + int(down[0])) * self.tick_seconds if down.size else float("inf")


@dataclass(frozen=True, slots=True)
class State:
    """Of a night, where a launch is decided."""

    work_left: float
    """Unit-seconds."""

    seconds_left: float
    num_losses: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a launch buys."""

    is_spot: bool
    num_units: int
    spare_seconds: float = 0.0
    """For which spot may be waited."""


Policy = Callable[[State], Choice]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one night."""

    usd: float
    is_late: bool
    num_losses: int


def search(problem: SchedulingProblem) -> Searches:
    """Return the proven plan."""
    result = ExactScheduler().search(problem, budget_evaluations=100, seed=0)
    return Searches(results={"exact": result}, without_plan={}, taken="exact")


def planned(state: State) -> Choice:
    """Decide as the flow does; in whole minutes, so that equal states are planned once."""
    training_s = 60.0 * (state.seconds_left // 60.0) - PLANNING_SECONDS - STARTUP_SECONDS
    return _planned(round(state.work_left / 60.0), training_s)


@cache
def _planned(work_minutes: int, training_s: float) -> Choice:
    problem = make_spot_problem(
        hours=max(work_minutes, 1) / 60,
        interruptions_per_hour=INTERRUPTIONS_PER_HOUR,
        spot_price_share=SPOT_PRICE_SHARE,
        max_units=MOST_UNITS,
    )
    asked_at = datetime(2026, 11, 22, tzinfo=UTC)
    deadline = Deadline(
        ready_by="",
        ready_at=asked_at + timedelta(seconds=training_s),
        asked_at=asked_at,
        num_samples=problem.num_samples,
        training_seconds=training_s,
    )
    if training_s <= 0:
        return Choice(False, MOST_UNITS)
    problem = replace(problem, throughput_floor_samples_per_s=deadline.floor_samples_per_s)
    try:
        _, searches = search_in_time(problem, without_spot(problem), deadline, search=search)
    except InfeasiblePlanError:
        return Choice(False, MOST_UNITS)  # too late in any case: as soon as can be
    [stage] = searches.chosen.plan.stages
    spot_until = deadline.spot_until(searches.chosen.evaluation.throughput_samples_per_s)
    spare_seconds = (spot_until - deadline.asked_at).total_seconds()
    return Choice(stage.device_type.endswith("-spot"), stage.num_replicas, spare_seconds)


def least_units(state: State) -> int:
    """Return the units with which a launch that is not interrupted is in time."""
    training_s = state.seconds_left - PLANNING_SECONDS - STARTUP_SECONDS
    return min(int(np.ceil(state.work_left / training_s)) if training_s > 0 else MOST_UNITS, MOST_UNITS)


def two_losses(state: State) -> Choice:
    """Decide by the rule that was there before: on-demand once two machines were lost."""
    return Choice(state.num_losses < 2, least_units(state))


POLICIES: dict[str, Policy] = {
    "planned": planned,
    "planned_without_waiting": lambda state: replace(planned(state), spare_seconds=0.0),
    "two_losses": two_losses,
    "on_demand": lambda state: Choice(False, least_units(state)),
}


def night(pool: Pool, begin: float, work: float, seconds: float, policy: Policy) -> Outcome:
    """Run one night; `work` in unit-seconds."""
    now, usd, losses = begin, 0.0, 0
    while work > 0:
        choice = policy(State(work, begin + seconds - now, losses))
        now += PLANNING_SECONDS
        waits_until = now + choice.spare_seconds if choice.is_spot else now
        while pool.up_until(now) == now and now + SPOT_RETRY_S < waits_until:
            now += SPOT_RETRY_S
        is_spot = choice.is_spot and pool.up_until(now) > now
        ready = now + STARTUP_SECONDS
        end = ready + work / choice.num_units
        lost_at = pool.up_until(now) if is_spot else float("inf")
        until = min(end, lost_at)
        hours = choice.num_units * (until - now) / SECONDS_PER_HOUR
        usd += hours * (SPOT_PRICE_SHARE if is_spot else 1.0)
        saved = max(until - ready, 0.0) // CHECKPOINT_INTERVAL_SECONDS * CHECKPOINT_INTERVAL_SECONDS
        work = 0.0 if end <= lost_at else work - choice.num_units * saved
        losses += choice.num_units if lost_at < end else 0
        now = until
    return Outcome(usd, now > begin + seconds, losses)


def pools() -> Iterator[Pool]:
    """Read the traces."""
    for folder in FOLDERS:
        for path in sorted((TRACES / folder).rglob("*.json.gz")):
            document = json.loads(gzip.decompress(path.read_bytes()))
            yield Pool(
                f"{path.parent.name}/{path.name.partition('.')[0]}",
                document["metadata"]["gap_seconds"],
                np.array(document["data"]) > 0,
            )


def nights_of(pool: Pool, hours: float) -> Iterator[float]:
    """Yield the begin of each night whose double time lies in the record."""
    last = (pool.is_up.size - 1) * pool.tick_seconds - 2 * hours * SECONDS_PER_HOUR
    yield from np.arange(0.0, max(last, 0.0), HOURS_BETWEEN_NIGHTS * SECONDS_PER_HOUR)


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Replay every night under every policy; nothing is drawn, so the seed does not matter."""
    if not TRACES.exists():
        raise SystemExit(f"spot_nights reads recorded traces, but there is no {TRACES}")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in POLICIES}
    for pool in pools():
        for work_hours, hours in JOBS:
            for begin in nights_of(pool, hours):
                for name, policy in POLICIES.items():
                    outcomes[name].append(
                        night(pool, begin, work_hours * SECONDS_PER_HOUR, hours * SECONDS_PER_HOUR, policy)
                    )
    figures = []
    of_on_demand = sum(each.usd for each in outcomes["on_demand"])
    for name, of_policy in outcomes.items():
        figures += [
            figure(f"cost_over_on_demand_{name}", total_usd(of_policy) / of_on_demand, "ratio", higher=False),
            figure(
                f"late_share_{name}",
                statistics.fmean(each.is_late for each in of_policy),
                "share",
                higher=False,
            ),
        ]
    show(figures, f"{len(outcomes['planned'])} nights on {len(list(pools()))} recorded markets")
    return figures


def total_usd(outcomes: Sequence[Outcome]) -> float:
    """Return the cost of all nights."""
    return sum(each.usd for each in outcomes)
