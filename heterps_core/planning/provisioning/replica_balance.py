"""How many replicas each stage of a fixed partition needs, exactly, in whole numbers.

Replica counts from a continuous solution, rounded up, leave slack on expensive stages that cheap ones could use;
the integer optimum is found instead. At a fixed longest stage time every stage takes its least count, so
only the stage times that some stage reaches with a whole number of replicas matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.cost_model.objective import Objective, objective_of
from heterps_core.planning.cost_model.run_tables import plan_table
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, UnitType
from heterps_core.planning.provisioning.stage_time_search import (
    RateSolutions,
    least_stage_seconds,
    minimise_stage_time_rate,
)
from heterps_core.plans.scheduling_plan import Stage

_POINTS_PER_ROUND = 24
"""Stage times per vectorised pass; more costs time, for the few stages of one plan."""


def balance_replicas(problem: SchedulingProblem, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return stages, of any replica counts, with those of least cost.

    Exact: minimises the objective (max ET(k) * sum of price * k, with the extra costs) over whole k, subject to
    the floor, memory, and the units of each type over all stages.

    Raises:
        InfeasiblePlanError: No replica counts keep all constraints; names the one that fails.
    """
    fixed = fixed_stages(problem, stages)
    replicas, _ = fixed.cheapest_replicas(limit_seconds=problem.stage_seconds_limit)
    if replicas is None:
        raise _infeasible(problem, stages, fixed)
    return with_replicas(stages, replicas)


def with_replicas(stages: Sequence[Stage], num_replicas: Ints) -> tuple[Stage, ...]:
    """Return the stages on their first device types with other replica counts."""
    counts = zip(stages, num_replicas.tolist(), strict=True)
    return tuple(stage.on({stage.device_type: count}) for stage, count in counts)


def fixed_stages(problem: SchedulingProblem, stages: Sequence[Stage]) -> FixedStages:
    """Return the costs of stages, in order, whatever their replica counts."""
    return FixedStages(table=plan_table(problem, stages), objective=objective_of(problem))


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedStages:
    """The S stages of one partition."""

    table: StageTable
    """Shape (S,)."""

    objective: Objective

    def _solve(self, stage_seconds: Floats) -> RateSolutions:
        """Return what the cheapest replicas for each stage time are charged; all exact."""
        replicas = self.table.cheapest_replicas(stage_seconds)  # (X, S)
        least = self.table.least_replicas(stage_seconds)
        for device_type in np.unique(self.table.type_indices):
            members = self.table.type_indices == device_type
            cap = self.table.max_units[members][0]
            # More replicas that need no disk may be too many.
            is_over = self.table.taken_units(replicas)[:, members].sum(axis=1) > cap
            replicas = np.where(is_over[:, None] & members, least, replicas)
            replicas[self.table.taken_units(replicas)[:, members].sum(axis=1) > cap] = np.inf
        is_possible = np.asarray(np.isfinite(replicas).all(axis=1))
        reached_seconds = np.where(is_possible, self.table.seconds(replicas).max(axis=1), stage_seconds)
        counts = np.where(is_possible[:, None], replicas, 1.0)
        is_possible &= np.isfinite(self.table.on_demand_usd_per_hour(counts).min(axis=1))
        products = self._products(reached_seconds, counts)
        products[~is_possible] = np.inf
        return RateSolutions(
            rates=products / (reached_seconds + self.objective.shift_seconds),
            reached_seconds=reached_seconds,
            products=products,
            replicas=replicas,
        )

    def _products(self, reached_seconds: Floats, counts: Floats, start_seconds: float = 0.0) -> Floats:
        """Return the products of counts of shape (X, S)."""
        return np.asarray(
            self.objective.product(
                reached_seconds,
                self.table.usd_per_hour(counts).sum(axis=1)
                + self.table.on_demand_usd_per_hour(counts).min(axis=1)
                + self.table.reserved.added(self.table.type_indices, counts),
                counts @ self.table.interruptions_per_hour,
                start_seconds,
            )
        )

    def cheapest_replicas(
        self, *, limit_seconds: float, below_product: float = np.inf
    ) -> tuple[Ints | None, float]:
        """Return the replica counts of least cost, shape (S,), and their product; None and infinity without any.

        Stage times are at most `limit_seconds`; only counts below a product from elsewhere are looked for.
        """
        if self.table.start is None:
            replicas, product = self._cheapest(limit_seconds, below_product)
            return None if replicas is None else replicas.astype(np.int64), product
        # Charged the earliest start of all counts, the best that are ready by a limit cost no more than they do. So
        # none is better once those that are ready before the last ones found cost as much as the best.
        earliest = self.objective.later(float(self.table.start_seconds(self.table.max_units).max()))
        best, best_product, latest = None, below_product, np.inf
        while True:
            part = FixedStages(table=self.table.ready_by(latest), objective=earliest)
            replicas, _ = part._cheapest(limit_seconds, best_product)
            if replicas is None:
                return best, np.inf if best is None else best_product
            starts = float(self.table.start_seconds(replicas).max())
            reached_seconds = self.table.seconds(replicas).max(keepdims=True)
            product = float(self._products(reached_seconds, replicas[None], starts)[0])
            if product < best_product:
                best, best_product = replicas.astype(np.int64), product
            latest = math.nextafter(starts, 0.0)

    def _cheapest(self, limit_seconds: float, below_product: float) -> tuple[Floats | None, float]:
        """Return the same where no start is charged beside that of the objective."""
        low_seconds, high_seconds = self._range(limit_seconds)
        return minimise_stage_time_rate(
            self._solve,
            low_seconds=low_seconds,
            high_seconds=high_seconds,
            shift_seconds=self.objective.shift_seconds,
            batch_size=_POINTS_PER_ROUND,
            known_product=below_product,
        )

    def least_seconds(self) -> float:
        """Return the shortest longest-stage time that memory and caps allow, infinite where none does."""

        def reached_within(x: float) -> float:
            found = self._solve(np.array([x]))
            return float(found.reached_seconds[0]) if np.isfinite(found.products[0]) else np.inf

        low_seconds, high_seconds = self._range(np.inf)
        return least_stage_seconds(reached_within, low_seconds=low_seconds, high_seconds=high_seconds)

    def _range(self, limit_seconds: float) -> tuple[float, float]:
        if not np.isfinite(self.table.fewest_replicas).all():
            return np.inf, 0.0
        low_seconds = float(self.table.fastest_seconds().max())
        high_seconds = float(self.table.seconds(self.table.fewest_replicas).max())
        return low_seconds, min(high_seconds, limit_seconds * (1 + COMPARISON_TOLERANCE))


def _infeasible(
    problem: SchedulingProblem, stages: Sequence[Stage], fixed: FixedStages
) -> InfeasiblePlanError:
    for stage, num_replicas in zip(stages, fixed.table.fewest_replicas, strict=True):
        unit = problem.device_types[stage.device_type]
        if not np.isfinite(num_replicas):
            state_bytes = sum(
                layer.state_bytes
                for layer in problem.layers[stage.first_layer : stage.last_layer + 1]
                if not layer.is_sharded
            )
            return InfeasiblePlanError(
                "memory",
                f"layers {stage.first_layer}..{stage.last_layer} keep {state_bytes:.6g} bytes on each replica, but "
                f"one unit of {stage.device_type} has {memory_text(unit)}; place some elsewhere",
            )
    if all(problem.device_types[stage.device_type].is_all_on_spot for stage in stages):
        return InfeasiblePlanError(
            "on-demand machine",
            "one machine of a plan must be on-demand, but the stages are all on spot, and none of their device types "
            "is sold on-demand; place some layers elsewhere",
        )
    least_seconds = fixed.least_seconds()
    if np.isfinite(least_seconds):
        return floor_missed(problem, least_seconds)
    for index, (name, unit) in enumerate(problem.device_types.items()):
        fewest = fixed.table.taken_units(fixed.table.fewest_replicas)
        needed = int(fewest[fixed.table.type_indices == index].sum())
        if needed > unit.max_units:
            return InfeasiblePlanError(
                "units cap",
                f"memory alone takes {needed} units of {name}, but max_units is {unit.max_units}",
            )
    if (trainer := fixed.table.trainer) is not None:
        for stage, num_replicas in zip(stages, fixed.table.fewest_replicas, strict=True):
            if num_replicas > trainer.microbatch_rows:
                return InfeasiblePlanError(
                    "batch size",
                    f"memory takes {num_replicas:.0f} replicas for layers {stage.first_layer}..{stage.last_layer}, "
                    f"but a micro-batch of {len(stages)} stages has {trainer.microbatch_rows} rows; raise the batch "
                    f"size, or take fewer stages",
                )
    raise AssertionError("stages that fit into memory and caps reach some throughput")


def memory_text(unit: UnitType) -> str:
    """Return the memory of a unit that state may fill, in bytes, and what is reserved beside it."""
    if unit.reserved_bytes == 0:
        return f"{unit.memory_bytes:.6g}"
    return (
        f"{max(unit.usable_bytes, 0):.6g} ({unit.memory_bytes:.6g} less {unit.reserved_bytes:.6g} "
        f"reserved for what a worker takes before any table)"
    )


def floor_missed(problem: SchedulingProblem, least_seconds: float) -> InfeasiblePlanError:
    """Return the error for a floor above what the shortest stage time gives."""
    floor = problem.throughput_floor_samples_per_s
    reachable = problem.batch_size / least_seconds
    return InfeasiblePlanError(
        "throughput floor",
        f"the highest reachable throughput is {reachable:.6g} samples/s, {1 - reachable / floor:.1%} below the "
        f"floor of {floor:.6g}; lower the floor, raise max_units or the batch size, or offer a faster device type",
    )
