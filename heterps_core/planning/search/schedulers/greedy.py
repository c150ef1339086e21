"""Layer by layer the type of least partial cost, never revised: fast, and easily stuck in a local optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.schedulers.base import FoundPlan, Proof, Scheduler, detail_of, runs_of
from heterps_core.plans.scheduling_plan import Stage


class GreedyScheduler(Scheduler):
    """Settles the layers in order, each on the type with which the chain up to it costs least.

    The partial cost is that of the chain cut off after the layer, provisioned with whole counts; each one counts as
    an evaluation. L * T of them settle L layers among T types. Layers at the front that take no time anywhere are
    settled with the first one that does. With a smaller budget the last choice that it pays for settles all layers
    that are left at once. The seed changes nothing.
    """

    name = "greedy"
    default_budget_evaluations = 10_000
    """More than any chain of a thousand layers needs with ten types."""

    def find(
        self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int, proof: Proof
    ) -> FoundPlan:
        """Return the plan of the local choices; see `Scheduler.find`."""
        candidates = problem.device_type_names[:budget_evaluations]
        num_idle = next(
            index for index, layer in enumerate(problem.layers) if min(layer.compute_seconds.values())
        )
        num_choices = min(problem.num_layers - num_idle, budget_evaluations // len(candidates))
        settled: list[str] = []
        stages: tuple[Stage, ...] = ()
        for choice in range(num_choices):
            num_layers = num_idle + choice + 1 if choice + 1 < num_choices else problem.num_layers
            chain = replace(problem, layers=problem.layers[:num_layers])
            stages = _cheapest_turn(chain, settled, candidates, proof)
            settled += [stages[-1].device_type] * (num_layers - len(settled))
        return FoundPlan(stages=stages, num_evaluations=num_choices * len(candidates))


def _cheapest_turn(
    chain: SchedulingProblem,
    settled: Sequence[str],
    candidates: Sequence[str],
    proof: Proof,
) -> tuple[Stage, ...]:
    """Return the cheapest stages of a chain whose first layers are settled, the others sharing one type.

    Raises:
        InfeasiblePlanError: No type makes the chain feasible.
    """
    num_open = chain.num_layers - len(settled)
    turns: list[tuple[Stage, ...]] = []
    reasons: list[InfeasiblePlanError] = []
    for name in candidates:
        try:
            turns.append(balance_replicas(chain, runs_of([*settled, *[name] * num_open])))
        except InfeasiblePlanError as error:
            reasons.append(error)
    if not turns:
        proof.usd()  # its error says it better where no plan at all is feasible
        raise InfeasiblePlanError(
            reasons[-1].constraint,
            f"greedy has settled {len(settled)} layers in a way that no type can follow; with {candidates[-1]} "
            f"next, {detail_of(reasons[-1])}",
        )
    return min(turns, key=lambda stages: evaluate(chain, stages).cost_usd)
