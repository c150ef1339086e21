"""Replica counts from a continuous balance, found by Newton's method and rounded up: the HeterPS paper's way.

All stages are sized to the time x of one reference stage, and its count k is where the cost has no slope (the
project's reading of arXiv 2111.10635). Rounding up then pays for slack; `replica_balance.py` shows how much.
The cost is that of the units' time alone, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.cost_model.stage_cost import COMPARISON_TOLERANCE
from heterps_core.planning.cost_model.stage_table import StageTable
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import LayerRun, fixed_stages
from heterps_core.planning.provisioning.whole_counts import least_replicas_at_floor, stages_within_caps
from heterps_core.plans.scheduling_plan import Stage

_MOST_STEPS = 200
_STEP_TOLERANCE = 1e-12
"""Relative change of k at which the search for the root ends."""

_NEAR_INTEGER = 1e-9
"""Counts less than this above a whole number, relatively, are rounding errors and are rounded down."""


class _Curve(NamedTuple):
    """A quantity with its first and second derivative; of one stage or of all, shape () or (S,)."""

    value: Floats
    slope: Floats
    curvature: Floats


def newton_replicas(problem: SchedulingProblem, runs: Sequence[LayerRun]) -> tuple[Stage, ...]:
    """Return the runs as stages with the counts of the continuous optimum, rounded up to whole numbers.

    Raises:
        InfeasiblePlanError: A stage alone keeps floor, memory and cap with no count, or the rounded counts take
            more units of a type than there are.
    """
    needed = least_replicas_at_floor(problem, runs)
    table = fixed_stages(problem, runs).table
    x = balanced_stage_seconds(table, limit_seconds=problem.stage_seconds_limit * (1 + COMPARISON_TOLERANCE))
    rounded = np.ceil(replicas_within(table, x).value * (1 - _NEAR_INTEGER))
    # Clamped to the cap of its type, a stage may miss x; it still keeps the floor with the count it needs there.
    replicas = np.maximum(np.minimum(rounded, table.max_units), needed)
    return stages_within_caps(problem, runs, replicas.astype(np.int64).tolist(), method="rounding up")


def balanced_stage_seconds(table: StageTable, *, limit_seconds: float) -> float:
    """Return the stage time x of least continuous cost, within the limit.

    C(k) = x(k) * sum over stages s of price_s * k_s(x(k)), with x(k) the time of the reference stage on k units and
    k_s(x) as in `replicas_within`. Newton steps k <- k - C'(k) / C''(k) look for C' = 0 inside a bracket; a step that
    leaves it, or that a kink of k_s misleads, is replaced by its middle. Without clamps C rises with k, and
    x is the limit.

    The reference is the stage that is slowest on the fewest units that hold it; no longer x makes sense than its
    time there, and every shorter one belongs to some count of it.

    Args:
        table: The stages, shape (S,); each reaches the limit within its cap.
        limit_seconds: Longest stage time that is allowed; may be infinite.
    """
    reference = int(table.seconds(table.memory_replicas).argmax())
    low = float(replicas_within(table, limit_seconds).value[reference])
    high = float(table.max_units[reference])
    if _cost_curve(table, reference, low).slope >= 0:
        return float(_stage_curve(table, reference, low).value)
    k = low
    for _ in range(_MOST_STEPS):
        cost = _cost_curve(table, reference, k)
        low, high = (k, high) if cost.slope < 0 else (low, k)
        step = k - cost.slope / cost.curvature if cost.curvature > 0 else np.inf
        following = float(step) if low < step < high else (low + high) / 2
        if abs(following - k) <= _STEP_TOLERANCE * k:
            break
        k = following
    return float(_stage_curve(table, reference, k).value)


def replicas_within(table: StageTable, x: float) -> _Curve:
    r"""Return the continuous counts with which each stage takes the time x, and their derivatives by x.

    k_s(x) = max(m, alpha c / (x - (1 - alpha) c), beta d / (x - (1 - beta) d)) with c and d the compute and
    communication time on one unit and m >= 1 the least count whose memory holds the stage;
    infinite where x is below what endless units reach.
    """
    flat = np.zeros_like(table.memory_replicas)
    curves = [
        _Curve(table.memory_replicas, flat, flat),
        _amdahl_inverse(table.compute_seconds, table.compute_parallel_fraction, x),
        _amdahl_inverse(table.communication_seconds, table.communication_parallel_fraction, x),
    ]
    largest = np.argmax([curve.value for curve in curves], axis=0)
    return _Curve(*(np.choose(largest, part) for part in zip(*curves, strict=True)))


def _amdahl_inverse(unit_seconds: Floats, parallel_fraction: Floats, x: float) -> _Curve:
    parallel = unit_seconds * parallel_fraction
    slack = x - unit_seconds * (1 - parallel_fraction)
    with np.errstate(divide="ignore", invalid="ignore"):
        curve = _Curve(parallel / slack, -parallel / slack**2, 2 * parallel / slack**3)
    is_met = unit_seconds <= x
    is_out_of_reach = ~is_met & (slack <= 0)
    value = np.where(is_met, 0.0, np.where(is_out_of_reach, np.inf, curve.value))
    is_flat = is_met | is_out_of_reach
    return _Curve(value, np.where(is_flat, 0.0, curve.slope), np.where(is_flat, 0.0, curve.curvature))


def _stage_curve(table: StageTable, stage: int, k: float) -> _Curve:
    """Return ET(k) of one stage and its derivatives by k."""
    curves = [
        _Curve(
            unit_seconds * (1 - fraction + fraction / k),
            -unit_seconds * fraction / k**2,
            2 * unit_seconds * fraction / k**3,
        )
        for unit_seconds, fraction in (
            (table.compute_seconds[stage], table.compute_parallel_fraction[stage]),
            (table.communication_seconds[stage], table.communication_parallel_fraction[stage]),
        )
    ]
    return max(curves, key=lambda curve: float(curve.value))


def _cost_curve(table: StageTable, reference: int, k: float) -> _Curve:
    """Return C(k) and its derivatives by k; infinite, and rising, where a stage cannot keep up."""
    x = _stage_curve(table, reference, k)
    counts = replicas_within(table, float(x.value))
    rate = table.price_usd_per_hour @ counts.value
    if not np.isfinite(rate):
        return _Curve(rate, rate, np.zeros_like(rate))
    rate_slope = table.price_usd_per_hour @ counts.slope
    rate_curvature = table.price_usd_per_hour @ counts.curvature
    by_x = rate + x.value * rate_slope
    by_x_twice = 2 * rate_slope + x.value * rate_curvature
    return _Curve(x.value * rate, by_x * x.slope, by_x_twice * x.slope**2 + by_x * x.curvature)
