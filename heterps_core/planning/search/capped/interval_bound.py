"""A bound on all plans of an interval of the longest stage time, and the stages that better plans may have.

With the replicas that the interval's upper end wants, charged for the stage time that they take and no less than its
lower end, every plan of the interval costs at least what it seems to (`linear_product.py`), so the best prices on
scarce units (`scarcity_prices.py`) bound them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints, run_layers
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import segment_table
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.cost_model.step_model import StepGroup
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.capped.best_plan import BestPlan
from heterps_core.planning.search.capped.capped_chain import CappedChain
from heterps_core.planning.search.capped.linear_product import LinearProduct
from heterps_core.planning.search.capped.scarcity_prices import ascend
from heterps_core.planning.search.capped.stage_columns import StageColumns

_MANY_CANDIDATES = 20_000
"""From which on hopeless ones are struck out before the ascent as well."""

_ROUNDING = 1e-6
"""Rounding of a bound on a number of stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plans:
    """Which plans are meant."""

    low: float
    high: float
    """Range of the longest stage time, in seconds."""

    group: int
    is_rest: bool
    interruptions: tuple[float, float] = (0.0, math.inf)
    """Per hour."""

    starts: tuple[float, float] = (0.0, math.inf)
    """Least and most start-up of the slowest stage over the common one, spread over the steps."""

    least_hourly: float = 0.0
    """Least charge per hour, in USD; 0 where it is not known."""

    rows: Ints
    """What stages better ones may have."""

    scarcity: Floats = field(default_factory=lambda: np.empty(0))
    """Prices of scarce units to begin with; empty for none."""

    partitions: tuple[Ints, ...] = ()
    """Rows of those that the prices of scarce units came from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalBound:
    """What is known of some plans."""

    plans: Plans
    lower_bound: float
    linear: LinearProduct
    chain: CappedChain
    nearest: Ints
    """Rows of the cheapest partition with scarce units charged; it may break caps."""


class IntervalBounds:
    """Bounds the plans of one problem.

    What is no better than `best`, which takes the plans that are met, is left out.
    """

    def __init__(self, problem: SchedulingProblem, groups: Sequence[StepGroup], best: BestPlan) -> None:
        self.problem, self.groups, self.best = problem, groups, best
        self.columns = StageColumns.of(problem)
        self.objective = self.columns.objective(objective_of(problem))
        caps = np.array([unit.max_units for unit in problem.device_types.values()], dtype=np.float64)
        self.caps = caps[self.columns.types]
        self._tables: dict[int, StageTable] = {}
        self._replicas: dict[int, Floats] = {}
        self._replicas_of: tuple[float, float, Ints] = 0.0, 0.0, np.empty(0, dtype=np.int64)

    def table(self, group: int) -> StageTable:
        """Return the candidate stages of a group."""
        if group not in self._tables:
            self._tables[group] = self.columns.table(
                segment_table(self.problem, num_microbatches=self.groups[group].num_microbatches)
            )
        return self._tables[group]

    def work_bound(self, low: float) -> float:
        """Return a product that no plan with a longest stage time of at least `low` has less than.

        Each layer is charged its computation alone, on the type where that costs least.
        """
        table = self.table(0)
        layers = np.arange(self.problem.num_layers)
        alone = replace(
            table,
            trainer=None,
            single_communication_seconds=None,
            communication_seconds=np.zeros_like(table.compute_seconds),
        ).least_usd_seconds(np.ones_like(table.compute_seconds), 0.0)[layers * (layers + 3) // 2]
        work = float(alone.min(axis=1).sum())
        return work + (low + self.objective.extra_seconds) * self.objective.extra_usd_per_hour

    def without_short_plans(self, plans: Plans) -> Plans | None:
        """Return the plans of groups whose plans have enough stages to keep the caps, None where there are none."""
        most_stages = [group.most_stages or self.problem.num_layers for group in self.groups]
        while plans.is_rest:
            units = self._taken(plans, self._fewest_units(plans))
            is_possible = np.isfinite(units)
            chain = CappedChain(
                plans.rows[is_possible],
                prices=np.ones(np.count_nonzero(is_possible)),
                units=units[is_possible],
                caps=self.caps,
                num_layers=self.problem.num_layers,
            )
            fewest_stages = ascend(chain, target=most_stages[-1] + 1.0).lower_bound - _ROUNDING
            if most_stages[plans.group] >= fewest_stages:
                break
            group = int(np.searchsorted(most_stages, fewest_stages))
            if group == len(self.groups):
                return None
            # More stages have more micro-batches, which may want more units and so more stages.
            plans = replace(plans, group=group, is_rest=group + 1 < len(self.groups))
        return plans

    def bound(self, plans: Plans) -> IntervalBound | None:
        """Return what can be shown of these plans, None where none of them is better than the best one."""
        candidates = self._candidates(plans)
        linear = self._linear(plans, candidates)
        if linear is None:
            return None
        chain = candidates.chain(
            linear.stage_prices(candidates.usd_seconds, candidates.usd_per_hour, candidates.interruptions),
            most_interruptions_per_hour=linear.most_interruptions_per_hour,
        )
        size = chain.caps.size
        scarcity = np.pad(plans.scarcity[:size], (0, max(0, size - plans.scarcity.size)))
        best = self.best.product - linear.constant
        everything = chain.highest_price()
        if chain.rows.size > _MANY_CANDIDATES and math.isfinite(best):
            chain = chain.without_hopeless(scarcity, best)
        ascent = ascend(
            chain,
            target=min(best, everything),
            scarcity=scarcity,
            known=chain.partitions_of(plans.partitions),
        )
        if ascent.lower_bound >= everything:
            return None
        for stages in (ascent.nearest, ascent.best):
            if stages is not None and stages.size:
                self.best.offer_rows(chain.rows[stages])
        partitions = tuple(chain.rows[stages] for stages in ascent.partitions)
        nearest = chain.rows[ascent.nearest]
        if math.isfinite(self.best.product):
            chain = chain.without_hopeless(ascent.scarcity, self.best.product - linear.constant)
        return IntervalBound(
            plans=replace(
                plans,
                rows=chain.rows,
                scarcity=ascent.scarcity,
                partitions=partitions,
                interruptions=(linear.least_interruptions_per_hour, linear.most_interruptions_per_hour),
                least_hourly=linear.least_hourly,
            ),
            lower_bound=min(ascent.lower_bound + linear.constant, self.best.product),
            linear=linear,
            chain=chain,
            nearest=nearest,
        )

    def slowest_seconds(self, plans: Plans, rows: Ints) -> tuple[float, float]:
        """Return the longest stage time and start of a partition with the replicas that the upper ends want."""
        part = self._part(plans.group, replace(plans, rows=rows))
        replicas = part.least_replicas(np.array([plans.high]))[0]
        return float(part.seconds(replicas).max()), float(part.start_seconds(replicas).max())

    def latest_start(self) -> float:
        """Return a start, spread over the steps, that no stage with the fewest replicas exceeds."""
        table = self.table(0)
        fewest = table.fewest_replicas
        starts = np.where(np.isfinite(fewest), table.start_seconds(fewest), 0.0)
        return float(starts.max())

    def _part(self, group: int, plans: Plans) -> StageTable:
        table = self.table(group)
        # All of them need no copy.
        part = table.take(plans.rows) if plans.rows.size < table.compute_seconds.size else table
        return part.ready_by(plans.starts[1])

    def _groups(self, plans: Plans) -> range:
        return range(plans.group, len(self.groups) if plans.is_rest else plans.group + 1)

    def _least_replicas(self, group: int, plans: Plans) -> Floats:
        """Return the fewest replicas of each stage in a group, kept while the same stages and times are asked for."""
        high, latest, rows = self._replicas_of
        if high != plans.high or latest != plans.starts[1] or rows is not plans.rows:
            self._replicas_of, self._replicas = (plans.high, plans.starts[1], plans.rows), {}
        if group not in self._replicas:
            self._replicas[group] = self._part(group, plans).least_replicas(np.array([plans.high]))[0]
        return self._replicas[group]

    def _taken(self, plans: Plans, units: Floats) -> Floats:
        """Return what these units take from the caps, shape (n,)."""
        if self.table(plans.group).machine_units is None:
            return units
        part = self._part(plans.group, plans)
        return part.taken_units(units.reshape(part.compute_seconds.shape)).reshape(-1)

    def _fewest_units(self, plans: Plans) -> Floats:
        """Return the fewest units that any of these plans gives each stage, shape (n,)."""
        units = [self._least_replicas(group, plans).reshape(-1) for group in self._groups(plans)]
        return np.asarray(np.minimum.reduce(units))

    def _candidates(self, plans: Plans) -> _Candidates:
        """Return the stages that these plans may have, with the fewest replicas of each."""
        units, usd_seconds = self._fewest_units(plans), np.full(plans.rows.size, np.inf)
        for group in self._groups(plans):
            part = self._part(group, plans)
            least = part.least_usd_seconds(self._least_replicas(group, plans), plans.low)
            np.minimum(usd_seconds, least.reshape(-1), out=usd_seconds)
        hourly = part.least_usd_per_hour(units.reshape(part.compute_seconds.shape)).reshape(-1)
        num_columns = self.columns.num_columns
        most_stages = None if plans.is_rest else self.groups[plans.group].most_stages
        chosen = np.isfinite(hourly)
        if most_stages is not None and most_stages <= 2:
            first, last = run_layers(plans.rows // num_columns)
            at_first, at_last = first == 0, last == self.problem.num_layers - 1
            chosen &= at_first & at_last if most_stages == 1 else at_first | at_last
        return _Candidates(
            rows=plans.rows[chosen],
            units=self._taken(plans, units)[chosen],
            usd_per_hour=hourly[chosen],
            usd_seconds=usd_seconds[chosen],
            interruptions=units[chosen]
            * self.objective.interruptions_per_hour[plans.rows[chosen] % num_columns],
            has_interruptions=self.objective.has_interruptions,
            columns=self.columns,
            caps=self.caps,
            num_layers=self.problem.num_layers,
            most_stages=None if most_stages == self.problem.num_layers else most_stages,
        )

    def _linear(self, plans: Plans, candidates: _Candidates) -> LinearProduct | None:
        """Return a product that adds up over stages, None where no plan is better."""
        objective, low = self.objective.later(plans.starts[0]), plans.low
        if not objective.has_interruptions:
            return LinearProduct(objective, low, 0.0, 0.0, 0.0)
        chain = candidates.chain(candidates.usd_per_hour)
        price, stages = chain.cheapest_of(chain.prices)
        if not math.isfinite(price):
            return None
        self.best.offer_rows(chain.rows[stages])
        least_hourly = max(plans.least_hourly, price + objective.extra_usd_per_hour)
        by_interruptions = candidates.chain(candidates.interruptions)
        least = max(plans.interruptions[0], by_interruptions.cheapest_of(by_interruptions.prices)[0])
        most = min(
            plans.interruptions[1],
            self.objective.most_interruptions_of_better(low, least_hourly, self.best.product),
        )
        if least > most:
            return None
        if plans.least_hourly:
            return LinearProduct(objective, low, least_hourly, least, most)
        chain = candidates.chain(candidates.usd_per_hour, most_interruptions_per_hour=most)
        stretched = low * float(objective.stretch(least)) + objective.extra_seconds
        target = min(self.best.product / stretched - objective.extra_usd_per_hour, chain.highest_price())
        ascent = ascend(chain, target=target, known=chain.partitions_of(plans.partitions))
        if ascent.lower_bound >= target:
            return None
        if ascent.best is not None:
            self.best.offer_rows(chain.rows[ascent.best])
        least_hourly = max(least_hourly, ascent.lower_bound + objective.extra_usd_per_hour)
        most = max(
            least,
            min(most, self.objective.most_interruptions_of_better(low, least_hourly, self.best.product)),
        )
        return LinearProduct(objective, low, least_hourly, least, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidates:
    """Stages with the fewest replicas that their plans give them; arrays of shape (n,)."""

    rows: Ints
    units: Floats
    usd_per_hour: Floats
    usd_seconds: Floats
    interruptions: Floats
    has_interruptions: bool
    columns: StageColumns
    caps: Floats
    num_layers: int
    most_stages: int | None

    def chain(self, prices: Floats, *, most_interruptions_per_hour: float = math.inf) -> CappedChain:
        """Return the chain of these stages at some prices."""
        further = self.columns.limits(self.rows, self.units, self.caps, self.num_layers)
        if self.has_interruptions:
            cap = most_interruptions_per_hour * (1 + COMPARISON_TOLERANCE)
            further.append((self.interruptions, cap))
        if self.most_stages is not None:
            further.append((np.ones(self.rows.size), float(self.most_stages)))
        return CappedChain(
            self.rows,
            prices=prices,
            units=self.units,
            caps=self.caps,
            num_layers=self.num_layers,
            change_prices=self.columns.change_prices(self.num_layers),
            further=(
                np.array([taken for taken, _ in further]).reshape(len(further), self.rows.size),
                np.array([cap for _, cap in further]),
            ),
        )
