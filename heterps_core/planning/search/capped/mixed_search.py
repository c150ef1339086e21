"""The cheapest plan with up to two device types a stage, and a bound on all such plans.

A search of plans with one type a stage comes first (`capped_search.py`); its plan is the one to undercut.
Branch and bound over intervals of the longest stage time and of the latest start, in two steps each:

1. Rows of a stage are divided among types at will, and units need not be whole. A stage is then no better than the
   best of its types alone at some prices of scarce units (`scarcity_prices.py`), so few candidates bound all plans.
2. Where that bound is below the best plan, whole stages of one or two types that such a plan may have are listed
   (`mixed_columns.py`), and their cheapest partition within the caps is found by extending partial plans.

Shape legend: G = runs of layers, T = device types, n = candidates.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heterps_core.planning.cost_model.arrays import Floats, run_layers
from heterps_core.planning.cost_model.mixed_stage import PlanParts
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import LEAST_USD_PER_HOUR, segment_table
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE, is_within
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.cost_model.step_model import StepGroup, num_microbatches_of, step_groups
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, is_cpu
from heterps_core.planning.provisioning.replica_balance import FixedStages
from heterps_core.planning.search.capped.capped_chain import CappedChain
from heterps_core.planning.search.capped.capped_search import NO_PLAN, CheapestPlan
from heterps_core.planning.search.capped.feasibility import stage_time_range
from heterps_core.planning.search.capped.linear_product import LinearProduct
from heterps_core.planning.search.capped.mixed_columns import MixedColumns, RowShares, mixed_columns
from heterps_core.planning.search.capped.partial_plans import cheapest_below
from heterps_core.planning.search.capped.scarcity_prices import ascend
from heterps_core.plans.scheduling_plan import Stage

_NUM_FIRST_INTERVALS = 16

_NARROW = 1 + 1e-3
"""Longest over shortest stage time of an interval that is given up."""

_MOST_PARTIAL_PLANS = 2_048

_WORTH_WHILE = 1e-9
"""Relative gain for which stages get two device types."""


@dataclass(frozen=True, slots=True)
class _Interval:
    """Plans of some longest stage times in seconds, latest starts spread over the steps, and interruptions."""

    low: float
    high: float
    group: StepGroup
    starts: tuple[float, float]
    interruptions: tuple[float, float] = (0.0, math.inf)
    """Per hour."""


class MixedSearch:
    """Finds the cheapest plan of a problem that mixes device types.

    Args:
        best: The cheapest plan with one type a stage, and the bound on such plans.
        deadline: Of `time.process_time`, at which the search ends.
    """

    def __init__(self, problem: SchedulingProblem, best: CheapestPlan, *, deadline: float) -> None:
        self.problem, self.best, self.deadline = problem, best, deadline
        units = tuple(problem.device_types.values())
        self.objective = objective_of(problem)
        self.caps = np.array([float(unit.max_units) for unit in units])
        self.is_cpu = np.array([is_cpu(name) for name in problem.device_types])
        self.is_steady = np.array(
            [unit.on_demand_instances is None or unit.reserved is not None for unit in units]
        )
        prices = [0.0 if unit.reserved else unit.price_usd_per_hour for unit in units]
        self.least_prices = np.maximum(prices, LEAST_USD_PER_HOUR)
        self.tables = {
            group: segment_table(problem, num_microbatches=group.num_microbatches)
            for group in step_groups(problem)
        }
        # Each unit in a machine of its own, on-demand where it can be.
        one, table = np.ones_like(self.caps), replace(next(iter(self.tables.values())), sweep=None)
        first = table.at((np.zeros(one.size, dtype=np.int64), np.arange(one.size)))
        added = first.on_demand_usd_per_hour(one)
        self.highest_prices = self.caps * (first.usd_per_hour(one) + np.where(np.isfinite(added), added, 0.0))

    def run(self) -> CheapestPlan:
        """Return the cheapest plan and the bound on all."""
        order = itertools.count()
        heap = [(0.0, next(order), interval) for interval in self._first_intervals()]
        heapq.heapify(heap)
        given_up = self.best.lower_bound
        while heap and heap[0][0] < self._target() and time.process_time() < self.deadline:
            _, _, interval = heapq.heappop(heap)
            bound, stages, linear = self._bounded(interval)
            if linear is None or bound >= self._target():
                continue
            reached, start = self._offered(stages) if stages else (math.inf, math.inf)
            parts = self._parts_by_interruptions(interval, linear, bound)
            parts = parts or self._parts(interval, reached, start)
            if not parts:
                given_up = min(given_up, bound)
            for part in parts:
                heapq.heappush(heap, (bound, next(order), part))
        bound = min(given_up, heap[0][0] if heap else math.inf, self.best.product)
        return self.best._replace(lower_bound=bound)

    def stage_time_range(self) -> tuple[float, float]:
        """Return the shortest longest-stage time that any plan could have, and the longest that makes sense."""
        lows, highs = zip(*map(self._range, self.tables.values()), strict=True)
        return min(lows), max(highs)

    def reached_within(self, seconds: float) -> float:
        """Return the longest stage time of a plan that was met within so many seconds, infinite where none was."""
        for group, table in self.tables.items():
            interval = _Interval(seconds, seconds, group, (0.0, self._latest_start(table)))
            self.best = NO_PLAN
            _, stages, _ = self._bounded(interval)
            if stages:
                self._offered(stages)
            if self.best.stages:
                return float(self._evaluated(self.best.stages)[0])
        return math.inf

    def _target(self) -> float:
        return self.best.product * (1 - _WORTH_WHILE)

    def _first_intervals(self) -> list[_Interval]:
        found = []
        for group, table in self.tables.items():
            low, high = self._range(table)
            high = min(high, self.problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE))
            if low <= high:
                ends = np.geomspace(low, high, _NUM_FIRST_INTERVALS + 1)
                ends[0], ends[-1] = low, high
                starts = 0.0, self._latest_start(table)
                found += [_Interval(*each, group, starts) for each in itertools.pairwise(ends.tolist())]
        return found

    def _latest_start(self, table: StageTable) -> float:
        """Return a start that no stage exceeds."""
        starts = table.start_seconds(np.ones_like(table.memory_replicas))
        return float(starts.max())

    def _range(self, table: StageTable) -> tuple[float, float]:
        """Return the shortest longest-stage time that any plan could have, and the longest that makes sense.

        No plan beats its slowest layer on all units of all types, nor a replica of it with one row. With all rows on
        its slowest replica, no stage takes longer.
        """
        assert table.trainer is not None
        layers = np.arange(self.problem.num_layers)
        alone = layers * (layers + 3) // 2
        divided = (table.compute_seconds * table.compute_parallel_fraction)[alone]
        with np.errstate(divide="ignore"):
            together = 1 / (self.caps / divided).sum(axis=1)
        one_row = table.terms(np.array(float(table.trainer.microbatch_rows)), np.array(2.0)).compute[alone]
        low = float(np.maximum(together, one_row.min(axis=1)).max())
        all_rows = table.terms(np.array(1.0), np.array(float(table.trainer.microbatch_rows))).total
        high = float(all_rows[np.isfinite(table.memory_replicas)].max(initial=0.0))
        return low, max(high, stage_time_range(self.problem, table)[1])

    def _bounded(self, interval: _Interval) -> tuple[float, tuple[Stage, ...] | None, LinearProduct | None]:
        """Return a bound on the plans of an interval, a plan that keeps its upper end, and that plan's product."""
        table = self.tables[interval.group].ready_by(interval.starts[1])
        # Stages of two types keep no rows of tables on disk.
        shares = RowShares.of(replace(table, sweep=None), interval.high)
        single = table.least_replicas(np.array([interval.high]))[0]
        chain, linear = self._relaxed(interval, shares, single)
        if linear is None:
            return math.inf, None, None
        highest = linear.stage_prices(
            self.highest_prices * interval.high,
            self.highest_prices,
            self.caps * self.objective.interruptions_per_hour,
        )
        target = min(self._target() - linear.constant, 1.001 * float(highest.sum()))
        ascent = ascend(chain, target=target)
        if ascent.lower_bound >= target:
            return math.inf, None, None
        bound = ascent.lower_bound + linear.constant
        # What the cheapest other stages leave to a run, with scarce units charged.
        full = chain.full_prices(ascent.scarcity)
        after, before = chain.completions(full[None])[0], chain.reaching(full)
        first, last = run_layers(np.arange(len(single)))
        scarcity, of_stage = ascent.scarcity[: self.caps.size], ascent.scarcity[self.caps.size :].sum()
        spare = (
            target + float(ascent.scarcity @ chain.caps) - of_stage - before[first, 0] - after[last + 1, 0]
        )
        least = linear.stage_prices(
            interval.low * self.least_prices, self.least_prices, self.objective.interruptions_per_hour
        )
        mixed = mixed_columns(shares, spare, least + scarcity, self.is_cpu)
        if mixed is None:
            return bound, None, linear
        columns, usd_per_hour, has_steady = self._charged(
            shares, mixed, single, table.least_usd_per_hour(single)
        )
        taken = columns.taken_units(shares.table)
        interruptions = (columns.counts * self.objective.interruptions_per_hour[columns.types]).sum(axis=1)
        prices = linear.stage_prices(usd_per_hour * interval.low, usd_per_hour, interruptions)
        is_near = prices + scarcity @ taken < spare[columns.runs]
        order = np.flatnonzero(is_near)[np.argsort(columns.runs[is_near], kind="stable")]
        columns = columns.take(order)
        further, caps = [*taken[:, order], np.ones(order.size)], [*self.caps, self._most_stages(interval)]
        if self.objective.has_interruptions:
            further.append(interruptions[order])
            caps.append(linear.most_interruptions_per_hour * (1 + COMPARISON_TOLERANCE))
        if not self.is_steady.all():
            first, last = run_layers(columns.runs)
            further.append(last - first + 1.0 - has_steady[order])
            caps.append(self.problem.num_layers - 1.0)
        chain = CappedChain(
            columns.runs,
            prices=prices[order],
            units=np.ones(order.size),
            caps=np.array([float(self.problem.num_layers)]),
            num_layers=self.problem.num_layers,
            further=(np.array(further), np.array(caps)),
        )
        # Several columns have the same layers: a column is named by its place.
        chain.rows = np.arange(order.size)
        whole = ascend(chain, target=target)
        if whole.lower_bound >= target:
            return math.inf, None, None
        found = cheapest_below(
            chain,
            whole.scarcity,
            target=target,
            most_partial_plans=_MOST_PARTIAL_PLANS,
            is_over=lambda: time.process_time() >= self.deadline,
        )
        if found.rows is None and found.is_settled:
            return math.inf, None, None
        bound = max(bound, max(whole.lower_bound, found.lower_bound) + linear.constant)
        stages = None if found.rows is None else columns.stages(self.problem, found.rows[::-1])
        return bound, stages, linear

    def _most_stages(self, interval: _Interval) -> float:
        return float(interval.group.most_stages or self.problem.num_layers)

    def _relaxed(
        self, interval: _Interval, shares: RowShares, single: Floats
    ) -> tuple[CappedChain, LinearProduct | None]:
        """Return the types alone, in parts of units, and the product that adds up; None where no plan is better."""
        # Fewer whole replicas of one type may be enough, as they exchange less.
        least = np.minimum(shares.least_units, single)
        rows = np.flatnonzero(np.isfinite(least))
        types, units = rows % self.caps.size, least.reshape(-1)[rows]
        usd_per_hour = units * self.least_prices[types]
        worked = np.where(single < shares.least_units, 0.0, shares.unit_seconds).reshape(-1)[rows]
        chain = CappedChain(
            rows,
            prices=usd_per_hour,
            units=units,
            caps=self.caps,
            num_layers=self.problem.num_layers,
            further=(np.ones((1, rows.size)), np.array([self._most_stages(interval)])),
        )
        objective, hourly, least_lost, most = self.objective.later(interval.starts[0]), 0.0, 0.0, 0.0
        if objective.has_interruptions:
            hourly = chain.cheapest_of(usd_per_hour)[0] + objective.extra_usd_per_hour
            most = objective.most_interruptions_of_better(interval.low, hourly, self.best.product)
            least_lost, most = interval.interruptions[0], min(most, interval.interruptions[1])
            # An infinite price stands for no plan at all.
            if most < least_lost or math.isinf(hourly):
                return chain, None
        linear = LinearProduct(objective, interval.low, hourly, least_lost, most)
        chain.prices = linear.stage_prices(
            np.maximum(usd_per_hour * interval.low, worked * self.least_prices[types]),
            usd_per_hour,
            units * objective.interruptions_per_hour[types],
        )
        return chain, linear

    def _charged(
        self, shares: RowShares, mixed: MixedColumns, single: Floats, usd_per_hour: Floats
    ) -> tuple[MixedColumns, Floats, NDArray[np.bool_]]:
        """Return all columns with their prices, and whether a machine is on-demand.

        A stage that is all on spot is there twice, without the plan's one machine on-demand and with it.
        """
        runs, types = np.nonzero(np.isfinite(single))
        alone = MixedColumns(
            runs=runs,
            types=np.stack([types, types], axis=1),
            counts=np.stack([single[runs, types], np.zeros(runs.size)], axis=1),
        )
        columns = MixedColumns.of(alone, mixed)
        part, is_there = shares.table.at((columns.runs[:, None], columns.types)), columns.counts > 0
        prices = part.usd_per_hour(columns.counts).sum(axis=1)
        prices[: runs.size] = usd_per_hour[runs, types]
        added = np.where(is_there, part.on_demand_usd_per_hour(columns.counts), np.inf).min(axis=1)
        has_steady = (self.is_steady[columns.types] & is_there).any(axis=1)
        doubled = ~has_steady & np.isfinite(added)
        return (
            MixedColumns.of(columns, columns.take(doubled)),
            np.append(prices, (prices + added)[doubled]),
            np.append(has_steady, doubled[doubled]),
        )

    def _offered(self, stages: tuple[Stage, ...]) -> tuple[float, float]:
        """Take a plan if it is the best one; return its longest stage time and latest start."""
        reached, start, product = self._evaluated(stages)
        if product < self._target():
            self.best = CheapestPlan(stages, product, self.best.lower_bound)
        return reached, start

    def _evaluated(self, stages: tuple[Stage, ...]) -> tuple[float, float, float]:
        """Return the longest stage time, the latest start and the product by the formula, infinite beyond a limit."""
        num_microbatches = num_microbatches_of(self.problem, len(stages))
        parts = PlanParts.of(self.problem, stages, num_microbatches=num_microbatches)
        is_shared = parts.in_stage > 0
        table = replace(parts.table, memory_replicas=np.where(is_shared, 0.0, parts.table.memory_replicas))
        shared_seconds = parts.terms(table, table.pacing(parts.replicas)).total
        reached = float(np.where(is_shared, shared_seconds, table.seconds(parts.replicas)).max())
        starts = float(table.start_seconds(np.maximum(parts.in_stage, parts.replicas)).max())
        fixed = FixedStages(table=table, objective=self.objective)
        [product] = fixed._products(np.array([reached]), parts.replicas[None], starts).tolist()
        used = np.zeros(self.caps.size)
        np.add.at(used, table.type_indices, table.taken_units(parts.replicas))
        is_kept = (used <= self.caps).all() and is_within(reached, self.problem.stage_seconds_limit)
        return reached, starts, product if is_kept else math.inf

    def _parts_by_interruptions(
        self, interval: _Interval, linear: LinearProduct, bound: float
    ) -> list[_Interval]:
        """Return an interval in two where interruptions keep its bound lower than stage times do, else nothing."""
        if linear.most_over_linear(bound) <= max(math.sqrt(interval.high / interval.low), math.sqrt(_NARROW)):
            return []
        least, most = linear.least_interruptions_per_hour, linear.most_interruptions_per_hour
        middle = linear.middle_interruptions()
        return [replace(interval, interruptions=each) for each in ((least, middle), (middle, most))]

    def _parts(self, interval: _Interval, reached: float, start: float) -> list[_Interval]:
        """Return an interval in two, divided where its best plan by the linear product lies; none if it is narrow."""
        earliest, latest = interval.starts
        if interval.low < reached < interval.high:
            middle = reached
        elif earliest < start <= latest < math.inf:
            before = replace(interval, starts=(earliest, math.nextafter(start, 0.0)))
            return [before, replace(interval, starts=(start, latest))]
        else:
            middle = math.sqrt(interval.low * interval.high)
        if interval.high <= interval.low * _NARROW:
            return []
        return [replace(interval, high=math.nextafter(middle, 0.0)), replace(interval, low=middle)]
