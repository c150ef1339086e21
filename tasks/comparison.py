"""Every search method against the same problems, with the same evaluations and seeds, one after the other.

That a method finds no plan, takes no such problem, fails or does not end is an answer with its reason; nothing that
one method does ends the comparison.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.hardware import InstanceOffer
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedProblem:
    """A problem that the methods are compared on."""

    name: str
    """Of the model, or the file as it was given."""

    problem: SchedulingProblem
    estimated_device_types: tuple[str, ...] = ()
    """Whose times are a roofline and not a measurement; not known of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSummary:
    """What one method found for one problem over all seeds."""

    method: str
    num_seeds: int
    results: tuple[SearchResult, ...]
    """Of the seeds that led to a plan, in their order."""

    remark: str = ""
    """Why there are no more results, or what is different about them."""

    @property
    def typical(self) -> SearchResult | None:
        """The result of median cost, the cheaper of the middle two; None where no seed led to a plan."""
        if not self.results:
            return None
        return sorted(self.results, key=lambda result: result.plan.cost_usd)[(len(self.results) - 1) // 2]

    @property
    def median_seconds(self) -> float:
        """Of the searches alone."""
        return statistics.median(result.search_seconds for result in self.results)

    @property
    def largest_gap(self) -> float:
        """Of the seeds that led to a plan."""
        return max(result.plan.optimality_gap for result in self.results)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All methods on all problems."""

    problems: tuple[ComparedProblem, ...]
    left_out: Mapping[str, str]
    """Models of which no problem could be made, with the reason."""

    summaries: Mapping[str, tuple[MethodSummary, ...]]
    """Problem name -> a summary for each method, the cheapest first and those without a plan last."""

    num_seeds: int
    budget_evaluations: int
    seconds: float
    """Of all searches with their proofs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What every method is given."""

    budget_evaluations: int
    num_seeds: int
    max_seconds: float
    """Of one search with its proof, in wall time; a method that takes longer gets fewer evaluations."""


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
    """Make the problem of a night's job for each model; return them, and what cannot be made with the reason."""
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
        except HeterpsError as error:
            left_out[model] = reason_in_one_line(error)
            log_step("left out", f"{model}: {left_out[model]}")
            continue
        log_step("profile", profiled.summary)
        problems.append(
            ComparedProblem(
                name=model,
                problem=problem,
                estimated_device_types=profiled.estimated_device_types,
            )
        )
    return problems, left_out


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
    """Return an error without the way out that it ends with, which is not for what is only compared."""
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
    started = time.perf_counter()
    summaries = {}
    for compared in problems:
        found = [compare_method(compared.problem, method, terms) for method in methods]
        summaries[compared.name] = tuple(sorted(found, key=_rank))
        num_found = sum(bool(summary.results) for summary in found)
        log_step("compared", f"{compared.name}: {num_found} of {len(found)} methods found a plan")
    return Comparison(
        problems=tuple(problems),
        left_out=left_out,
        summaries=summaries,
        num_seeds=terms.num_seeds,
        budget_evaluations=terms.budget_evaluations,
        seconds=time.perf_counter() - started,
    )


def compare_method(problem: SchedulingProblem, method: str, terms: Terms) -> MethodSummary:
    """Search with one method and all seeds.

    Where a search is stopped at the time limit, all seeds get a tenth of the budget, or the method's own default
    where that is less, and the remark says so; where that is stopped too, the method is given up.
    """
    budget = terms.budget_evaluations
    results: list[SearchResult] = []
    remarks: list[str] = []
    seed = 0
    while seed < terms.num_seeds:
        found = _search(problem, method, seed=seed, budget_evaluations=budget, terms=terms)
        seed += 1
        if isinstance(found, SearchResult):
            results.append(found)
        elif not isinstance(found, TimeoutError):
            remarks.append(reason_in_one_line(found))
        elif budget == terms.budget_evaluations > 1:
            budget = min(get_scheduler(method).default_budget_evaluations, max(1, budget // 10))
            remarks = [
                f"{terms.budget_evaluations:,} took more than {terms.max_seconds:g} s; {budget:,} instead"
            ]
            results.clear()
            seed = 0
        else:
            results.clear()
            remarks = [f"{budget:,} evaluations took more than {terms.max_seconds:g} s"]
            break
    return MethodSummary(
        method=method,
        num_seeds=terms.num_seeds,
        results=tuple(results),
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


def _rank(summary: MethodSummary) -> tuple[float, float, str]:
    """Return what summaries are sorted by: the cost, of equal costs the time, and methods without a plan last."""
    typical = summary.typical
    if typical is None:
        return math.inf, math.inf, summary.method
    # The same plan summed in another order differs in the last digits.
    return float(f"{typical.plan.cost_usd:.9g}"), summary.median_seconds, summary.method
