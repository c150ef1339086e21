"""The cheapest plan within the caps, with a bound that is valid whenever the search ends.

Branch and bound over intervals of the longest stage time. With the replicas that the upper end wants, charged for
the lower end, every plan of an interval costs at least what it seems to, so the capped partition
(`capped_partition.py`) bounds them all. The interval of the least bound comes next: it is divided where its width is
what keeps the bound low, else its partial plans are searched. Stages that no better plan has are struck out for all
parts of an interval. Where interruptions are charged, intervals are divided by them as well.

By the trainer's step the number of micro-batches grows with the stages. An interval begins with all plans, with the
fewest replicas that any of these numbers wants, and is divided into plans of few stages and the rest. More
micro-batches want more replicas as a rule, but not always: where a replica fewer has rows, less of its traffic is
counted as crossing.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.stage_table import (
    StageTable,
    segment_layers,
    segment_row,
    segment_table,
)
from heterps_core.planning.cost_model.step_model import StepGroup
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import LayerRun, fixed_stages
from heterps_core.planning.provisioning.stage_time_search import RateSolutions, StageTimeOptimum
from heterps_core.planning.search.capped_partition import (
    MAX_PARTIAL_PLANS,
    CappedChain,
    ascend,
    cheapest_below,
    without_hopeless,
)
from heterps_core.planning.search.cheapest_hull import LinearProduct
from heterps_core.planning.search.window_search import WindowSearch
from heterps_core.plans.scheduling_plan import Stage

MAX_STEPS = 100_000
"""Intervals that are looked at before a search without a deadline gives up its proof."""

_NUM_FIRST_INTERVALS = 16
"""So many are looked at even where the time is over and no plan was met."""

_FIRST_PARTIAL_PLANS = 64
"""Kept in the first search of an interval; four times as many in each further one."""

_NEAR = (0.0099, 1e-3, 0.0)
"""Relative distances from the best plan that are proven one after the other."""

_SEARCHED, _NARROW_WHERE_FAR, _NARROW, _NARROWEST = 1.03, 1.005, 1 + 1e-3, 1 + 1e-9
"""Longest over shortest stage time of an interval: where its partial plans are searched; where they no longer are
while the best plan is far from the bound; where it is given up after them; where it is not divided further."""

_FIRST_REACH = 0.01
"""How far above the bound partial plans are searched first, relatively; twice as far each further time."""

_FAR = 0.03
"""Relative distance of the best plan from a bound from which on a better plan is wanted first."""

_STEPS_WITHOUT_PLAN = 64
"""After which it is asked whether any plan keeps the caps at all."""

_SAME_PRODUCT = 1.002
"""True product over the linear one from which on an interval is divided by interruptions."""

_SWEEPS = 40
"""Of a search for a better plan alone."""


_HANDED_ON = ["bound", "low", "high", "group", "is_rest", "rows", "scarcity", "partitions", "interruptions"]
"""What the parts of an interval have from it."""


@dataclass(order=True, slots=True)
class _Interval:
    """Plans of a longest stage time in [low, high] and so many micro-batches."""

    bound: float
    """No such plan's product is less."""

    order: int
    """Decides where bounds are equal."""

    low: float = field(compare=False)
    high: float = field(compare=False)
    group: int = field(compare=False)
    is_rest: bool = field(compare=False)
    """Whether plans of all further groups are meant too."""

    rows: Ints = field(compare=False)
    """What stages they may have."""

    scarcity: Floats = field(compare=False)
    """Prices of scarce units to begin with; empty for none."""

    partitions: tuple[Ints, ...] = field(compare=False, default=())
    """Rows of those that the prices of scarce units came from."""

    chain: CappedChain | None = field(compare=False, default=None)
    """None where the bound comes from the interval that it is part of."""

    constant: float = field(compare=False, default=0.0)
    factor: float = field(compare=False, default=1.0)
    """A partition of price p has the product (p + constant) * factor at least."""

    interruptions: tuple[float, float] = field(compare=False, default=(0.0, math.inf))
    """Per hour, of the plans that are meant."""

    nearest: Ints | None = field(compare=False, default=None)
    """Rows of the cheapest plan with scarce units charged."""

    linear: LinearProduct | None = field(compare=False, default=None)
    """What the bound takes for the product; None where that adds up over stages by itself."""

    most_partial_plans: int = field(compare=False, default=_FIRST_PARTIAL_PLANS)
    reach: float = field(compare=False, default=_FIRST_REACH)
    """How far above the bound its partial plans are searched next, relatively."""


class CappedSearch:
    """Finds the cheapest plan of a problem.

    Args:
        problem: The problem.
        groups: Of `step_groups`, those whose plans are meant.
        known: A plan to begin with, if it keeps all constraints.
        deadline: Of `time.perf_counter`, at which the search ends; infinite for none.
        most_steps: Intervals that are looked at before the search ends.
    """

    def __init__(
        self,
        problem: SchedulingProblem,
        groups: Sequence[StepGroup],
        *,
        known: Sequence[Stage] = (),
        deadline: float = np.inf,
        most_steps: int = MAX_STEPS,
    ) -> None:
        self.problem, self.groups, self.deadline, self.most_steps = problem, groups, deadline, most_steps
        self.objective = objective_of(problem)
        self.best: tuple[Stage, ...] | None = None
        self.product = np.inf
        self._tables: dict[int, StageTable] = {}
        self._heap: list[_Interval] = []
        self._given_up = np.inf
        self._num_pushed = self._num_evaluated = self._num_dives = self._num_steps = 0
        self._tried: set[bytes] = set()
        self._random = np.random.default_rng(0)
        self._best_rows = np.empty(0, dtype=np.int64)
        self.names = problem.device_type_names
        if known:
            self._try_stages(known)

    def table(self, group: int) -> StageTable:
        """Return the candidate stages of a group."""
        if group not in self._tables:
            self._tables[group] = segment_table(
                self.problem, num_microbatches=self.groups[group].num_microbatches
            )
        return self._tables[group]

    def run(self) -> StageTimeOptimum[tuple[Stage, ...]]:
        """Return the cheapest plan and the bound."""
        ranges = [stage_time_range(self.problem, self.table(group)) for group in range(len(self.groups))]
        low_seconds = ranges[0][0]
        limit_seconds = self.problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE)
        high_seconds = min(max(high for _, high in ranges), limit_seconds)
        if low_seconds <= high_seconds:
            ends = np.geomspace(low_seconds, high_seconds, _NUM_FIRST_INTERVALS + 1)
            ends[0], ends[-1] = low_seconds, high_seconds
            rows = np.arange(self.table(0).compute_seconds.size)
            for low, high in zip(ends[-2::-1].tolist(), ends[:0:-1].tolist(), strict=True):
                self._push(_Interval(0.0, 0, low, high, 0, len(self.groups) > 1, rows, np.empty(0)))
        for near in _NEAR:
            while self._heap and self._heap[0].bound * (1 + near) < self.product * (1 - COMPARISON_TOLERANCE):
                is_over = self._is_over() or self._num_steps >= self.most_steps
                if is_over and (self.best is not None or self._num_steps >= _NUM_FIRST_INTERVALS):
                    break
                self._num_steps += 1
                if self._num_steps == _STEPS_WITHOUT_PLAN and self.best is None:
                    met = self._feasible_rows(high_seconds)
                    if met is not None and not met.size:
                        return StageTimeOptimum(plan=None, product=np.inf, lower_bound=np.inf)
                    if met is not None:
                        self._try(met)
                self._step(heapq.heappop(self._heap), self.product / (1 + near))
        bound = min(self._given_up, self._heap[0].bound if self._heap else np.inf)
        return StageTimeOptimum(plan=self.best, product=self.product, lower_bound=min(bound, self.product))

    def _feasible_rows(self, seconds: float) -> Ints | None:
        """Return a plan that keeps the caps at the longest stage time; empty where there is none, None where open."""
        half = (time.perf_counter() + self.deadline) / 2
        is_open = False
        for index, group in enumerate(self.groups):
            search = FeasibilitySearch(self.table(index), most_stages=group.most_stages, deadline=half)
            rows, _ = search.plan_within(seconds)
            if rows is not None and rows.size:
                return rows[np.argsort(rows // len(self.names))]
            is_open |= rows is None
        return None if is_open else np.empty(0, dtype=np.int64)

    def _is_over(self) -> bool:
        return time.perf_counter() >= self.deadline

    def _push(self, interval: _Interval) -> None:
        self._num_pushed += 1
        interval.order = self._num_pushed
        if math.isfinite(interval.bound) and interval.low <= interval.high:
            heapq.heappush(self._heap, interval)

    def _step(self, interval: _Interval, target: float) -> None:
        """Improve the bound of an interval, or replace it by its parts."""
        if interval.chain is None:
            self._evaluate(interval)
            self._push(interval)
            return
        if interval.is_rest:
            self._push(self._part(interval, is_rest=False))
            group = interval.group + 1
            is_rest = group + 1 < len(self.groups)
            self._push(self._part(interval, group=group, is_rest=is_rest))
            return
        z = self.objective.shift_seconds
        ratio = (interval.high + z) / (interval.low + z)
        if self._split_interruptions(interval, ratio):
            return
        is_narrow = ratio <= _NARROWEST
        may_search = interval.most_partial_plans <= MAX_PARTIAL_PLANS
        if interval.bound * (1 + _FAR) < self.product and ratio > _NARROW_WHERE_FAR:
            # It is a better plan that is wanted: rather look at more stage times than at more partial plans.
            may_search = (
                interval.most_partial_plans == _FIRST_PARTIAL_PLANS and interval.reach <= 2 * _FIRST_REACH
            )
            if ratio <= _SEARCHED and self._num_dives <= self._num_steps / 8:
                self._dive(interval)
                self._push(interval)
                return
        is_first = interval.most_partial_plans == _FIRST_PARTIAL_PLANS
        is_near = is_first and interval.bound * (1 + _FIRST_REACH) >= target
        if may_search and (
            is_narrow or (ratio <= _SEARCHED and (is_near or interval.bound * ratio < target))
        ):
            self._search(interval, target)
            return
        if is_narrow or (not may_search and ratio <= _NARROW):
            self._given_up = min(self._given_up, interval.bound)
            return
        middle = math.sqrt(interval.low * interval.high)
        if math.isfinite(target):
            enough = (interval.low + z) * target / interval.bound * (1 + 1e-9) - z
            middle = min(middle, max(enough, interval.low * _NARROWEST))
        self._split(interval, middle)

    def _split(self, interval: _Interval, middle: float) -> None:
        below = math.nextafter(middle, 0.0)
        self._push(self._part(interval, high=below))
        upper = self._part(interval, low=middle)
        if not self.objective.weighs_differently_over_time:
            upper.chain, upper.constant, upper.nearest = interval.chain, interval.constant, interval.nearest
            upper.factor = middle + self.objective.shift_seconds
            upper.bound = interval.bound * upper.factor / interval.factor
            upper.most_partial_plans = interval.most_partial_plans
        self._push(upper)

    def _part(self, interval: _Interval, **changes: object) -> _Interval:
        values = {name: getattr(interval, name) for name in _HANDED_ON}
        return _Interval(order=0, **(values | changes))

    def _evaluate(self, interval: _Interval) -> None:
        """Bound the plans of an interval by prices on scarce units."""
        self._num_evaluated += 1
        table = self.table(interval.group)
        whole = interval.rows.size == table.compute_seconds.size
        part = table if whole else table.take(interval.rows)
        group = self.groups[interval.group]
        most_stages = None if interval.is_rest else group.most_stages
        limit_seconds = np.array([interval.high])
        replicas = part.least_replicas(limit_seconds)[0]
        if interval.is_rest:
            for further in range(interval.group + 1, len(self.groups)):
                others = self.table(further) if whole else self.table(further).take(interval.rows)
                np.minimum(replicas, others.least_replicas(limit_seconds)[0], out=replicas)
        replicas = replicas.reshape(-1)
        hourly = part.usd_per_hour(replicas.reshape(part.compute_seconds.shape)).reshape(-1)
        is_possible = np.isfinite(hourly)
        rows, units, hourly = interval.rows[is_possible], replicas[is_possible], hourly[is_possible]
        if most_stages is not None and most_stages <= 2:
            runs = rows // len(self.names)
            last = ((np.sqrt(8 * runs + 1) - 1) // 2).astype(np.int64)
            at_first, at_last = runs - last * (last + 1) // 2 == 0, last == self.problem.num_layers - 1
            keep = at_first & at_last if most_stages == 1 else at_first | at_last
            rows, units, hourly = rows[keep], units[keep], hourly[keep]
        if most_stages == self.problem.num_layers:
            most_stages = None
        resources: list[tuple[Floats, float]] = []
        if self.objective.has_interruptions:
            of_units = self.objective.interruptions_per_hour[rows % len(self.names)]
            resources.append((units * of_units, interval.interruptions[1]))
        if most_stages is not None:
            resources.append((np.ones(rows.size), most_stages))
        make = {
            "units": units,
            "caps": table.max_units,
            "num_layers": self.problem.num_layers,
            "further": (
                np.array([taken for taken, _ in resources]).reshape(len(resources), rows.size),
                np.array([cap for _, cap in resources]),
            ),
        }
        size = table.max_units.size + len(resources)
        scarcity = interval.scarcity[:size]
        scarcity = np.pad(scarcity, (0, size - scarcity.size))
        if not self.objective.weighs_differently_over_time:
            chain = CappedChain(rows, prices=hourly, **make)
            interval.constant = self.objective.extra_usd_per_hour
            interval.factor = interval.low + self.objective.shift_seconds
        else:
            linear, chain = self._linear(interval, rows, hourly, make)
            if linear is None:
                interval.bound = np.inf
                return
            interval.linear, interval.constant, interval.factor = linear, linear.constant, 1.0
        interval.chain = chain
        best = self.product / interval.factor - interval.constant
        everything = chain.highest_price()
        target = min(best, everything)
        if chain.rows.size > 20_000 and math.isfinite(best):
            chain = without_hopeless(chain, scarcity, best)
        known = chain.partitions_of(interval.partitions)
        ascent = ascend(chain, target=target, scarcity=scarcity, known=known)
        interval.scarcity = ascent.scarcity
        interval.partitions = tuple(chain.rows[stages] for stages in ascent.partitions)
        if ascent.lower_bound >= everything:
            interval.bound = np.inf
            return
        bound = (ascent.lower_bound + interval.constant) * interval.factor
        interval.bound = max(interval.bound, min(bound, self.product))
        interval.nearest = chain.rows[ascent.nearest]
        if ascent.nearest.size:
            self._try(chain.rows[ascent.nearest])
        if ascent.best is not None:
            self._try(chain.rows[ascent.best])
        if math.isfinite(self.product):
            chain = without_hopeless(
                chain, ascent.scarcity, self.product / interval.factor - interval.constant
            )
        interval.chain, interval.rows = chain, chain.rows
        may_dive = math.isinf(self.product) or not interval.is_rest
        if (
            may_dive
            and interval.bound * (1 + _FAR) < self.product
            and self._num_dives <= self._num_evaluated / 4
        ):
            self._dive(interval)

    def _dive(self, interval: _Interval) -> None:
        """Look for a better plan near the one that the bound belongs to, or near the best one."""
        chain = interval.chain
        assert chain is not None
        assert interval.nearest is not None
        self._num_dives += 1
        start = chain.positions(self._best_rows) if self._num_dives % 2 else None
        if start is None or not start.size:
            start = np.searchsorted(chain.rows, interval.nearest)
        for stages in WindowSearch(chain, self._random).partitions(start, interval.scarcity, _SWEEPS):
            self._try(chain.rows[stages])

    def _linear(
        self, interval: _Interval, rows: Ints, hourly: Floats, make: dict[str, Any]
    ) -> tuple[LinearProduct | None, CappedChain]:
        """Return a product that adds up over stages, and its chain; None where there is no partition."""
        objective, low = self.objective, interval.low
        changes = objective.transfer_products
        if changes is not None:
            changes = changes / (low + objective.extra_seconds)
        chain = CappedChain(rows, prices=hourly, change_prices=changes, **make)
        price, stages = chain.cheapest_of(hourly)
        if not math.isfinite(price):
            return None, chain
        self._try(rows[stages])
        least_hourly = price + objective.extra_usd_per_hour
        least = most = 0.0
        interruptions = np.zeros(rows.size)
        if objective.has_interruptions:
            least, most = interval.interruptions
            interruptions = make["further"][0][0]
            least = max(least, CappedChain(rows, prices=interruptions, **make).cheapest_of(interruptions)[0])
            most = min(most, self._most_interruptions(low, least_hourly))
            if least > most:
                return None, chain
            make["further"][1][0] = most * (1 + COMPARISON_TOLERANCE)
            chain = CappedChain(rows, prices=hourly, change_prices=changes, **make)
            stretched = low * float(objective.stretch(least)) + objective.extra_seconds
            target = min(self.product / stretched - objective.extra_usd_per_hour, chain.highest_price())
            known = chain.partitions_of(interval.partitions)
            ascent = ascend(chain, target=target, known=known)
            if ascent.lower_bound >= target:
                return None, chain
            if ascent.best is not None:
                self._try(rows[ascent.best])
            least_hourly = max(least_hourly, ascent.lower_bound + objective.extra_usd_per_hour)
            most = max(least, min(most, self._most_interruptions(low, least_hourly)))
        interval.interruptions = least, most
        linear = LinearProduct(
            objective,
            charged_seconds=low,
            least_hourly=least_hourly,
            least_interruptions_per_hour=least,
            most_interruptions_per_hour=most,
        )
        prices = linear.stage_prices(hourly, interruptions)
        return linear, CappedChain(rows, prices=prices, change_prices=linear.change_prices(), **make)

    def _most_interruptions(self, low: float, least_hourly: float) -> float:
        """Return interruptions per hour that no better plan exceeds."""
        most = self.objective.most_interruptions_per_hour
        least = 0.0

        def is_better(interruptions: float) -> bool:
            stretched = low * self.objective.stretch(interruptions) + self.objective.extra_seconds
            return bool(stretched * least_hourly <= self.product)

        if not is_better(0.0):
            return -1.0
        if is_better(most):
            return most
        for _ in range(40):
            middle = (least + most) / 2
            least, most = (middle, most) if is_better(middle) else (least, middle)
        return most

    def _split_interruptions(self, interval: _Interval, ratio: float) -> bool:
        """Divide an interval by interruptions where those keep the bound lower than its stage times do.

        Args:
            interval: With a chain.
            ratio: Longest over shortest stage time.
        """
        if interval.linear is None or not self.objective.has_interruptions:
            return False
        loss = interval.linear.most_over_linear(interval.bound)
        if loss <= max(ratio, _SAME_PRODUCT):
            return False
        least, most = interval.interruptions
        middle = (least + most) / 2
        self._push(self._part(interval, interruptions=(least, middle)))
        self._push(self._part(interval, interruptions=(middle, most)))
        return True

    def _search(self, interval: _Interval, target: float) -> None:
        """Search the partial plans of an interval."""
        chain = interval.chain
        assert chain is not None
        target = min(target, interval.bound * (1 + interval.reach))
        best = min(target / interval.factor - interval.constant, chain.highest_price())
        found = cheapest_below(
            without_hopeless(chain, interval.scarcity, best),
            interval.scarcity,
            target=best,
            most_partial_plans=interval.most_partial_plans,
            is_over=self._is_over,
        )
        if found.rows is None and found.lower_bound >= chain.highest_price():
            return
        bound = (found.lower_bound + interval.constant) * interval.factor
        interval.bound = max(interval.bound, min(bound, self.product))
        if not found.is_settled:
            interval.most_partial_plans *= 4
        elif found.rows is None:
            interval.reach *= 2
        if found.rows is None:
            self._push(interval)
            return
        self._try(found.rows[::-1])
        reached = self._slowest(interval, found.rows)
        if not found.is_settled:
            self._push(interval)
        elif self.objective.weighs_differently_over_time:
            if interval.low < reached < interval.high:
                self._split(interval, reached)
            else:
                self._push(interval)
        elif reached > interval.low:
            # With the replicas of the upper end, whatever is faster than this plan costs more.
            self._push(self._part(interval, high=math.nextafter(reached, 0.0)))

    def _slowest(self, interval: _Interval, rows: Ints) -> float:
        part = self.table(interval.group).take(rows)
        replicas = part.least_replicas(np.array([interval.high]))[0]
        return float(part.seconds(replicas).max())

    def _try(self, rows: Ints) -> None:
        """Keep the plan of these stages with its best replicas where it is the cheapest so far."""
        key = rows.tobytes()
        if key in self._tried:
            return
        self._tried.add(key)
        names = self.names
        self._try_stages(
            [Stage(*segment_layers(row // len(names)), names[row % len(names)], 1) for row in rows.tolist()]
        )

    def _try_stages(self, stages: Sequence[Stage]) -> None:
        runs = [LayerRun(stage.first_layer, stage.last_layer, stage.device_type) for stage in stages]
        found = fixed_stages(self.problem, runs).cheapest_replicas(
            limit_seconds=self.problem.stage_seconds_limit, below_product=self.product
        )
        if found.plan is not None:
            self.product = found.product
            names = self.names
            self._best_rows = np.array(
                [
                    segment_row(run.first_layer, run.last_layer) * len(names) + names.index(run.device_type)
                    for run in runs
                ]
            )
            self.best = tuple(
                Stage(*run, num_replicas=int(count)) for run, count in zip(runs, found.plan, strict=True)
            )


class FeasibilitySearch:
    """Tells whether some plan keeps memory and caps at given stage times; a `RateSolver` whose plans cost nothing.

    Args:
        table: All runs of layers on all types, shape (G, T).
        most_stages: Of a plan; None without a limit.
        deadline: Of `time.perf_counter`, from which on no plan is met; infinite for none.
    """

    shift_seconds = 0.0

    def __init__(
        self, table: StageTable, *, most_stages: int | None = None, deadline: float = np.inf
    ) -> None:
        self.table, self.most_stages, self.deadline = table, most_stages, deadline

    def solve(self, stage_seconds: Floats, best_product: float) -> RateSolutions[Ints]:
        """Return products of 0 where a plan was met, infinite elsewhere; rates of 0 where none is disproved."""
        parts = [self.plan_within(float(x)) for x in stage_seconds]
        return RateSolutions(
            rates=np.array([0.0 if rows is None or rows.size else np.inf for rows, _ in parts]),
            reached_seconds=np.array([reached for _, reached in parts]),
            products=np.array([np.inf if rows is None or not rows.size else 0.0 for rows, _ in parts]),
            plan_at=lambda index: np.asarray(parts[index][0]),
        )

    def plan_within(self, x: float) -> tuple[Ints | None, float]:
        """Return the rows of a plan and its longest stage time: none where there is none, None where it is open."""
        replicas = self.table.least_replicas(np.array([x]))[0]
        flat = replicas.reshape(-1)
        rows = np.flatnonzero(np.isfinite(flat))
        types = rows % self.table.max_units.size
        chain = CappedChain(
            rows,
            prices=flat[rows] / self.table.max_units[types],
            units=flat[rows],
            caps=self.table.max_units,
            num_layers=int((np.sqrt(8 * len(replicas) + 1) - 1) // 2),
            further=None
            if self.most_stages is None
            else (np.ones((1, rows.size)), np.array([float(self.most_stages)])),
        )
        everything = chain.highest_price()
        ascent = ascend(chain, target=everything)
        if ascent.lower_bound >= everything:
            return np.empty(0, dtype=np.int64), x
        most_partial_plans = _FIRST_PARTIAL_PLANS
        found = None if ascent.best is None else chain.rows[ascent.best]
        while found is None and most_partial_plans <= MAX_PARTIAL_PLANS:
            if time.perf_counter() >= self.deadline:
                return None, x
            searched = cheapest_below(
                chain,
                ascent.scarcity,
                target=everything,
                most_partial_plans=most_partial_plans,
                is_over=lambda: time.perf_counter() >= self.deadline,
            )
            if searched.rows is None and searched.is_settled:
                return np.empty(0, dtype=np.int64), x
            found = searched.rows
            most_partial_plans *= 4
        if found is None:
            return None, x
        return found, float(self.table.take(found).seconds(flat[found]).max())


def stage_time_range(problem: SchedulingProblem, table: StageTable) -> tuple[float, float]:
    """Return the shortest longest-stage time that any plan could have, and the longest that makes sense.

    No plan beats its slowest layer, computed alone with all units of its best type. With more time than
    the slowest stage needs on the fewest replicas that hold it, nothing gets cheaper.
    """
    alone = np.arange(problem.num_layers)
    alone = alone * (alone + 1) // 2 + alone
    fastest = table.compute_seconds * (
        1 - table.compute_parallel_fraction + table.compute_parallel_fraction / table.max_units
    )
    low_seconds = float(fastest[alone].min(axis=1).max())
    fits = np.isfinite(table.fewest_replicas) & (table.fewest_replicas <= table.max_units)
    seconds = table.seconds(table.fewest_replicas)
    return low_seconds, float(seconds[fits].max(initial=0.0))
