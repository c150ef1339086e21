"""All layers on one device type: what a team gets that owns only one kind of machine."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, is_cpu
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.plan_rater import PlanRater
from heterps_core.planning.search.schedulers.base import Proof, Proposals, ProposingScheduler
from heterps_core.plans.scheduling_plan import Stage


class SingleTypeScheduler(ProposingScheduler):
    """Puts every layer on the best single type of one kind."""

    default_budget_evaluations = 64

    @abstractmethod
    def accepts(self, device_type: str) -> bool:
        """Return whether a device type is of this scheduler's kind."""

    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield one plan per device type of the kind."""
        types = [index for index, name in enumerate(problem.device_types) if self.accepts(name)]
        if not types:
            raise InfeasiblePlanError(
                "choice of device types",
                f"{self.name} finds none of its kind among {', '.join(problem.device_types)}",
            )
        yield np.repeat(np.array(types)[:, None], problem.num_layers, axis=1)

    def nothing_found(
        self, problem: SchedulingProblem, rater: PlanRater, proof: Proof
    ) -> InfeasiblePlanError:
        """Return why the first type of the kind cannot carry all layers."""
        name = next(filter(self.accepts, problem.device_types))
        try:
            balance_replicas(problem, [Stage(0, problem.num_layers - 1, name, 1)])
        except InfeasiblePlanError as error:
            _, _, detail = str(error).partition(": ")
            return InfeasiblePlanError(error.constraint, f"with every layer on {name}, {detail}")
        return super().nothing_found(problem, rater, proof)


class CpuOnlyScheduler(SingleTypeScheduler):
    """Puts every layer on the best CPU type."""

    name = "cpu-only"

    def accepts(self, device_type: str) -> bool:
        """Return whether a device type is a CPU."""
        return is_cpu(device_type)


class GpuOnlyScheduler(SingleTypeScheduler):
    """Puts every layer on the best accelerator type."""

    name = "gpu-only"

    def accepts(self, device_type: str) -> bool:
        """Return whether a device type is an accelerator."""
        return not is_cpu(device_type)
