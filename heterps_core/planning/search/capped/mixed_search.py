"""The cheapest plan whose stages may have two device types, and a bound on all of them.

A search of plans whose stages have one type each comes first (`capped_search.py`); its plan is the one to undercut.
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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints, run_layers
from heterps_core.planning.cost_model.mixed_stage import PlanParts
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import LEAST_USD_PER_HOUR, segment_layers, segment_table
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

_NARROW = 1 + 1e-5
"""Longest over shortest stage time of an interval that is given up."""

_MOST_PARTIAL_PLANS = 2_048

_WORTH_WHILE = 1e-9
"""Relative gain for which stages get two device types."""


@dataclass(frozen=True, slots=True)
class _Interval:
    """Plans of some longest stage times, in seconds, and latest starts, spread over the steps."""

    low: float
    high: float
    group: StepGroup
    starts: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Candidate stages, by rising run; arrays of shape (n,)."""

    runs: Ints
    replicas: Sequence[dict[str, int]]
    chain: CappedChain


class MixedSearch:
    """Finds the cheapest plan of a problem that mixes device types.

    Args:
        best: The cheapest plan whose stages have one type each, and the bound on those.
        deadline: Of `time.process_time`, at which the search ends.
    """

    def __init__(self, problem: SchedulingProblem, best: CheapestPlan, *, deadline: float) -> None:
        self.problem, self.best, self.deadline = problem, best, deadline
        self.units = tuple(problem.device_types.values())
        self.objective = objective_of(problem)
        self.caps = np.array([float(unit.max_units) for unit in self.units])
        self.tables: dict[StepGroup, StageTable] = {}
        for group in step_groups(problem):
            self.tables[group] = segment_table(problem, num_microbatches=group.num_microbatches)
        self.least_prices = np.array(
            [
                LEAST_USD_PER_HOUR if unit.reserved else max(unit.price_usd_per_hour, LEAST_USD_PER_HOUR)
                for unit in self.units
            ]
        )

    def run(self) -> CheapestPlan:
        """Return the cheapest plan and the bound on all."""
        order = itertools.count()
        heap = [(0.0, next(order), interval) for interval in self._first_intervals()]
        heapq.heapify(heap)
        given_up = self.best.lower_bound
        while heap and heap[0][0] < self._target() and time.process_time() < self.deadline:
            _, _, interval = heapq.heappop(heap)
            bound, stages = self._bounded(interval)
            if bound >= self._target():
                continue
            reached, start = self._offered(stages) if stages else (math.inf, math.inf)
            parts = self._parts(interval, reached, start)
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
            _, stages = self._bounded(interval)
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

    def _bounded(self, interval: _Interval) -> tuple[float, tuple[Stage, ...] | None]:
        """Return a bound on the plans of an interval, and a plan whose stages keep its upper end."""
        table = self.tables[interval.group].ready_by(interval.starts[1])
        # Stages of two types keep no rows of tables on disk.
        shares = RowShares.of(replace(table, sweep=None), interval.high)
        single = table.least_replicas(np.array([interval.high]))[0]
        relaxed = self._relaxed(interval, shares, single)
        linear = self._linear(interval, relaxed)
        if linear is None:
            return math.inf, None
        units, usd_seconds = relaxed
        chain = self._relaxed_chain(interval, units, self._stage_prices(linear, units, usd_seconds))
        target = min(self._target() - linear.constant, self._highest_price(table, linear, interval.high))
        ascent = ascend(chain, target=target)
        bound = ascent.lower_bound + linear.constant
        if ascent.lower_bound >= target:
            return math.inf, None
        # What the cheapest other stages leave to a run, with scarce units charged.
        full = chain.full_prices(ascent.scarcity)
        after, before = chain.completions(full[None])[0], chain.reaching(full)
        first, last = run_layers(np.arange(len(units)))
        spare = target + float(ascent.scarcity @ chain.caps) - before[first, 0] - after[last + 1, 0]
        scarcity, of_stage = ascent.scarcity[: self.caps.size], ascent.scarcity[self.caps.size :].sum()
        columns = self._columns(
            interval, shares, (single, table.least_usd_per_hour(single)), linear, spare - of_stage, scarcity
        )
        if columns is None:
            return bound, None
        whole = ascend(columns.chain, target=target)
        if whole.lower_bound >= target:
            return math.inf, None
        found = cheapest_below(
            columns.chain,
            whole.scarcity,
            target=target,
            most_partial_plans=_MOST_PARTIAL_PLANS,
            is_over=lambda: time.process_time() >= self.deadline,
        )
        bound = max(bound, max(whole.lower_bound, found.lower_bound) + linear.constant)
        if found.rows is None:
            return (math.inf if found.is_settled else bound), None
        stages = tuple(
            Stage(*segment_layers(int(columns.runs[row])), "any", 1).on(columns.replicas[row])
            for row in found.rows[::-1].tolist()
        )
        return bound, stages

    def _relaxed(self, interval: _Interval, shares: RowShares, single: Floats) -> tuple[Floats, Floats]:
        """Return the units of each type alone that a stage takes at least, and USD x seconds; shape (G, T)."""
        divided = shares.least_units
        # Fewer replicas of one type alone may be enough, as they exchange less.
        units = np.minimum(divided, single)
        worked = np.minimum(shares.unit_seconds, np.where(single < divided, single * interval.low, np.inf))
        return units, self.least_prices * np.maximum(
            units * interval.low, np.where(np.isfinite(units), worked, np.inf)
        )

    def _highest_price(self, table: StageTable, linear: LinearProduct, seconds: float) -> float:
        """Return a linear product that no plan within the caps exceeds."""
        one = np.ones(self.caps.size)
        part = table.at((np.zeros(self.caps.size, dtype=np.int64), np.arange(self.caps.size)))
        added = part.on_demand_usd_per_hour(one)
        hourly = self.caps * (
            replace(part, sweep=None).usd_per_hour(one) + np.where(np.isfinite(added), added, 0.0)
        )
        interruptions = self.caps @ self.objective.interruptions_per_hour
        prices = linear.stage_prices(hourly.sum() * seconds, hourly.sum(), interruptions)
        return 1.001 * float(prices)

    def _stage_prices(self, linear: LinearProduct, units: Floats, usd_seconds: Floats) -> Floats:
        with np.errstate(invalid="ignore"):  # stages that are not possible
            interruptions = units * self.objective.interruptions_per_hour
            return linear.stage_prices(usd_seconds, units * self.least_prices, interruptions)

    def _relaxed_chain(self, interval: _Interval, units: Floats, prices: Floats) -> CappedChain:
        rows = np.flatnonzero(np.isfinite(units) & np.isfinite(prices))
        return CappedChain(
            rows,
            prices=prices.reshape(-1)[rows],
            units=units.reshape(-1)[rows],
            caps=self.caps,
            num_layers=self.problem.num_layers,
            further=self._stage_limit(interval, rows.size),
        )

    def _stage_limit(self, interval: _Interval, size: int) -> tuple[Floats, Floats]:
        most = interval.group.most_stages or self.problem.num_layers
        return np.ones((1, size)), np.array([float(most)])

    def _linear(self, interval: _Interval, relaxed: tuple[Floats, Floats]) -> LinearProduct | None:
        """Return a product that adds up over stages; None where no plan is better."""
        objective = self.objective.later(interval.starts[0])
        if not objective.has_interruptions:
            return LinearProduct(objective, interval.low, 0.0, 0.0, 0.0)
        units, _ = relaxed
        chain = self._relaxed_chain(interval, units, units * self.least_prices)
        price, _ = chain.cheapest_of(chain.prices)
        hourly = price + objective.extra_usd_per_hour
        most = objective.most_interruptions_of_better(interval.low, hourly, self.best.product)
        return None if most < 0 else LinearProduct(objective, interval.low, hourly, 0.0, most)

    def _columns(
        self,
        interval: _Interval,
        shares: RowShares,
        single: tuple[Floats, Floats],
        linear: LinearProduct,
        spare: Floats,
        scarcity: Floats,
    ) -> _Columns | None:
        """Return the stages that a better plan may have; None for too many."""
        least = self._stage_prices(linear, np.ones(self.caps.size), interval.low * self.least_prices)
        kinds = np.array([is_cpu(name) for name in self.problem.device_types])
        mixed = mixed_columns(shares, spare, least + scarcity, kinds)
        if mixed is None:
            return None
        replicas, usd_per_hour = single
        alone_runs, alone_types = np.nonzero(np.isfinite(replicas))
        alone = MixedColumns(
            runs=alone_runs,
            types=np.stack([alone_types, alone_types], axis=1),
            counts=np.stack([replicas[alone_runs, alone_types], np.zeros(alone_runs.size)], axis=1),
        )
        runs, types, counts = (
            np.concatenate([getattr(alone, name), getattr(mixed, name)])
            for name in ("runs", "types", "counts")
        )
        part = shares.table.at((runs[:, None], types))
        prices, added = (
            part.usd_per_hour(counts),
            np.where(counts > 0, part.on_demand_usd_per_hour(counts), np.inf),
        )
        is_steady = np.array(
            [unit.on_demand_instances is None or unit.reserved is not None for unit in self.units]
        )
        has_steady = (is_steady[types] & (counts > 0)).any(axis=1)
        # A stage that is all on spot may have the plan's one machine on-demand.
        doubled = np.flatnonzero(~has_steady & np.isfinite(added.min(axis=1)))
        chosen = np.concatenate([np.arange(runs.size), doubled])
        hourly = prices.sum(axis=1)
        hourly[: alone_runs.size] = usd_per_hour[alone_runs, alone_types]
        hourly = hourly[chosen]
        hourly[runs.size :] += added.min(axis=1)[doubled]
        has_steady = np.append(has_steady, np.ones(doubled.size, dtype=bool))
        runs, types, counts = runs[chosen], types[chosen], counts[chosen]
        usd_seconds = np.maximum(hourly * interval.low, self._worked_usd(shares, runs, types, counts))
        interruptions = (counts * self.objective.interruptions_per_hour[types]).sum(axis=1)
        stage_prices = linear.stage_prices(usd_seconds, hourly, interruptions)
        taken = np.zeros((self.caps.size, runs.size))
        for index in range(2):
            units = shares.table.at((runs, types[:, index])).taken_units(counts[:, index])
            np.add.at(taken, (types[:, index], np.arange(runs.size)), units)
        is_near = stage_prices + scarcity @ taken < spare[runs]
        order = np.flatnonzero(is_near)[np.argsort(runs[is_near], kind="stable")]
        further = [(row[order], cap) for row, cap in zip(taken, self.caps.tolist(), strict=True)]
        further += [(each, cap) for (each,), (cap,) in [self._stage_limit(interval, order.size)]]
        if not is_steady.all():
            first, last = run_layers(runs[order])
            further.append((last - first + 1.0 - has_steady[order], self.problem.num_layers - 1.0))
        chain = CappedChain(
            runs[order],
            prices=stage_prices[order],
            units=np.ones(order.size),
            caps=np.array([float(self.problem.num_layers)]),
            num_layers=self.problem.num_layers,
            further=(np.array([each for each, _ in further]), np.array([cap for _, cap in further])),
        )
        # Several columns have the same layers: a column is named by its place.
        chain.rows = np.arange(order.size)
        names = self.problem.device_type_names
        replicas_by_type = [
            {names[kind]: int(count) for kind, count in zip(*each, strict=True) if count}
            for each in zip(types[order].tolist(), counts[order].tolist(), strict=True)
        ]
        return _Columns(runs[order], replicas_by_type, chain)

    def _worked_usd(self, shares: RowShares, runs: Ints, types: Ints, counts: Floats) -> Floats:
        """Return USD x seconds of the work of stages, of which the cheaper type does all that it can."""
        at = runs[:, None], types
        usd = np.where(counts > 0, shares.unit_seconds[at] * self.least_prices[types], np.inf)
        most = np.minimum(counts * shares.rows[at] / shares.num_rows, 1.0)
        cheaper = usd.argmin(axis=1)[:, None]
        part = np.take_along_axis(most, cheaper, axis=1)[:, 0]
        low, high = usd.min(axis=1), np.where(np.isfinite(usd.max(axis=1)), usd.max(axis=1), 0.0)
        of_two = part * low + (1 - part) * high
        return np.where((counts > 0).all(axis=1) & np.isfinite(of_two), of_two, 0.0)

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
