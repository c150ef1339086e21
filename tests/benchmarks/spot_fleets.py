"""How much of the machines' time fleets on recorded spot markets train for good, by what decides where some are lost.

A fleet is a machine on-demand, where workers meet, and as many on spot as a trace mostly has (at most sixteen). Every
eleven hours of a trace a run of eleven hours begins, as soon as its fleet can be had, whose deadline asks for every
machine at all times. Where the market falls below the fleet, machines are lost; what goes on is decided by the code
of the run: `decide_on_loss`, `Growth` with `decide_on_growth`, and the budget of restarts. A launch takes two
minutes, a next generation ten seconds; a loss comes without notice and undoes what was trained since the last
checkpoint.

Goodput is what was trained for good over what the whole fleet would have trained. The clairvoyant knows the trace:
it loses nothing, its machines start as soon as the market has them, and it only pays for each change of size. Two
rules beside it end all machines at a loss and launch as many as can be had: one stays with them until the next
loss, the other starts again, too, where more can be had.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterps_core.cluster import Cluster
from heterps_core.hardware import Market
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.units import SECONDS_PER_HOUR
from infra.machines.failover import SPOT_RETRY_S
from infra.prices.spot_charges import with_interruptions
from infra.providers.base import InsufficientCapacityError
from tasks.planning.deadline import PLANNING_SECONDS
from tasks.planning.extra_costs import STARTUP_SECONDS, checkpoint_interval_seconds
from tasks.provisioning import Provisioning
from tasks.running.fleet_decision import (
    RESUME_SECONDS,
    Decision,
    Rest,
    Way,
    decide_on_growth,
    decide_on_loss,
    without_types,
)
from tasks.running.growth import Growth
from tasks.running.losses import restart_budget
from tasks.running.replacement import smaller
from tests.benchmarks.planner import figure, show
from tests.infra.builders import offer
from tests.paths import PROJECT
from tests.tasks.builders import SPOT_PROBLEM_TYPES, bought, cluster_of, look_and_decide, make_spot_problem

[_CPU_ON_SPOT] = with_interruptions([offer(market=Market.SPOT)])
INTERRUPTIONS_PER_HOUR = _CPU_ON_SPOT.interruptions_per_hour

TRACES = PROJECT.parent / "shared" / "data" / "spot_traces"
MOST_ON_SPOT = 16
HOURS = 11.0
SHARES = 50
"""Decisions are kept; what is left of work and time is rounded up for them."""


@dataclass(frozen=True, slots=True)
class Trace:
    """How many machines a market has: `counts[i]` from `times[i]` seconds on, to the last of them."""

    name: str
    times: NDArray[np.float64]
    counts: NDArray[np.int64]

    def count(self, second: float) -> int:
        """Return how many machines there are."""
        return int(self.counts[np.searchsorted(self.times, second, side="right") - 1])

    def first(self, second: float, is_wanted: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> float:
        """Return from when on a count is wanted, at `second` or later; infinite where none is."""
        now = int(np.searchsorted(self.times, second, side="right")) - 1
        found = np.flatnonzero(is_wanted(self.counts[now:]))
        return max(float(self.times[now + found[0]]), second) if found.size else float("inf")

    def typical(self) -> int:
        """Return the median of its counts over the time in which it has any."""
        order = np.argsort(self.counts[:-1])
        held = np.cumsum(np.where(self.counts[:-1] > 0, np.diff(self.times), 0.0)[order])
        return int(self.counts[:-1][order][np.searchsorted(held, held[-1] / 2)])


@dataclass
class Run:
    """One run on a trace, as far as it has come."""

    trace: Trace
    begin: float
    num_on_spot: int
    """Of the whole fleet."""

    end: float
    """Of the time that it has."""

    now: float = field(init=False)
    present: int = field(init=False)
    """Machines on spot that train."""

    trained: float = field(default=0.0, init=False)
    """Machine-seconds that are kept."""

    num_losses: int = field(default=0, init=False)
    was_given_up: bool = field(default=False, init=False)
    """The budget of restarts was used up, and a person would have to go on."""

    _losses_at: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.now, self.present = self.begin + STARTUP_SECONDS, self.num_on_spot

    @property
    def left(self) -> tuple[float, float]:
        """Work and time that are left, rounded up, as shares of a run of so many hours."""
        work_s = (self.end - self.begin) - self.trained / (1 + self.num_on_spot)
        shares = [SHARES * left_s / (HOURS * SECONDS_PER_HOUR) for left_s in (work_s, self.end - self.now)]
        return math.ceil(shares[0]) / SHARES, math.ceil(shares[1]) / SHARES

    def lost_at(self) -> float:
        """Return when the market falls below the fleet next."""
        return self.trace.first(self.now, lambda counts: counts < self.present)

    def train(self, until: float, *, is_lost: bool) -> None:
        """Train from now on; a loss undoes what is behind the last checkpoint."""
        seconds = max(min(until, self.end) - self.now, 0.0)
        if is_lost:
            interval_s = checkpoint_interval_seconds(INTERRUPTIONS_PER_HOUR * self.num_on_spot)
            seconds = seconds // interval_s * interval_s
        self.trained += (1 + self.present) * seconds
        self.now = max(until, self.now)

    def lose(self) -> int:
        """Lose what the market has not any more; return how many machines."""
        lost = self.present - min(self.present, self.trace.count(self.now))
        self.present -= lost
        self.num_losses += 1
        self._losses_at = [at for at in self._losses_at if self.now - at < SECONDS_PER_HOUR] + [self.now]
        budget = restart_budget(None, interruptions_per_hour=INTERRUPTIONS_PER_HOUR * self.num_on_spot)
        self.was_given_up = len(self._losses_at) > budget
        return lost


@cache
def fleet(num_on_spot: int) -> tuple[Provisioning, Cluster]:
    """Return what a whole fleet was bought by, and its cluster."""
    provisioning = bought(
        num_on_spot + 1, markets=(Market.ON_DEMAND, Market.SPOT), types=SPOT_PROBLEM_TYPES[1:]
    )
    groups = tuple(
        replace(group, offer=with_interruptions([group.offer])[0])
        for group in provisioning.launch_plan.groups
    )
    plan = replace(provisioning.launch_plan, groups=groups)
    provisioning = replace(provisioning, launch_plan=plan, cloud_plan=plan)
    return provisioning, cluster_of(provisioning)


def ids(first: int, last: int) -> list[str]:
    """Return the node ids of machines on spot; 0 is the one on-demand."""
    return [f"stage0-node{number}" for number in range(first + 1, last + 1)]


def rest_of(num_on_spot: int, left: tuple[float, float]) -> Rest:
    """Return what is left of a run that asks for the whole fleet until its deadline."""
    problem = make_spot_problem(
        hours=HOURS * (num_on_spot + 1),
        interruptions_per_hour=INTERRUPTIONS_PER_HOUR,
        max_units=num_on_spot + 1,
    )
    on_spot = without_types(problem, SPOT_PROBLEM_TYPES[:1])
    assert on_spot is not None
    share_left, time_left = left
    return Rest.of(on_spot, share_left=share_left, seconds_left=time_left * HOURS * SECONDS_PER_HOUR)


@cache
def after_loss(num_on_spot: int, before: int, after: int, left: tuple[float, float]) -> Way | None:
    """Decide as the run does."""
    provisioning, whole = fleet(num_on_spot)
    absent = ids(before, num_on_spot)
    cluster = whole.next_generation(without=absent)
    if absent:
        provisioning = smaller(provisioning, whole, absent)
    rest = rest_of(num_on_spot, left)
    decision = decide_on_loss(rest, provisioning, cluster, ids(after, before), refused={})
    return None if decision.chosen is None else decision.chosen.way


@cache
def about_growth(num_on_spot: int, present: int, left: tuple[float, float], refused: str) -> Decision:
    """Decide as the run does."""
    provisioning, whole = fleet(num_on_spot)
    absent = ids(present, num_on_spot)
    return decide_on_growth(
        rest_of(num_on_spot, left),
        now=smaller(provisioning, whole, absent),
        cluster=whole.next_generation(without=absent),
        planned=provisioning,
        whole=whole,
        refused={Way.GROW: refused} if refused else {},
        without=SPOT_PROBLEM_TYPES if refused else (),
    )


def as_decided(run: Run, folder: RunDirectory) -> None:
    """Go on as the run does: with the machines that are left, which look for others now and then."""
    next_look = float("inf")
    while run.now < run.end and not run.was_given_up:
        lost_at = run.lost_at()
        until = min(lost_at, next_look, run.end)
        run.train(until, is_lost=lost_at == until)
        if run.now >= run.end:
            return
        if lost_at == until:
            before = run.present
            lost = run.lose()
            way = after_loss(run.num_on_spot, before, before - lost, run.left)
            assert way in (Way.SHRINK, Way.GROW), way
            run.now += RESUME_SECONDS
            next_look = run.now
            continue
        growth = Growth(
            folder,
            num_missing=run.num_on_spot - run.present,
            decide=lambda refused: about_growth(
                run.num_on_spot, run.present, run.left, refused.get(Way.GROW, "")
            ),
            launch=lambda count: launched(run, count),
        )
        with growth:
            look_and_decide(growth)
        next_look = run.now + SPOT_RETRY_S
        if growth.grown is not None:
            ready = run.now + STARTUP_SECONDS
            lost_at = run.lost_at()
            run.train(min(lost_at, ready), is_lost=lost_at < ready)
            # The flow follows no training while machines start: a loss is seen behind it.
            run.now = ready
            run.present = len(growth.grown[0].nodes) - 1
            if lost_at >= ready:
                run.now += RESUME_SECONDS
            next_look = run.now if run.present < run.num_on_spot else float("inf")


def launched(run: Run, count: int) -> tuple[Cluster, Provisioning]:
    """Launch machines where the market has them."""
    if run.trace.count(run.now) < run.present + count:
        raise InsufficientCapacityError(f"{count} machines cannot be had")
    provisioning, whole = fleet(run.num_on_spot)
    absent = ids(run.present + count, run.num_on_spot)
    return whole.next_generation(without=absent), smaller(provisioning, whole, absent)


def restarted(run: Run, *, grows: bool) -> None:
    """End all machines at a loss, and where more can be had if it `grows`; launch as many as there are."""
    while run.now < run.end:
        lost_at, more_at = run.lost_at(), float("inf")
        if grows and run.present < run.num_on_spot:
            more_at = run.trace.first(run.now, lambda counts: counts > run.present)
        until = min(lost_at, max(more_at, run.now + SPOT_RETRY_S), run.end)
        run.train(until, is_lost=lost_at == until)
        if run.now < run.end:
            run.num_losses += lost_at == until
            run.now += PLANNING_SECONDS
            run.present = min(run.num_on_spot, run.trace.count(run.now))
            run.now += STARTUP_SECONDS


POLICIES: dict[str, Callable[[Run, RunDirectory], None]] = {
    "as_decided": as_decided,
    "restart_all": lambda run, _: restarted(run, grows=False),
    "restart_all_and_grow": lambda run, _: restarted(run, grows=True),
}


def clairvoyant(trace: Trace, begin: float, end: float, num_on_spot: int) -> float:
    """Return the most machine-seconds that can be trained where the trace is known.

    Between two changes of the market the size stays. A machine trains once the market has had it for as long as it
    takes to start, and all machines pay for a change of size: `best[k]` are the machine-seconds behind which k train.
    """
    changes = trace.times[(trace.times > begin) & (trace.times < end)]
    edges = np.unique(np.concatenate([[begin], changes, changes + STARTUP_SECONDS, [end]]))
    edges = edges[(edges >= begin + STARTUP_SECONDS) & (edges <= end)]
    edges = np.concatenate([[begin + STARTUP_SECONDS], edges])
    sizes = np.arange(num_on_spot + 1)
    best = np.where(sizes == num_on_spot, 0.0, -np.inf)
    for now, then in itertools.pairwise(edges):
        first = np.searchsorted(trace.times, now - STARTUP_SECONDS, side="right") - 1
        started = trace.counts[first : np.searchsorted(trace.times, then)].min()
        changed = best.max() - RESUME_SECONDS * (1 + sizes)
        best = np.maximum(best, changed) + (then - now) * (1 + sizes)
        best[sizes > started] = -np.inf
    return float(best.max())


def traces() -> Iterator[Trace]:
    """Read the records of more than one machine."""
    for path in sorted(TRACES.rglob("*")):
        if path.suffix == ".gz" and path.parts[-3] != "1-node":
            document = json.loads(gzip.decompress(path.read_bytes()))
            counts = document["data"]
            times = np.arange(len(counts)) * document["metadata"]["gap_seconds"]
        elif path.suffix == ".json":
            rows = json.loads(path.read_text())
            times, counts = [row["Time"] for row in rows], [row["GPUs"] for row in rows]
        elif path.name == "p3-trace.csv":
            events = list(csv.reader(path.open()))
            times = [float(at) / 1_000 for at, _, _ in events]
            counts = list(itertools.accumulate({"add": 1, "remove": -1}[event] for _, event, _ in events))
        elif path.suffix == ".csv":
            rows = list(csv.reader(path.open()))
            unit_s = 1.0 if "-us-east-" in path.name else SECONDS_PER_HOUR
            times, counts = [float(at) * unit_s for at, _ in rows], [int(count) for _, count in rows]
        elif path.suffix == ".txt":
            rows = [line.split(", ") for line in path.read_text().splitlines()]
            times = [datetime.fromisoformat(f"{day} {time}").timestamp() for day, time, _ in rows]
            counts = [int(count) for *_, count in rows]
        else:
            continue
        yield Trace(path.name.partition(".")[0][:40], *steps(times, counts))


def steps(times: Sequence[float], counts: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return when the count changes from the begin of a record on, and to what; the last row is its end.

    Of several rows of one moment the last counts; a row that is dated before an earlier one counts from that on.
    """
    at = np.maximum.accumulate(np.asarray(times, float))
    is_last = np.append(np.diff(at) > 0, True)
    at, held = at[is_last] - at[0], np.asarray(counts)[is_last]
    changes = np.append(True, np.diff(held) != 0)
    changes[-1] = True
    return at[changes], held[changes]


def times_of_runs(trace: Trace, num_on_spot: int) -> Iterator[tuple[float, float]]:
    """Yield when runs begin and end; the first has at most four fifths of a short record."""
    seconds = min(HOURS * SECONDS_PER_HOUR, 0.8 * trace.times[-1])
    for nominal in np.arange(0.0, trace.times[-1], seconds):
        begin = trace.first(float(nominal), lambda counts: counts >= num_on_spot)
        is_had = trace.first(begin, lambda counts: counts < num_on_spot) > begin + STARTUP_SECONDS
        if begin < nominal + seconds and begin + seconds <= trace.times[-1] and is_had:
            yield begin, begin + seconds


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Replay all runs; nothing is drawn, so the seed does not matter."""
    if not TRACES.exists():
        raise SystemExit(f"spot_fleets reads recorded traces, but there is no {TRACES}")
    trained = dict.fromkeys((*POLICIES, "clairvoyant", "whole_fleet"), 0.0)
    logging.getLogger("tasks").setLevel(logging.WARNING)
    num_runs = num_losses = num_given_up = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunDirectory(temporary)
        for trace in traces():
            num_on_spot = min(trace.typical(), MOST_ON_SPOT)
            of_trace = dict.fromkeys(trained, 0.0)
            for begin, end in times_of_runs(trace, num_on_spot):
                num_runs += 1
                of_trace["clairvoyant"] += clairvoyant(trace, begin, end, num_on_spot)
                of_trace["whole_fleet"] += (1 + num_on_spot) * (end - begin)
                for name, policy in POLICIES.items():
                    replayed = Run(trace, begin, num_on_spot, end)
                    policy(replayed, folder)
                    of_trace[name] += replayed.trained
                    if name == "as_decided":
                        num_losses += replayed.num_losses
                        num_given_up += replayed.was_given_up
            if of_trace["whole_fleet"]:
                goodputs = {name: value / of_trace["whole_fleet"] for name, value in of_trace.items()}
                row = ", ".join(f"{name} {value:.3f}" for name, value in goodputs.items())
                print(f"{trace.name:<40} 1+{num_on_spot:<3}{row}", flush=True)
            for name, value in of_trace.items():
                trained[name] += value
    figures = [
        figure(f"goodput_{name}", trained[name] / trained["whole_fleet"], "share")
        for name in (*POLICIES, "clairvoyant")
    ]
    figures += [
        figure(f"goodput_over_{name}", trained["as_decided"] / trained[name], "ratio")
        for name in ("clairvoyant", "restart_all", "restart_all_and_grow")
    ]
    figures += [
        figure("losses", num_losses, "losses", higher=False),
        figure("runs_given_up", num_given_up, "runs", higher=False),
    ]
    show(figures, f"{num_runs} runs of {HOURS:.0f} hours")
    return figures
