"""The rule of thumb of the HeterPS paper (arXiv 2111.10635): data-intensive layers on CPU, the rest on accelerators.

A data-intensive layer is one whose state is sharded, as embedding tables are; a chain without any counts its first
layer, which reads the samples. What is a CPU is decided as in `single_type.py`.
"""

from __future__ import annotations

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, is_cpu
from heterps_core.planning.search.plan_rater import Assignments
from heterps_core.planning.search.schedulers.base import Proposals, ProposingScheduler


class HeuristicScheduler(ProposingScheduler):
    """Follows the rule with each pair of a CPU type and an accelerator type, and keeps the cheapest."""

    name = "heuristic"
    default_budget_evaluations = 1_024
    rule = "by the rule of thumb with"
    takes_all_types = True

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield the rule's plan for every pair of types."""
        yield rule_of_thumb_plans(problem)


def rule_of_thumb_plans(problem: SchedulingProblem) -> Assignments:
    """Return the rule's plan for every pair of a CPU type and an accelerator type, shape (P, L).

    Raises:
        InfeasiblePlanError: There is no pair, for want of one of the kinds.
    """
    cpus = [index for index, name in enumerate(problem.device_types) if is_cpu(name)]
    accelerators = [index for index, name in enumerate(problem.device_types) if not is_cpu(name)]
    if not cpus or not accelerators:
        raise InfeasiblePlanError(
            "choice of device types",
            f"the rule of thumb needs a CPU type and an accelerator type, but the problem has "
            f"{', '.join(problem.device_types)}; use 'exact' or another scheduler",
        )
    is_data_intensive = np.array([layer.is_sharded for layer in problem.layers])
    if not is_data_intensive.any():
        is_data_intensive[0] = True
    pairs = np.array([(cpu, accelerator) for cpu in cpus for accelerator in accelerators])
    return np.where(is_data_intensive, pairs[:, :1], pairs[:, 1:])
