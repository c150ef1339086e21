"""The number format in which workers send, where it is left to the planner."""

from __future__ import annotations

from collections.abc import Callable

from heterps_core.hardware import PAYLOAD_SHARE
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from tasks.running.progress import log_step
from tasks.scheduling import Searches

FULL, HALF = "float32", "bfloat16"

NARROW_BYTES_PER_S = 10e9 / 8 * PAYLOAD_SHARE
"""10 Gbit/s, of which tensors get a share: faster links carry float32 beside what workers compute."""

EXACT_COUNTS = 256
"""Whole numbers up to here are exact in bfloat16: lengths of sequences, which stages need, travel beside vectors."""

LEAST_SAVING = 0.01
"""Least share of a plan's cost that rounding to bfloat16 must save."""

Search = Callable[[str], tuple[SchedulingProblem, Searches]]


def search_with_wire_dtype(
    asked: str | None, search: Search, *, longest_list: int
) -> tuple[str, SchedulingProblem, Searches]:
    """Search a plan, and choose the number format of what its workers send unless one is asked for.

    That is bfloat16 where the plan in float32 has a link of less than 10 Gbit/s, no list has more than `EXACT_COUNTS`
    values, and the plan in bfloat16 costs at least a hundredth less by the cost model.

    Args:
        asked: Name in `WIRE_DTYPES`; None leaves the choice.
        search: Searches a plan with a format.
        longest_list: Most values of a list or sequence of a row.

    Returns:
        The format, the problem that has it, and what was found.

    Raises:
        InfeasiblePlanError: There is no plan.
    """
    wire_dtype = asked or FULL
    problem, searches = search(wire_dtype)
    link = _slowest_link_bytes_per_s(problem, searches)
    if asked is not None or longest_list > EXACT_COUNTS or link is None or link >= NARROW_BYTES_PER_S:
        return wire_dtype, problem, searches
    rounded_problem, rounded = search(HALF)
    cost_usd, rounded_usd = searches.chosen.plan.cost_usd, rounded.chosen.plan.cost_usd
    is_taken = rounded_usd <= (1 - LEAST_SAVING) * cost_usd
    log_step(
        "wire format",
        f"{HALF if is_taken else FULL}: with a link of {link * 8 / 1e9:.3g} Gbit/s the plan costs "
        f"{cost_usd:.4g} USD in {FULL} and {rounded_usd:.4g} in {HALF}",
    )
    return (HALF, rounded_problem, rounded) if is_taken else (FULL, problem, searches)


def _slowest_link_bytes_per_s(problem: SchedulingProblem, searches: Searches) -> float | None:
    """Return what the slowest link between workers of the chosen plan carries one way; None for one worker."""
    stages = searches.chosen.plan.stages
    if sum(stage.num_replicas for stage in stages) == 1:
        return None
    # A problem counts both directions.
    names = {name for stage in stages for name in stage.replicas_by_type}
    return min(problem.device_types[name].bandwidth_bytes_per_s for name in names) / 2
