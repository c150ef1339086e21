"""The device types that methods which propose plans choose among, where a problem has many.

From a hundred types such a method draws none of the good plans within its budget. The proof has all types, so its
plan is taken where a type that was left out makes a cheaper one.

The proof leaves out no type that another one dominates, as its cap adds to the other's. Plans with two neighbouring
stages on one type come from the proof, brute force and the genetic search; other methods propose runs of layers, as
cuts within them would widen what they have to learn.
"""

from __future__ import annotations

import numpy as np

from heterps_core.planning.cost_model.run_tables import run_table
from heterps_core.planning.cost_model.step_model import num_microbatches_of
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem

MOST_TYPES = 16
"""As many as the largest problems on which the methods were compared."""

_MOST_CUTS, _NUM_STAGE_TIMES = 8, 12


def with_promising_types(problem: SchedulingProblem) -> SchedulingProblem:
    """Return the problem with at most `MOST_TYPES` device types.

    These are the types on which the whole chain, or its part before or after a cut, costs least as a stage of its
    own: the best one for each part, then the next best ones.
    """
    if len(problem.device_types) <= MOST_TYPES:
        return problem
    last = problem.num_layers - 1
    cuts = np.unique(np.linspace(0, last - 1, _MOST_CUTS).astype(int)).tolist() if last else []
    runs = [(0, last), *((0, cut) for cut in cuts), *((cut + 1, last) for cut in cuts)]
    table = run_table(problem, runs, num_microbatches=num_microbatches_of(problem, 2))
    slowest = table.seconds(table.fewest_replicas)
    high = min(slowest[np.isfinite(slowest)].max(initial=0.0), problem.stage_seconds_limit)
    low = min(float(table.fastest_seconds().min()), high)
    if low <= 0:
        return problem
    stage_seconds = np.geomspace(low, high, _NUM_STAGE_TIMES)
    usd_per_hour = table.usd_per_hour(table.least_replicas(stage_seconds))
    costs = (stage_seconds[:, None, None] * usd_per_hour).min(axis=0)
    names: dict[str, None] = {}
    for rank in costs.argsort(axis=1).T:
        for run, index in enumerate(rank.tolist()):
            if np.isfinite(costs[run, index]) and len(names) < MOST_TYPES:
                names[problem.device_type_names[index]] = None
    return problem.of_types(names) if names else problem
