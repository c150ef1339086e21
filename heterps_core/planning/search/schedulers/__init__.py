"""The one place where schedulers are listed.

A member is named as "module:class" and loaded when it is asked for, so that `exact` starts without
loading torch or Optuna. A new scheduler is one file in this folder and one line in `SCHEDULERS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from heterps_core.errors import UnknownNameError

if TYPE_CHECKING:
    from heterps_core.planning.search.schedulers.base import Scheduler

__all__ = ["SCHEDULERS", "get_scheduler"]

SCHEDULERS = {
    "bayesian": "heterps_core.planning.search.schedulers.bayesian:BayesianScheduler",
    "brute-force": "heterps_core.planning.search.schedulers.brute_force:BruteForceScheduler",
    "cpu-only": "heterps_core.planning.search.schedulers.single_type:CpuOnlyScheduler",
    "exact": "heterps_core.planning.search.schedulers.exact:ExactScheduler",
    "genetic": "heterps_core.planning.search.schedulers.genetic:GeneticScheduler",
    "gpu-only": "heterps_core.planning.search.schedulers.single_type:GpuOnlyScheduler",
    "greedy": "heterps_core.planning.search.schedulers.greedy:GreedyScheduler",
    "heuristic": "heterps_core.planning.search.schedulers.heuristic:HeuristicScheduler",
    "reinforce": "heterps_core.planning.search.schedulers.reinforce:ReinforceScheduler",
    "reinforce-paper": "heterps_core.planning.search.schedulers.reinforce_paper:ReinforcePaperScheduler",
    "reinforce-rnn": "heterps_core.planning.search.schedulers.reinforce_paper:ReinforceRnnScheduler",
    "tapp": "heterps_core.planning.search.schedulers.tapp:TappScheduler",
}


def get_scheduler(name: str) -> Scheduler:
    """Return a new scheduler with its default settings.

    Raises:
        UnknownNameError: No scheduler has this name; the message lists the known ones.
    """
    if name not in SCHEDULERS:
        raise UnknownNameError("scheduler", name, SCHEDULERS)
    module_name, class_name = SCHEDULERS[name].split(":")
    scheduler: Scheduler = getattr(import_module(module_name), class_name)()
    return scheduler
