"""Every search method against the same problems, with the same evaluations and seeds, one after the other.

Each model makes two problems, one without a floor and one with a floor and caps that bind, and each of them is
searched by the papers' closed form of a step and by the trainer's own.

A method that finds no plan, takes no such problem, fails or does not end is logged with the reason; the comparison
goes on. MLflow shows the plans that were found side by side, and groups them by method, model, conditions or seed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.hardware import InstanceOffer
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.text_table import usd_text
from heterps_core.training.job import NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT
from infra.workspace import Workspace
from tasks.data import PreparedClicks
from tasks.planning.problems import make_problems, problem_of_cheapest_zone
from tasks.profiling import PlannedJob, ProfiledModel, planned_job, profile_layers
from tasks.running.progress import log_step
from tasks.scheduling import search_plan

_WARM_UP_EVALUATIONS = 256
"""Plans that each method rates before the clock runs, as the first search of a process loads parts of torch."""

_SAME_COST = 1e-6
"""Relative difference below which two costs are equal."""

NO_FLOOR, FLOOR_AND_CAPS, AS_GIVEN = "no floor", "floor and caps", "as given"
"""Conditions of the problems of a model, and of one from a file."""

_CAPPED_SHARE, _FLOOR_SHARE = 0.75, 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class _ComparedProblem:
    """A problem that the methods are compared on."""

    name: str
    """Name of the model, or the file as it was given."""

    problem: SchedulingProblem
    conditions: str = AS_GIVEN

    @property
    def full_name(self) -> str:
        """Name, conditions and step model."""
        return f"{self.name}, {self.conditions}, {self.problem.step_model}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPlan:
    """The result of one search."""

    compared: _ComparedProblem
    method: str
    seed: int
    result: SearchResult
    cpu_seconds: float
    """Processor time of the search with its proof."""

    @property
    def name(self) -> str:
        """Name of the search among those of a comparison."""
        return f"{self.method} seed {self.seed}: {self.compared.full_name}"

    @property
    def settings(self) -> dict[str, str]:
        """Parameters by which MLflow groups the searches."""
        stages = self.result.plan.stages
        # A problem file may have device types of its own, whose market is not known.
        return {
            "method": self.method,
            "model": self.compared.name,
            "device_types": " | ".join(stage.device_types for stage in stages),
            "replicas": " | ".join(stage.replicas for stage in stages),
            "batch_size": str(self.compared.problem.batch_size),
            "seed": str(self.seed),
            "conditions": self.compared.conditions,
            "step_model": str(self.compared.problem.step_model),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Limits that are the same for every method."""

    budget_evaluations: int
    num_seeds: int
    max_seconds: float
    """Wall time of one search with its proof; a method that takes longer is given up on this problem."""


def load_problems(files: Sequence[str]) -> list[_ComparedProblem]:
    """Read problem files.

    Raises:
        ConfigurationError: A file cannot be read or is no problem; the message names the file and the field.
    """
    problems = []
    for file in dict.fromkeys(files):
        try:
            problems.append(_ComparedProblem(name=file, problem=SchedulingProblem.load(Path(file))))
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
) -> list[_ComparedProblem]:
    """Return the problems of a night's job for each model; a model that gives none is logged with the reason."""
    problems: list[_ComparedProblem] = []
    for model in dict.fromkeys(models):
        try:
            job, profiled = profiled_job(workspace, model, clicks, device_types)
            by_zone = make_problems(
                profiled,
                offers,
                job,
                device_types=device_types,
                num_epochs=1,
                throughput_floor_samples_per_s=throughput_floor_samples_per_s,
            )
            problem = problem_of_cheapest_zone(by_zone)
            under = {NO_FLOOR: problem, FLOOR_AND_CAPS: _with_floor_and_caps(problem)}
        except HeterpsError as error:
            log_step("left out", f"{model}: {_reason_in_one_line(error)}")
            continue
        log_step("profile", profiled.summary)
        problems += [
            _ComparedProblem(
                name=model,
                problem=replace(each, step_model=step_model),
                conditions=conditions,
            )
            for conditions, each in under.items()
            for step_model in StepModel
        ]
    return problems


def _with_floor_and_caps(problem: SchedulingProblem) -> SchedulingProblem:
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
        used.update(stage.replicas_by_type)
    capped = replace(problem, throughput_floor_samples_per_s=0.0)
    highest = _highest_throughput(capped)
    for name, num_units in used.items():
        most = max(1, math.floor(_CAPPED_SHARE * num_units))
        unit = replace(capped.device_types[name], max_units=most)
        tighter = replace(capped, device_types={**capped.device_types, name: unit})
        if reachable := _highest_throughput(tighter):
            capped, highest = tighter, reachable
    return replace(capped, throughput_floor_samples_per_s=float(f"{_FLOOR_SHARE * highest:.2g}"))


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


def _reason_in_one_line(error: Exception) -> str:
    """Return an error without its fix, which is not for what is only compared."""
    if not isinstance(error, HeterpsError):
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return " ".join(str(error).partition(";")[0].split())


def compare(problems: Sequence[_ComparedProblem], methods: Sequence[str], terms: Terms) -> list[FoundPlan]:
    """Search with every method for every problem and seed, one after the other; log the cheapest plans."""
    for method in methods:
        budget = min(terms.budget_evaluations, _WARM_UP_EVALUATIONS)
        _search(problems[0].problem, method, seed=0, budget_evaluations=budget, terms=terms)
    found = []
    for compared in problems:
        plans = [plan for method in methods for plan in _plans_of(compared, method, terms)]
        found += plans
        if not plans:
            log_step("compared", f"{compared.full_name}: no method found a plan")
            continue
        usd = min(each.result.plan.cost_usd for each in plans)
        cheapest = {
            each.method: None for each in plans if each.result.plan.cost_usd <= usd * (1 + _SAME_COST)
        }
        log_step("compared", f"{compared.full_name}: {usd_text(usd)} by {', '.join(cheapest)}")
    return found


def _plans_of(compared: _ComparedProblem, method: str, terms: Terms) -> list[FoundPlan]:
    """Search with one method and all seeds; a method of which a search does not end in time is given up.

    No method gets more evaluations than its own default: a Bayesian search of 2,000 plans takes half a minute.
    """
    budget = min(terms.budget_evaluations, get_scheduler(method).default_budget_evaluations)
    plans: list[FoundPlan] = []
    reasons: dict[str, None] = {}
    for seed in range(terms.num_seeds):
        started = time.process_time()
        result = _search(compared.problem, method, seed=seed, budget_evaluations=budget, terms=terms)
        cpu_seconds = time.process_time() - started
        if isinstance(result, SearchResult):
            plans.append(
                FoundPlan(compared=compared, method=method, seed=seed, result=result, cpu_seconds=cpu_seconds)
            )
        elif isinstance(result, TimeoutError):
            plans, reasons = [], {f"{budget:,} evaluations took more than {terms.max_seconds:g} s": None}
            break
        else:
            reasons[_reason_in_one_line(result)] = None
    if reasons:
        log_step("no plan", f"{method}, {compared.full_name}: {'; '.join(reasons)}")
    return plans


def _search(
    problem: SchedulingProblem, method: str, *, seed: int, budget_evaluations: int, terms: Terms
) -> SearchResult | Exception:
    """Return what a search found, or why it found nothing; a TimeoutError where it was stopped."""
    limited = search_plan.task.with_options(timeout_seconds=terms.max_seconds)
    state = limited(
        problem, scheduler=method, budget_evaluations=budget_evaluations, seed=seed, return_state=True
    )
    found: SearchResult | Exception = state.result(raise_on_failure=False)
    return found
