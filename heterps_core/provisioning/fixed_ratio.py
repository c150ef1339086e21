"""Replica counts in fixed proportion, scaled until the floor is met: what the HeterPS paper compares itself with.

StaRatio and StaPSRatio (arXiv 2111.10635) size a cluster as a team does that buys one kind of machine: a number of
CPU cores to each accelerator, however the work is spread. `replica_balance.py` has the counts of least cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, is_cpu
from heterps_core.planning.provisioning.replica_balance import LayerRun
from heterps_core.planning.provisioning.whole_counts import least_replicas_at_floor, stages_within_caps
from heterps_core.plans.scheduling_plan import Stage

CORES_PER_ACCELERATOR = 6
"""The paper's GPU server as remembered, not checked: two processors of 24 cores beside 8 V100."""

SERVERS_PER_WORKER = 1
"""Assumed: the paper's figure is not known."""


def static_ratio_replicas(problem: SchedulingProblem, runs: Sequence[LayerRun]) -> tuple[Stage, ...]:
    """Return the runs as stages by StaRatio: n replicas on an accelerator, 6 n on a CPU type, with the least n.

    Raises:
        InfeasiblePlanError: No n keeps floor, memory and caps; names the constraint that fails.
    """
    shares = [_worker_share(run) for run in runs]
    return _scaled(problem, runs, shares, method="StaRatio")


def static_server_ratio_replicas(problem: SchedulingProblem, runs: Sequence[LayerRun]) -> tuple[Stage, ...]:
    """Return the runs as stages by StaPSRatio: StaRatio's workers, and parameter servers in proportion to them.

    The planning contract has no parameter servers of their own. A stage on a CPU type that holds sharded state does
    their work, so it gets as many replicas as all other stages have together, or n where there is no other.

    Raises:
        InfeasiblePlanError: As `static_ratio_replicas`.
    """
    is_server = [_holds_sharded_state_on_cpu(problem, run) for run in runs]
    num_workers = sum(_worker_share(run) for run, serves in zip(runs, is_server, strict=True) if not serves)
    shares = [
        SERVERS_PER_WORKER * max(num_workers, 1) if serves else _worker_share(run)
        for run, serves in zip(runs, is_server, strict=True)
    ]
    return _scaled(problem, runs, shares, method="StaPSRatio")


def _worker_share(run: LayerRun) -> int:
    return CORES_PER_ACCELERATOR if is_cpu(run.device_type) else 1


def _holds_sharded_state_on_cpu(problem: SchedulingProblem, run: LayerRun) -> bool:
    layers = problem.layers[run.first_layer : run.last_layer + 1]
    return is_cpu(run.device_type) and any(layer.is_sharded for layer in layers)


def _scaled(
    problem: SchedulingProblem, runs: Sequence[LayerRun], shares: Sequence[int], *, method: str
) -> tuple[Stage, ...]:
    """Return stages with n times their shares as counts, n being the least that gives each what it needs."""
    needed = least_replicas_at_floor(problem, runs).tolist()
    scale = max(-(-count // share) for count, share in zip(needed, shares, strict=True))
    return stages_within_caps(problem, runs, [scale * share for share in shares], method=method)
