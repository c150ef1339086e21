"""From a planning problem to the plan of a night, and to the reports beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from heterps_core.errors import InfeasiblePlanError
from heterps_core.hardware import InstanceOffer
from heterps_core.machine import num_cores
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.explain.explanation import PlanExplanation, default_detail, explain_plan
from heterps_core.planning.explain.reasons import OtherPlan
from heterps_core.planning.explain.variants import cheapest_plan
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning import offer_choice
from heterps_core.planning.search.optimum import MAX_SECONDS, find_optimum
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.planning.simulate.dry_run import DryRunPrediction, predict_dry_run
from heterps_core.planning.simulate.plan_simulation import PlanSimulation, simulate_plan
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.text_table import usd_text
from heterps_core.training.job import DELAYED, TrainingConfig
from heterps_core.units import SECONDS_PER_MINUTE
from tasks.planning.deadline import Deadline
from tasks.planning.problems import make_problems, problem_of_cheapest_zone
from tasks.profiling import PlannedJob, ProfiledModel
from tasks.steps import step

_PROVING_SCHEDULER = "exact"
_COMPARED_SCHEDULERS = ("exact", "reinforce", "bayesian", "cpu-only", "gpu-only")
"""Searched for every report beside the chosen one."""

_SPEED_ON_SPOT, _MOST_FOR_SPEED = 2.0, 1.1
"""How many times as fast as it must be a plan on spot is made, where that costs at most so many times as much: on
recorded markets nights that can wait cost a quarter less (docs/log, 2026-11)."""

_MOST_FLOORS = 4
"""Floors that are asked for one after the other where machines start too late."""

SAME_COST = 1e-9
"""Relative difference of two costs that is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searches:
    """What each search method found for the same problem."""

    results: Mapping[str, SearchResult]
    without_plan: Mapping[str, InfeasiblePlanError]
    """Methods that found none, with the reason; never the one whose plan is taken."""

    taken: str
    """The method whose plan is taken: of those searched before a launch the one with the cheapest plan."""

    @property
    def chosen(self) -> SearchResult:
        """The plan that is taken."""
        return self.results[self.taken]


@step("search plan", task_run_name="search plan with {scheduler}")
def search_plan(
    problem: SchedulingProblem,
    *,
    scheduler: str,
    budget_evaluations: int,
    seed: int,
    max_seconds: float = MAX_SECONDS,
    proven_usd: float | None = None,
) -> SearchResult | InfeasiblePlanError:
    """Search the cheapest plan with one method; see `Scheduler.search`.

    That a method finds no plan is an answer and no failure of the task: cpu-only cannot reach every floor.
    """
    try:
        return get_scheduler(scheduler).search(
            problem,
            budget_evaluations=budget_evaluations,
            seed=seed,
            proven_usd=proven_usd,
            max_seconds=max_seconds,
        )
    except InfeasiblePlanError as error:
        return error


def search_chosen(
    problem: SchedulingProblem,
    *,
    scheduler: str,
    budget_evaluations: int,
    seed: int,
    max_seconds: float = MAX_SECONDS,
) -> Searches:
    """Search with the method that is asked for and with the one that proves, and take the cheaper plan.

    Where both cost the same, the plan of the method that is asked for is taken. The proof ends after `max_seconds` at
    the latest, with a gap.

    Raises:
        InfeasiblePlanError: There is no plan; names the constraint and by how far it is missed.
    """
    proven = search_plan(
        problem,
        scheduler=_PROVING_SCHEDULER,
        budget_evaluations=budget_evaluations,
        seed=seed,
        max_seconds=max_seconds,
    )
    if not isinstance(proven, SearchResult):
        raise proven
    results = {_PROVING_SCHEDULER: proven}
    if scheduler == _PROVING_SCHEDULER:
        return Searches(results=results, without_plan={}, taken=scheduler)
    asked = search_plan(
        problem,
        scheduler=scheduler,
        budget_evaluations=budget_evaluations,
        seed=seed,
        proven_usd=proven.plan.cost_lower_bound_usd,
    )
    if not isinstance(asked, SearchResult):
        return Searches(results=results, without_plan={scheduler: asked}, taken=_PROVING_SCHEDULER)
    results[scheduler] = asked
    is_taken = asked.plan.cost_usd <= proven.plan.cost_usd * (1 + SAME_COST)
    return Searches(results=results, without_plan={}, taken=scheduler if is_taken else _PROVING_SCHEDULER)


def search_in_time(
    problem: SchedulingProblem,
    steady_problem: SchedulingProblem | None,
    deadline: Deadline | None,
    *,
    search: Callable[[SchedulingProblem], Searches],
    max_usd_per_hour: float | None = None,
) -> tuple[SchedulingProblem, Searches]:
    """Search a plan that is in time although spot machines may be interrupted, or does without them.

    A plan with spot machines must be so fast that an interruption leaves it in time: the run then asks again, with
    the time and the work that are left. Where speed costs little, the plan is faster still, so that there is time to
    wait for spot machines (`Deadline.spot_until`). Where all that costs more than on-demand machines alone, or is out
    of reach, these are taken.

    Args:
        problem: With all device types that may be bought.
        steady_problem: The same without spot; None where nothing else may be bought.
        deadline: None where none must be kept: then the costs of interruptions alone decide.
        search: Searches one problem.
        max_usd_per_hour: No plan is made faster than it must be where it would cost more.

    Returns:
        The problem that was searched, with its floor, and what was found.

    Raises:
        InfeasiblePlanError: There is no plan.
    """
    if deadline is None:
        return problem, search(problem)
    problem, searches = _ready_in_time(problem, deadline.training_seconds, deadline, search)
    if searches.chosen.evaluation.interruptions_per_hour == 0:
        return problem, searches
    in_time = False
    least = searches
    for floor in (deadline.spot_floor_samples_per_s, _SPEED_ON_SPOT * deadline.spot_floor_samples_per_s):
        if math.isinf(floor):
            break
        faster = replace(
            problem, throughput_floor_samples_per_s=max(floor, problem.throughput_floor_samples_per_s)
        )
        try:
            faster, found = _ready_in_time(faster, deadline.num_samples / floor, deadline, search)
        except InfeasiblePlanError:
            break
        plan = found.chosen.plan
        if in_time and (
            plan.cost_usd > _MOST_FOR_SPEED * least.chosen.plan.cost_usd
            or (max_usd_per_hour is not None and plan.price_usd_per_hour > max_usd_per_hour)
        ):
            break
        problem, searches, in_time = faster, found, True
    if steady_problem is not None:
        try:
            steady_problem, steady = _ready_in_time(
                steady_problem, deadline.training_seconds, deadline, search
            )
        except InfeasiblePlanError:
            return problem, searches
        if not in_time or steady.chosen.plan.cost_usd <= searches.chosen.plan.cost_usd:
            return steady_problem, steady
    return problem, searches


def _ready_in_time(
    problem: SchedulingProblem,
    seconds: float,
    deadline: Deadline,
    search: Callable[[SchedulingProblem], Searches],
) -> tuple[SchedulingProblem, Searches]:
    """Search a plan whose start-up and steps are over in time; return the problem with its floor.

    The floor counts the earliest start. Where a plan starts so much later that it is late, a higher floor is asked
    for; the bound of the first search stays, as no plan does with a lower floor.

    Raises:
        InfeasiblePlanError: There is no plan, or none that was met is in time.
    """
    bound_usd = math.inf
    for _ in range(_MOST_FLOORS):
        searches = search(problem)
        bound_usd = min(bound_usd, searches.chosen.plan.cost_lower_bound_usd)
        evaluation = searches.chosen.evaluation
        left_s = seconds - evaluation.start_seconds / (1 + problem.pause_share)
        floor = deadline.num_samples / max(left_s, 1e-3)
        if evaluation.throughput_samples_per_s >= floor * (1 - SAME_COST):
            results = {
                name: replace(each, plan=replace(each.plan, cost_lower_bound_usd=bound_usd))
                for name, each in searches.results.items()
            }
            return problem, replace(searches, results=results)
        problem = replace(problem, throughput_floor_samples_per_s=floor)
    raise InfeasiblePlanError(
        "throughput floor",
        f"machines that reach it start {evaluation.start_seconds:.0f} s later than the first ones, which is too late",
    )


def with_compared(
    searches: Searches, problem: SchedulingProblem, *, budget_evaluations: int, seed: int
) -> Searches:
    """Search with the other methods too, which a report compares; machines need not wait for them.

    Each may rate as many plans as the chosen one, but no more than its own default: a Bayesian search of 2,000 plans
    takes longer than many a night's training. With one device type there is nothing to place, and none is searched.
    """
    if len(problem.device_types) == 1:
        return searches
    results, without_plan = dict(searches.results), dict(searches.without_plan)
    proven_usd = results[_PROVING_SCHEDULER].plan.cost_lower_bound_usd
    for name in _COMPARED_SCHEDULERS:
        if name in results or name in without_plan:
            continue
        most = min(budget_evaluations, get_scheduler(name).default_budget_evaluations)
        found = search_plan(
            problem, scheduler=name, budget_evaluations=most, seed=seed, proven_usd=proven_usd
        )
        if isinstance(found, SearchResult):
            results[name] = found
        else:
            without_plan[name] = found
    return replace(searches, results=results, without_plan=without_plan)


def price_on(
    offers: Sequence[InstanceOffer],
    profiled: ProfiledModel,
    job: PlannedJob,
    device_types: Sequence[str],
    *,
    num_epochs: int,
) -> str:
    """Return the machines, the time and the cost of the cheapest plan for a job on rented machines, in one line.

    Raises:
        ProvisioningError, InfeasiblePlanError: There is no plan.
    """
    problems = make_problems(
        profiled,
        offers,
        job,
        device_types=device_types,
        num_epochs=num_epochs,
        throughput_floor_samples_per_s=0.0,
    )
    problem = problem_of_cheapest_zone(problems)
    found = find_optimum(problem)
    machines = offer_choice.choose_instances(found.stages, offers).machines
    minutes = evaluate(problem, found.stages).run_seconds / SECONDS_PER_MINUTE
    return f"{machines} would train this in {minutes:,.1f} minutes and cost {usd_text(found.cost_usd)}"


def cheaper_plan(problem: SchedulingProblem, chosen: SearchResult) -> OtherPlan | None:
    """Return the cheapest plan of a problem with other device types; None unless it costs less than a chosen plan."""
    found = cheapest_plan(problem)
    if found is None or found.cost_usd >= chosen.plan.cost_usd * (1 - SAME_COST):
        return None
    extra_usd = found.cost_usd - chosen.plan.cost_usd
    return OtherPlan(hardware="", stages=found.stages, extra_usd=extra_usd)


@step("explain plan")
def explain_choice(
    problem: SchedulingProblem, result: SearchResult, not_rentable: OtherPlan | None = None, region: str = ""
) -> PlanExplanation:
    """Explain why a plan was chosen, what would change the choice and what more throughput costs."""
    return explain_plan(
        problem,
        result.plan.stages,
        detail=default_detail(problem),
        proven_usd=result.plan.cost_lower_bound_usd,
        not_rentable=not_rentable,
        region=region,
    )


@step("simulate plan")
def simulate_choice(problem: SchedulingProblem, result: SearchResult) -> PlanSimulation:
    """Run the plan's pipeline step by step, in the order in which the trainer would."""
    return simulate_plan(problem, result.plan.stages)


def predict_dry_run_here(
    profiled: ProfiledModel, stages: Sequence[Stage], config: TrainingConfig, *, decoded_share: float = 0.0
) -> DryRunPrediction:
    """Predict the dry run's speed from the profile of this machine, before anything is trained."""
    return predict_dry_run(
        profiled.graph,
        profiled.local_profile,
        stages,
        batch_size=config.batch_size,
        num_microbatches=config.num_microbatches,
        num_cores=num_cores(),
        drains=config.update_mode != DELAYED,
        decoded_share=decoded_share,
    )
