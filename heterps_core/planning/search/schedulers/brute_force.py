"""Every assignment of layers to device types, one after the other: the yardstick for small problems."""

from __future__ import annotations

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.schedulers.base import Proposals, ProposingScheduler

_PLANS_PER_BATCH = 4_096


class BruteForceScheduler(ProposingScheduler):
    """Rates all T^L assignments, or refuses where the budget does not cover them."""

    name = "brute-force"
    default_budget_evaluations = 5_000_000
    """About a minute on one core."""

    takes_all_types = True

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield all assignments in the order of counting, the last layer fastest.

        Raises:
            ConfigurationError: The budget is smaller than the number of assignments.
        """
        num_types, num_layers = len(problem.device_types), problem.num_layers
        num_plans = num_types**num_layers
        if num_plans > budget_evaluations:
            raise ConfigurationError(
                f"brute-force rates all {num_types}^{num_layers} = {num_plans:.3g} assignments, more than the "
                f"budget of {budget_evaluations} evaluations; raise --budget-evaluations or use 'exact'"
            )
        weights = num_types ** np.arange(num_layers - 1, -1, -1, dtype=np.int64)
        for start in range(0, num_plans, _PLANS_PER_BATCH):
            numbers = np.arange(start, min(start + _PLANS_PER_BATCH, num_plans))
            yield numbers[:, None] // weights % num_types
