"""The cheapest plan within the caps, with a bound that is valid whenever the search ends.

Branch and bound over intervals of the longest stage time (`interval_bound.py`). The interval of the least bound comes
next: it is divided where its width is what keeps the bound low, else its partial plans are searched
(`partial_plans.py`). Where interruptions are charged, intervals are divided by them as well.

By the trainer's step the number of micro-batches grows with the stages. An interval begins with all plans, with the
fewest replicas that any of these numbers wants, and is divided into plans of few stages and the rest. More
micro-batches want more replicas as a rule, but not always: where a replica fewer has rows, less of its traffic is
counted as crossing.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from heterps_core.planning.cost_model.arrays import Ints
from heterps_core.planning.cost_model.run_tables import segment_table
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.step_model import step_groups
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.capped.best_plan import BestPlan
from heterps_core.planning.search.capped.feasibility import FeasibilitySearch, stage_time_range
from heterps_core.planning.search.capped.interval_bound import IntervalBound, IntervalBounds, Plans
from heterps_core.planning.search.capped.mixed_integer import TOLERANCE, cheapest_by_programme
from heterps_core.planning.search.capped.partial_plans import cheapest_below
from heterps_core.planning.search.capped.window_search import WindowSearch
from heterps_core.plans.scheduling_plan import Stage

MAX_STEPS = 100_000
"""Intervals that are looked at before a search without a deadline gives up its proof."""

_NUM_FIRST_INTERVALS = 16
"""So many are looked at even where the time is over and no plan was met."""

_FIRST_PARTIAL_PLANS = 64
"""Kept in the first search of an interval; four times as many in each further one."""

_PARTIAL_SEARCHES, _LAST_PARTIAL_SEARCHES, _PROGRAMMES = 1, 4, 2
"""Searches of an interval: by partial plans before programmes are solved; the same where the optimum itself is asked
for; and programmes that are stopped by their time limit."""

_LEAST_PROGRAMME_S, _MOST_PROGRAMME_S = 0.2, 20.0
"""Time limits of a programme, which may take half of what is left."""

_NEAR = (0.0099, 1e-3, 0.0)
"""Relative distances from the best plan that are proven one after the other."""

_SEARCHED_NEARBY, _SEARCHED, _NARROW = 1.03, 1.005, 1 + 1e-3
"""Longest over shortest stage time of an interval, or its true product over the linear one: where it is searched, if
its bound is near the target and else; where it is given up after that."""

_FEW_STAGES = 128
"""Candidate stages of an interval up to which its plans are searched once, however wide it is. Where caps bind,
bounds by prices on scarce units may lie 30 % below all plans, and dividing the interval raises them little."""

_NEARLY = 0.015
"""Relative distance of a near target from a bound: programmes then end soon."""

_FIRST_REACH = 0.01
"""How far above the bound partial plans are searched first, relatively; twice as far each further time."""

_FAR = 0.03
"""Relative distance of the best plan from a bound from which on a better plan is wanted first."""

_STEPS_WITHOUT_PLAN = 32
"""After which it is asked whether any plan keeps the caps at all."""

_STEPS_BEFORE_PROPOSAL = 48
"""After which a plan of another method is asked for, where the best one is far from the bound."""

_SAME_PRODUCT = 1.002
"""True product over the linear one from which on an interval that is not narrow is divided by interruptions."""

_SWEEPS = 12
"""Sweeps over windows in one search for a better plan."""


@dataclass(order=True, slots=True)
class _Interval:
    """Plans of a longest stage time in some interval."""

    lower_bound: float
    order: int
    plans: Plans = field(compare=False)
    known: IntervalBound | None = field(compare=False, default=None)
    """None where the bound comes from the interval that it is part of."""

    num_partial_searches: int = field(compare=False, default=0)
    num_programmes: int = field(compare=False, default=0)
    reach: float = field(compare=False, default=_FIRST_REACH)
    """How far above the bound its partial plans are searched next, relatively."""


class CheapestPlan(NamedTuple):
    """The cheapest plan that was met, with a bound on all."""

    stages: tuple[Stage, ...] | None
    product: float
    """In the unit of `Objective`; infinite without a plan."""

    lower_bound: float
    """No plan has a lower product; infinite where none exists."""


NO_PLAN = CheapestPlan(None, math.inf, math.inf)


class CappedSearch:
    """Finds the cheapest plan of a problem.

    Args:
        known: A plan to begin with, if it keeps all constraints.
        deadline: Of `time.process_time`, at which the search ends; infinite for none.
        most_steps: Intervals that are looked at before the search ends.
        propose: Returns a plan of another method; asked once, where the proof is far after many steps.
    """

    def __init__(
        self,
        problem: SchedulingProblem,
        *,
        known: Sequence[Stage] = (),
        deadline: float = np.inf,
        most_steps: int = MAX_STEPS,
        propose: Callable[[], Sequence[Stage] | None] | None = None,
    ) -> None:
        self.propose = propose
        self.problem, self.deadline, self.most_steps = problem, deadline, most_steps
        self.groups = step_groups(problem)
        self.best = BestPlan(problem)
        self.bounds = IntervalBounds(problem, self.groups, self.best)
        self._heap: list[_Interval] = []
        self._given_up = np.inf
        self._unreachable_seconds = 0.0
        self._num_pushed = self._num_evaluated = self._num_dives = self._num_steps = 0
        self._random = np.random.default_rng(0)
        if known:
            self.best.offer(known)

    def run(self) -> CheapestPlan:
        """Return the cheapest plan and the bound."""
        ranges = [
            stage_time_range(self.problem, self.bounds.table(group)) for group in range(len(self.groups))
        ]
        low_seconds = ranges[0][0]
        limit_seconds = self.problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE)
        high_seconds = min(max(high for _, high in ranges), limit_seconds)
        if low_seconds <= high_seconds:
            ends = np.geomspace(low_seconds, high_seconds, _NUM_FIRST_INTERVALS + 1)
            ends[0], ends[-1] = low_seconds, high_seconds
            all_rows = np.arange(self.bounds.table(0).compute_seconds.size)
            for low, high in zip(ends[-2::-1].tolist(), ends[:0:-1].tolist(), strict=True):
                plans = Plans(
                    low=low,
                    high=high,
                    group=0,
                    is_rest=len(self.groups) > 1,
                    starts=(0.0, self.bounds.latest_start()),
                    rows=all_rows,
                )
                self._push(_Interval(self.bounds.work_bound(low), 0, plans))
        for near in _NEAR:
            while self._heap and self._heap[0].lower_bound * (1 + near) < self.best.product * (
                1 - COMPARISON_TOLERANCE
            ):
                is_over = self._is_over() or self._num_steps >= self.most_steps
                if is_over and (self.best.stages is not None or self._num_steps >= _NUM_FIRST_INTERVALS):
                    break
                if self.problem.drains and self._given_up <= self._heap[0].lower_bound and self.best.stages:
                    break  # Stages that fill and drain keep the bound below the best plan, as it is simulated.
                self._num_steps += 1
                if self._num_steps == _STEPS_WITHOUT_PLAN and self.best.stages is None:
                    rows = self._feasible_rows(high_seconds)
                    if rows is not None and not rows.size:
                        return NO_PLAN
                    if rows is not None:
                        self.best.offer_rows(self.bounds.columns.of_rows(rows))
                interval = heapq.heappop(self._heap)
                is_far = interval.lower_bound * (1 + _FAR) < self.best.product
                is_time = self._num_steps == _STEPS_BEFORE_PROPOSAL
                if is_time and is_far and self.propose and (proposed := self.propose()):
                    self.best.offer(proposed)
                self._step(interval, near)
        bound = min(self._given_up, self._heap[0].lower_bound if self._heap else np.inf)
        product = self.best.product
        return CheapestPlan(self.best.stages, product, min(bound, product))

    def _feasible_rows(self, seconds: float) -> Ints | None:
        """Return a plan that keeps the caps at the longest stage time; empty where there is none, None where open."""
        half = (time.process_time() + self.deadline) / 2
        is_open = False
        first_group = min(((each.known or each).plans.group for each in self._heap), default=0)
        for index in range(first_group, len(self.groups)):
            group = self.groups[index]
            # What stages are charged does not matter here.
            table = segment_table(self.problem, num_microbatches=group.num_microbatches)
            search = FeasibilitySearch(self.problem, table, most_stages=group.most_stages, deadline=half)
            rows, _ = search.plan_within(seconds)
            if rows is not None and rows.size:
                return rows[np.argsort(rows // len(self.problem.device_types))]
            is_open |= rows is None
        return None if is_open else np.empty(0, dtype=np.int64)

    def _is_over(self) -> bool:
        return time.process_time() >= self.deadline

    def _push(self, interval: _Interval) -> None:
        self._num_pushed += 1
        interval.order = self._num_pushed
        if math.isfinite(interval.lower_bound) and interval.plans.low <= interval.plans.high:
            heapq.heappush(self._heap, interval)

    def _push_part(self, interval: _Interval, plans: Plans) -> None:
        self._push(_Interval(interval.lower_bound, 0, plans))

    def _step(self, interval: _Interval, near: float) -> None:
        """Improve the bound of an interval, or replace it by its parts."""
        target = self.best.product / (1 + near)
        if interval.known is None:
            self._evaluate(interval)
            return
        plans = interval.known.plans
        if plans.is_rest:
            self._push_part(interval, replace(plans, is_rest=False))
            group = plans.group + 1
            self._push_part(interval, replace(plans, group=group, is_rest=group + 1 < len(self.groups)))
            return
        z = self.bounds.objective.shift_seconds
        ratio = (plans.high + z) / (plans.low + z)
        later = self._start_ratio(plans)
        loss = max(ratio, later, interval.known.linear.most_over_linear(interval.lower_bound))
        is_near = interval.lower_bound * (1 + _NEARLY) >= target
        most_searches = _PARTIAL_SEARCHES if near else _LAST_PARTIAL_SEARCHES
        may_search = interval.num_programmes < _PROGRAMMES or interval.num_partial_searches < most_searches
        has_few = interval.known.chain.rows.size <= _FEW_STAGES and interval.num_partial_searches == 0
        if has_few or (loss <= (_SEARCHED_NEARBY if is_near else _SEARCHED) and may_search):
            self._search(interval, interval.known, target, near)
            return
        if self._split_interruptions(interval, interval.known, max(ratio, later)):
            return
        if later > max(ratio, _NARROW):
            earliest, latest = (self._offset(plans) + start for start in plans.starts)
            self._split_starts(interval, plans, math.sqrt(earliest * latest) - self._offset(plans))
            return
        if ratio <= _NARROW:
            self._given_up = min(self._given_up, interval.lower_bound)
            return
        self._split(interval, plans, math.sqrt(plans.low * plans.high))

    def _split(self, interval: _Interval, plans: Plans, middle: float) -> None:
        self._push_part(interval, replace(plans, high=math.nextafter(middle, 0.0)))
        self._push_part(interval, replace(plans, low=middle))

    def _offset(self, plans: Plans) -> float:
        return plans.low + self.bounds.objective.extra_seconds

    def _start_ratio(self, plans: Plans) -> float:
        """Return how far about starts let plans lie above the bound, as a ratio."""
        earliest, latest = plans.starts
        return (self._offset(plans) + latest) / (self._offset(plans) + earliest)

    def _split_starts(self, interval: _Interval, plans: Plans, middle: float) -> None:
        earliest, latest = plans.starts
        self._push_part(interval, replace(plans, starts=(earliest, math.nextafter(middle, 0.0))))
        self._push_part(interval, replace(plans, starts=(middle, latest)))

    def _evaluate(self, interval: _Interval) -> None:
        """Bound the plans of an interval by prices on scarce units."""
        if interval.plans.high <= self._unreachable_seconds:
            return
        self._num_evaluated += 1
        plans = self.bounds.without_short_plans(interval.plans)
        known = None if plans is None else self.bounds.bound(plans)
        if known is None:
            if math.isinf(self.best.product) and interval.order <= _NUM_FIRST_INTERVALS:
                # No plan at all keeps the caps here, and shorter stage times take no fewer units.
                self._unreachable_seconds = max(self._unreachable_seconds, interval.plans.high)
            return
        interval.known = known
        interval.lower_bound = max(interval.lower_bound, known.lower_bound)
        may_dive = math.isinf(self.best.product) or not known.plans.is_rest
        is_far = interval.lower_bound * (1 + _FAR) < self.best.product
        if may_dive and is_far and self._num_dives <= self._num_evaluated / 4:
            self._dive(known)
        self._push(interval)

    def _dive(self, known: IntervalBound) -> None:
        """Look for a better plan near the one that the bound belongs to, or near the best one."""
        chain = known.chain
        self._num_dives += 1
        start = chain.positions(self.best.rows) if self._num_dives % 2 else None
        if start is None or not start.size:
            # What cannot be part of a better plan may have left the chain since the bound was found.
            start = chain.positions(known.nearest)
        if start is None or not start.size:
            return
        for stages in WindowSearch(chain, self._random).partitions(start, known.plans.scarcity, _SWEEPS):
            self.best.offer_rows(chain.rows[stages])

    def _split_interruptions(self, interval: _Interval, known: IntervalBound, ratio: float) -> bool:
        """Divide an interval by interruptions where those keep the bound lower than its stage times do."""
        same = _SAME_PRODUCT if ratio > _NARROW else 1.0
        if known.linear.most_over_linear(interval.lower_bound) <= max(math.sqrt(ratio), same):
            return False
        least, most = known.plans.interruptions
        middle = known.linear.middle_interruptions()
        for part in ((least, middle), (middle, most)):
            # Fewer or more interruptions alone change what plans are charged by the hour.
            self._push_part(interval, replace(known.plans, interruptions=part, least_hourly=0.0))
        return True

    def _search(self, interval: _Interval, known: IntervalBound, target: float, near: float) -> None:
        """Search the partitions of an interval, by partial plans first and then by a programme.

        Few stages are searched up to the target at once, many a little above the bound first.
        """
        plans, constant = known.plans, known.linear.constant
        everything = known.chain.highest_price()
        by_programme = interval.num_partial_searches >= (
            _PARTIAL_SEARCHES if near else _LAST_PARTIAL_SEARCHES
        )
        is_far = interval.lower_bound * (1 + _FAR) < self.best.product
        goal = min(target * (1 + 2 * TOLERANCE), self.best.product) if by_programme else target
        has_few = known.chain.rows.size <= _FEW_STAGES
        if not has_few and (not by_programme or (is_far and self.best.stages is not None)):
            # Fewer stages are left than with the goal of all.
            goal = min(goal, interval.lower_bound * (1 + interval.reach))
        price = min(goal - constant, everything)
        chain = known.chain.without_hopeless(plans.scarcity, price)
        if by_programme:
            left_s = (self.deadline - time.process_time()) / 2
            found = cheapest_by_programme(
                chain,
                target=price,
                seconds=min(max(left_s, _LEAST_PROGRAMME_S), _MOST_PROGRAMME_S),
                gap=_FAR / 3 if is_far else near / 5,
            )
        else:
            found = cheapest_below(
                chain,
                plans.scarcity,
                target=price,
                most_partial_plans=_FIRST_PARTIAL_PLANS * 4**interval.num_partial_searches,
                is_over=self._is_over,
            )
        if found.rows is None and found.is_settled and price == everything:
            return
        interval.lower_bound = max(interval.lower_bound, min(found.lower_bound + constant, self.best.product))
        if found.rows is not None:
            self.best.offer_rows(found.rows[::-1])
        if not found.is_settled:
            interval.num_partial_searches += not by_programme
            interval.num_programmes += by_programme
            self._push(interval)
        elif found.rows is not None:
            self._split_at(interval, known, found.rows)
        elif by_programme and near == 0.0 and not is_far:
            # Nearer than this a programme does not tell.
            self._given_up = min(self._given_up, interval.lower_bound)
        else:
            interval.reach *= 2
            self._push(interval)

    def _split_at(self, interval: _Interval, known: IntervalBound, rows: Ints) -> None:
        """Divide an interval where its cheapest plan by the linear product lies: by the true one others may be it."""
        plans = known.plans
        ratio = plans.high / plans.low
        if self._split_interruptions(interval, known, ratio):
            return
        reached, start = self.bounds.slowest_seconds(plans, rows)
        if plans.starts[0] < start <= plans.starts[1]:
            self._split_starts(interval, plans, start)
            return
        if not plans.low < reached < plans.high:
            reached = math.sqrt(plans.low * plans.high)
        if plans.low < reached < plans.high:
            self._split(interval, plans, reached)
        else:
            self._given_up = min(self._given_up, interval.lower_bound)
