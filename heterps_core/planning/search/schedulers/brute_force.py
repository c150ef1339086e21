"""Every plan, one after the other: the yardstick for small problems."""

from __future__ import annotations

import numpy as np

from heterps_core.errors import ConfigurationError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.schedulers.base import Proposals, ProposingScheduler

_PLANS_PER_BATCH = 4_096


class BruteForceScheduler(ProposingScheduler):
    """Rates all T (T + 1)^(L - 1) partitions, T^L of the papers' model, or refuses where the budget is smaller.

    A layer is of the stage of the layer before, or begins one, on any type that `neighbours_differ` allows.
    """

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
        num_choices = num_types if problem.neighbours_differ else num_types + 1
        num_plans = num_types * num_choices ** (num_layers - 1)
        if num_plans > budget_evaluations:
            raise ConfigurationError(
                f"brute-force rates all {num_types} * {num_choices}^{num_layers - 1} = {num_plans:.3g} plans, more "
                f"than the budget of {budget_evaluations} evaluations; raise --budget-evaluations or use 'exact'"
            )
        weights = num_choices ** np.arange(num_layers - 1, -1, -1, dtype=np.int64)
        for start in range(0, num_plans, _PLANS_PER_BATCH):
            numbers = np.arange(start, min(start + _PLANS_PER_BATCH, num_plans))
            # How many types on from the layer before: 0 stays in its stage, T is another stage on its type.
            steps = numbers[:, None] // weights % num_choices
            is_odd_stage = (steps > 0).cumsum(axis=1) % 2
            yield steps.cumsum(axis=1) % num_types + num_types * is_odd_stage
