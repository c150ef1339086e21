"""Every search method against the same problems, with the same evaluations and seeds, one after the other.

Each model makes two problems, one without a floor and one with a floor and caps that bind, and each of them is
searched by the papers' closed form of a step and by the trainer's own.

That a method finds no plan, takes no such problem, fails or does not end is an answer with its reason; nothing that
one method does ends the comparison.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.hardware import InstanceOffer
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.training.job import NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT
from infra.workspace import Workspace
from tasks.data import PreparedClicks
from tasks.profiling import PlannedJob, ProfiledModel, planned_job, profile_layers
from tasks.running.progress import log_step
from tasks.scheduling import make_problem, search_plan

WARM_UP_EVALUATIONS = 256
"""Of each method before the clock runs, as the first search of a process loads parts of torch."""


NO_FLOOR, FLOOR_AND_CAPS, AS_GIVEN = "no floor", "floor and caps", "as given"
"""Conditions of the problems of a model, and of one from a file."""

CAPPED_SHARE, FLOOR_SHARE = 0.75, 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedProblem:
    """A problem that the methods are compared on."""

    name: str
    """Of the model, or the file as it was given."""

    problem: SchedulingProblem
    conditions: str = AS_GIVEN
    estimated_device_types: tuple[str, ...] = ()
    """Whose times are a roofline and not a measurement; not known of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSummary:
    """What one method found for one problem over all seeds."""

    method: str
    num_seeds: int
    results: tuple[SearchResult, ...]
    """Of the seeds that led to a plan, in their order."""

    cpu_seconds: tuple[float, ...]
    """Of the searches with their proofs, also of those without a plan."""

    remark: str = ""
    """Why there are no more results, or what is different about them."""

    @property
    def gaps(self) -> tuple[float, ...]:
        """How far each plan may be above the cheapest one, as a share of the proven bound."""
        return tuple(result.plan.optimality_gap for result in self.results)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemOutcome:
    """What all methods found for one problem."""

    compared: ComparedProblem
    summaries: tuple[MethodSummary, ...]
    """In the order in which the methods were given."""

    @property
    def best(self) -> SearchResult | None:
        """The cheapest plan that any method found with any seed."""
        results = [result for summary in self.summaries for result in summary.results]
        return min(results, key=lambda result: result.plan.cost_usd, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All methods on all problems."""

    outcomes: tuple[ProblemOutcome, ...]
    left_out: Mapping[str, str]
    """Models of which no problem could be made, with the reason."""

    num_seeds: int
    budget_evaluations: int
    cpu_seconds: float
    """Of all searches with their proofs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What every method is given."""

    budget_evaluations: int
    num_seeds: int
    max_seconds: float
    """Of one search with its proof, in wall time; a method that takes longer is given up on this problem."""


def load_problems(files: Sequence[str]) -> list[ComparedProblem]:
    """Read problem files.

    Raises:
        ConfigurationError: A file cannot be read or is no problem; the message names the file and the field.
    """
    problems = []
    for file in dict.fromkeys(files):
        try:
            problems.append(ComparedProblem(name=file, problem=SchedulingProblem.load(Path(file))))
        except ConfigurationError as error:
            raise ConfigurationError(str(error) if file in str(error) else f"{file}: {error}") from error
    return problems


def problems_of_models(
    workspace: Workspace,
    models: Sequence[str],
    clicks: PreparedClicks,
    offers: Sequence[InstanceOffer],
    *,
    device_types: Sequence[str],
    throughput_floor_samples_per_s: float,
) -> tuple[list[ComparedProblem], dict[str, str]]:
    """Make the problems of a night's job for each model; return them, and what cannot be made with the reason."""
    problems: list[ComparedProblem] = []
    left_out: dict[str, str] = {}
    for model in dict.fromkeys(models):
        try:
            job, profiled = profiled_job(workspace, model, clicks, device_types)
            problem = make_problem(
                profiled,
                offers,
                job,
                device_types=device_types,
                num_epochs=1,
                throughput_floor_samples_per_s=throughput_floor_samples_per_s,
            )
            under = {NO_FLOOR: problem, FLOOR_AND_CAPS: with_floor_and_caps(problem)}
        except HeterpsError as error:
            left_out[model] = reason_in_one_line(error)
            log_step("left out", f"{model}: {left_out[model]}")
            continue
        log_step("profile", profiled.summary)
        problems += [
            ComparedProblem(
                name=model,
                problem=replace(each, step_model=step_model),
                conditions=conditions,
                estimated_device_types=profiled.estimated_device_types,
            )
            for conditions, each in under.items()
            for step_model in StepModel
        ]
    return problems, left_out


def with_floor_and_caps(problem: SchedulingProblem) -> SchedulingProblem:
    """Return a problem whose cheapest plan is forbidden by caps and whose floor is near what they allow.

    Of each device type that the cheapest plan uses, at most three quarters of its units may be taken, unless the
    model fits into no memory then; the floor is 80 % of the highest throughput with these caps, of the step model
    with which that is lower. By the trainer's step it is the throughput of the formula, which plans of many stages
    miss.

    Raises:
        InfeasiblePlanError: The problem has no plan.
    """
    used = Counter[str]()
    for stage in find_optimum(problem).stages:
        used[stage.device_type] += stage.num_replicas
    capped = replace(problem, throughput_floor_samples_per_s=0.0)
    highest = _highest_throughput(capped)
    for name, num_units in used.items():
        most = max(1, math.floor(CAPPED_SHARE * num_units))
        unit = replace(capped.device_types[name], max_units=most)
        tighter = replace(capped, device_types={**capped.device_types, name: unit})
        if reachable := _highest_throughput(tighter):
            capped, highest = tighter, reachable
    return replace(capped, throughput_floor_samples_per_s=float(f"{FLOOR_SHARE * highest:.2g}"))


def _highest_throughput(problem: SchedulingProblem) -> float:
    return min(highest_throughput(replace(problem, step_model=step_model)) for step_model in StepModel)


def profiled_job(
    workspace: Workspace, model: str, clicks: PreparedClicks, device_types: Sequence[str]
) -> tuple[PlannedJob, ProfiledModel]:
    """Return a night's job, and the model's layers measured here and estimated for device types."""
    job = planned_job(
        clicks.open(),
        is_dry_run=True,
        batch_size=None,
        planned_samples=NIGHT_SAMPLES,
        planned_rows_per_slot=PRODUCTION_ROWS_PER_SLOT,
    )
    profiled = profile_layers(
        workspace, clicks, job, model=model, batch_size=job.batch_size, device_types=device_types
    )
    return job, profiled


def reason_in_one_line(error: Exception) -> str:
    """Return an error without its fix, which is not for what is only compared."""
    if not isinstance(error, HeterpsError):
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return " ".join(str(error).partition(";")[0].split())


def compare(
    problems: Sequence[ComparedProblem],
    methods: Sequence[str],
    terms: Terms,
    *,
    left_out: Mapping[str, str],
) -> Comparison:
    """Search with every method for every problem and seed, one after the other."""
    for method in methods:
        budget = min(terms.budget_evaluations, WARM_UP_EVALUATIONS)
        _search(problems[0].problem, method, seed=0, budget_evaluations=budget, terms=terms)
    started = time.process_time()
    outcomes = []
    for compared in problems:
        found = tuple(compare_method(compared.problem, method, terms) for method in methods)
        outcomes.append(ProblemOutcome(compared=compared, summaries=found))
        num_found = sum(bool(summary.results) for summary in found)
        log_step(
            "compared",
            f"{compared.name}, {compared.conditions}, {compared.problem.step_model}: {num_found} of {len(found)} "
            f"methods found a plan",
        )
    return Comparison(
        outcomes=tuple(outcomes),
        left_out=left_out,
        num_seeds=terms.num_seeds,
        budget_evaluations=terms.budget_evaluations,
        cpu_seconds=time.process_time() - started,
    )


def compare_method(problem: SchedulingProblem, method: str, terms: Terms) -> MethodSummary:
    """Search with one method and all seeds; a method of which a search does not end in time is given up.

    No method gets more evaluations than its own default: a Bayesian search of 2,000 plans takes half a minute.
    """
    budget = min(terms.budget_evaluations, get_scheduler(method).default_budget_evaluations)
    results: list[SearchResult] = []
    remarks: list[str] = []
    cpu_seconds: list[float] = []
    for seed in range(terms.num_seeds):
        started = time.process_time()
        found = _search(problem, method, seed=seed, budget_evaluations=budget, terms=terms)
        cpu_seconds.append(time.process_time() - started)
        if isinstance(found, SearchResult):
            results.append(found)
            if 1 < found.plan.num_evaluations == budget < terms.budget_evaluations:
                remarks.append(f"rates {budget:,} plans, as more take long")
        elif isinstance(found, TimeoutError):
            results.clear()
            remarks = [f"{budget:,} evaluations took more than {terms.max_seconds:g} s"]
            break
        else:
            remarks.append(reason_in_one_line(found))
    return MethodSummary(
        method=method,
        num_seeds=terms.num_seeds,
        results=tuple(results),
        cpu_seconds=tuple(cpu_seconds),
        remark="; ".join(dict.fromkeys(remarks)),
    )


def _search(
    problem: SchedulingProblem, method: str, *, seed: int, budget_evaluations: int, terms: Terms
) -> SearchResult | Exception:
    """Return what a search found, or why it found nothing; a TimeoutError where it was stopped."""
    limited = search_plan.with_options(timeout_seconds=terms.max_seconds)
    state = limited(
        problem, scheduler=method, budget_evaluations=budget_evaluations, seed=seed, return_state=True
    )
    found: SearchResult | Exception = state.result(raise_on_failure=False)
    return found
