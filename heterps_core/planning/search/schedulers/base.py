"""The contract of every scheduler, and the ask / rate / tell loop that most of them share.

`Scheduler.search` is all that callers know. A method that only proposes plans derives from
`ProposingScheduler` and writes one generator; a method that constructs the optimum derives from `Scheduler`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import numpy as np

from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from heterps_core.field_rules import LARGEST_NUMBER
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.replica_balance import balance_replicas
from heterps_core.planning.search.optimum import MAX_SECONDS, proven_bound_usd
from heterps_core.planning.search.plan_rater import Assignments, PlanRater, Ratings
from heterps_core.planning.search.promising_types import with_promising_types
from heterps_core.planning.search.search_result import HistoryPoint, SearchResult
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage

Proposals = Generator[Assignments, Ratings, None]
"""Yields plans to rate (ask) and is sent their ratings (tell)."""

_SUMMATION_TOLERANCE = 1e-9
"""The same plan summed in another order differs in the last digits, relatively; more is a wrong proof."""


class Proof:
    """The cost that no plan undercuts: known already, or proven when it is asked for."""

    def __init__(self, problem: SchedulingProblem, known_usd: float | None, max_seconds: float) -> None:
        self.problem, self.max_seconds = problem, max_seconds
        self.seconds = 0.0

        self._usd = known_usd

    def usd(self, known: Sequence[Stage] = ()) -> float:
        """Return the cost; a plan that is `known` shortens the proof.

        Raises:
            InfeasiblePlanError: There is no plan; names the constraint and how far it is missed.
        """
        if self._usd is None:
            started = time.perf_counter()
            self._usd = proven_bound_usd(self.problem, known=known, seconds=self.max_seconds)
            self.seconds = time.perf_counter() - started
        return self._usd


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPlan:
    """What a method found."""

    stages: tuple[Stage, ...]
    num_evaluations: int
    history: Sequence[HistoryPoint] = ()
    proven_usd: float | None = None
    """A cost that no plan undercuts, where the method proves one itself."""


class Scheduler(ABC):
    """A search for the cheapest plan of a problem.

    Life cycle: a scheduler holds settings only. `search` may be called any number of times, with any
    problems; it keeps nothing between calls, and the same problem, budget and seed give the same plan.
    Callers use `search`, which takes the time and adds the proof; methods write `find`.
    """

    name: ClassVar[str]
    default_budget_evaluations: ClassVar[int]
    """What a user gets who names no budget: enough for this method to do well on 16 layers x 4 types."""

    def search(
        self,
        problem: SchedulingProblem,
        *,
        budget_evaluations: int,
        seed: int,
        proven_usd: float | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> SearchResult:
        """Return the best plan that was found, with its proof.

        Args:
            proven_usd: A cost that no plan undercuts, where one is proven already; else it is proven here.
            max_seconds: After which the proof ends with a gap; `exact` then returns its best plan.

        Raises:
            ConfigurationError: The budget is below 1, or too small for a method that cannot do with less.
            InfeasiblePlanError: No plan was found; names the constraint and how far it is missed.
        """
        check_budget(budget_evaluations)
        proof = Proof(problem, proven_usd, max_seconds)
        started = time.perf_counter()
        found = self.find(problem, budget_evaluations=budget_evaluations, seed=seed, proof=proof)
        search_seconds = time.perf_counter() - started - proof.seconds
        evaluation = evaluate(problem, found.stages)
        bound_usd = proof.usd(found.stages) if found.proven_usd is None else found.proven_usd
        bound_usd = _checked_bound(problem, evaluation.cost_usd, bound_usd, scheduler=self.name)
        first_point = HistoryPoint(found.num_evaluations, search_seconds, evaluation.cost_usd)
        return SearchResult(
            plan=SchedulingPlan(
                scheduler=self.name,
                seed=seed,
                stages=found.stages,
                throughput_samples_per_s=evaluation.throughput_samples_per_s,
                price_usd_per_hour=evaluation.price_usd_per_hour + problem.extra_costs.machine_usd_per_hour,
                cost_usd=evaluation.cost_usd,
                cost_lower_bound_usd=bound_usd,
                optimality_gap=_gap(evaluation.cost_usd, bound_usd),
                num_evaluations=found.num_evaluations,
                search_seconds=search_seconds,
            ),
            evaluation=evaluation,
            history=tuple(found.history) or (first_point,),
            search_seconds=search_seconds,
            certificate_seconds=proof.seconds,
        )

    @abstractmethod
    def find(
        self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int, proof: Proof
    ) -> FoundPlan:
        """Return the best plan of this method.

        Args:
            proof: Asked where no plan is found: its error says better than the method why there is none.

        Raises:
            ConfigurationError: The budget is too small.
            InfeasiblePlanError: No plan was found; names the constraint and how far it is missed.
        """


class ProposingScheduler(Scheduler):
    """A scheduler that proposes plans in batches and learns from their ratings.

    `find` runs the generator of `propose`: each batch it yields is cut to what is left of the
    budget, rated with the best replica counts, and its ratings are sent back. The generator may
    end early; it is closed when the budget is spent.
    """

    rule: ClassVar[str | None] = None
    """Where the plans follow from a rule, how it places layers; such as "with every layer on"."""

    takes_all_types: ClassVar[bool] = False
    """Whether plans are proposed from all device types, however many; else from promising ones."""

    @abstractmethod
    def propose(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> Proposals:
        """Yield batches of layer-to-type assignments; receive the ratings of each batch."""

    def find(
        self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int, proof: Proof
    ) -> FoundPlan:
        """Rate what is proposed until the proposals end or the budget does; see `Scheduler.find`."""
        rater = self.rated(problem, budget_evaluations=budget_evaluations, seed=seed)
        stages = rater.best_stages
        if stages is None:
            raise self._nothing_found(problem, rater.num_evaluations, proof)
        return FoundPlan(stages=stages, num_evaluations=rater.num_evaluations, history=rater.history)

    def rated(self, problem: SchedulingProblem, *, budget_evaluations: int, seed: int) -> PlanRater:
        """Return the rater of all that was proposed, which holds the best plan, if any is feasible."""
        promising = problem if self.takes_all_types else with_promising_types(problem)
        rater = PlanRater(promising, budget_evaluations=budget_evaluations)
        if promising is not problem:
            # One type for all layers is the best plan of many a small night, and rarely drawn.
            types = np.arange(len(promising.device_types))
            rater.rate(np.repeat(types[:, None], problem.num_layers, axis=1))
        proposals = self.propose(promising, budget_evaluations=budget_evaluations, seed=seed)
        try:
            batch = next(proposals)
            while rater.num_evaluations_left > 0:
                batch = proposals.send(rater.rate(batch))
        except StopIteration:
            pass
        finally:
            proposals.close()
        return rater

    def _nothing_found(
        self, problem: SchedulingProblem, num_evaluations: int, proof: Proof
    ) -> InfeasiblePlanError:
        """Return why there is no plan: what a rule's first plan breaks, or the problem, or that none was met."""
        try:
            if self.rule is not None:
                first = next(self.propose(problem, budget_evaluations=1, seed=0))[0]
                balance_replicas(problem, runs_of([problem.device_type_names[index] for index in first]))
        except InfeasiblePlanError as error:
            types = " and ".join(dict.fromkeys(problem.device_type_names[index] for index in first))
            return InfeasiblePlanError(error.constraint, f"{self.rule} {types}, {detail_of(error)}")
        try:
            proof.usd()
        except InfeasiblePlanError as error:
            return error
        return InfeasiblePlanError(
            "constraints",
            f"{self.name} met no feasible plan in {num_evaluations} evaluations, though one exists; "
            f"allow more evaluations or use the scheduler 'exact'",
        )


def runs_of(types: Sequence[str]) -> list[Stage]:
    """Return the stages that the type of each layer makes, of one replica each."""
    runs: list[Stage] = []
    for name, members in groupby(types):
        first = runs[-1].last_layer + 1 if runs else 0
        runs.append(Stage(first, first + len(list(members)) - 1, name, 1))
    return runs


def detail_of(error: InfeasiblePlanError) -> str:
    """Return an error's text without the name of its constraint."""
    return str(error).partition(": ")[2]


def check_budget(budget_evaluations: int) -> None:
    """Check that a search may rate at least one plan.

    Raises:
        ConfigurationError: It may not.
    """
    if budget_evaluations < 1:
        raise ConfigurationError(
            f"a search needs a budget of at least 1 evaluation, got {budget_evaluations}"
        )


def _gap(cost_usd: float, bound_usd: float) -> float:
    """Return how far a cost lies above a bound, as a share of it; the largest number where the bound is nothing."""
    if cost_usd == bound_usd:
        return 0.0
    return cost_usd / bound_usd - 1 if bound_usd > 0 else LARGEST_NUMBER


def _checked_bound(
    problem: SchedulingProblem, cost_usd: float, proven_usd: float, *, scheduler: str
) -> float:
    """Return the proven bound, which is the cost where it misses that by rounding alone.

    Raises:
        AssertionError: The plan costs less than the bound, so the proof is wrong: a defect of the planner.
    """
    if any(unit.price_usd_per_hour == 0 for unit in problem.device_types.values()):
        # Searches take machines that cost nothing for cheap ones (`LEAST_USD_PER_HOUR`), and so does the proof.
        proven_usd = min(proven_usd, cost_usd)
    if cost_usd < proven_usd * (1 - _SUMMATION_TOLERANCE):
        raise AssertionError(
            f"no plan of {problem.model!r} may cost less than its proven bound of "
            f"{proven_usd:.9g} USD, but {scheduler} found one of {cost_usd:.9g} USD; "
            f"this is a defect of the planner, please report it with the problem file"
        )
    return cost_usd if proven_usd >= cost_usd * (1 - _SUMMATION_TOLERANCE) else proven_usd
