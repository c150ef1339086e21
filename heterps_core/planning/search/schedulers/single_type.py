"""All layers on one device type: what a team gets that owns only one kind of machine."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, is_cpu
from heterps_core.planning.search.schedulers.base import Proposals, ProposingScheduler


class CpuOnlyScheduler(ProposingScheduler):
    """Puts every layer on the best CPU type."""

    name = "cpu-only"
    default_budget_evaluations = 64
    rule = "with every layer on"
    takes_all_types = True
    wants_cpus: ClassVar[bool] = True

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield one plan per device type of the kind."""
        types = [index for index, name in enumerate(problem.device_types) if is_cpu(name) is self.wants_cpus]
        if not types:
            raise InfeasiblePlanError(
                "choice of device types",
                f"{self.name} finds none of its kind among {', '.join(problem.device_types)}",
            )
        yield np.repeat(np.array(types)[:, None], problem.num_layers, axis=1)


class GpuOnlyScheduler(CpuOnlyScheduler):
    """Puts every layer on the best accelerator type."""

    name = "gpu-only"
    wants_cpus = False
