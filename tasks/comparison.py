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

from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.planning.search.search_result import SearchResult
from tasks.planning.compared_problems import ComparedProblem, reason_in_one_line
from tasks.running.progress import log_step
from tasks.scheduling import search_plan

WARM_UP_EVALUATIONS = 256
"""Of each method before the clock runs: the first search of a process loads parts of torch, and its pace says how
long the comparison will take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSearch:
    """What one method found for one problem with one seed."""

    method: str
    seed: int
    result: SearchResult | None
    remark: str = ""
    """Why there is no result, or what is different about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSummary:
    """What one method found for one problem over all seeds."""

    method: str
    searches: tuple[ComparedSearch, ...]

    @property
    def results(self) -> list[SearchResult]:
        """Of the seeds that led to a plan, in their order."""
        return [search.result for search in self.searches if search.result is not None]

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

    @property
    def remark(self) -> str:
        """The remarks of all seeds, each once."""
        return "; ".join(dict.fromkeys(search.remark for search in self.searches if search.remark))


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


def expected_seconds(problems: Sequence[ComparedProblem], methods: Sequence[str], terms: Terms) -> float:
    """Warm every method up on the first problem, and estimate from its pace how long all searches will take.

    A search is taken to be slower in proportion to the layers, and one beyond the time limit to be stopped once.
    """
    first = problems[0].problem
    budget = min(terms.budget_evaluations, WARM_UP_EVALUATIONS)
    total = 0.0
    for method in methods:
        for _ in range(2):  # the first one loads libraries
            started = time.perf_counter()
            found = _search(first, method, seed=0, budget_evaluations=budget, max_seconds=terms.max_seconds)
            elapsed = time.perf_counter() - started
        pace = 0.0
        if isinstance(found, SearchResult) and found.plan.num_evaluations == budget:
            pace = found.search_seconds / budget
        for compared in problems:
            scale = compared.problem.num_layers / first.num_layers
            seconds = elapsed + (terms.budget_evaluations - budget) * pace * scale
            if seconds > terms.max_seconds:
                total += terms.max_seconds
                seconds = elapsed + _lowered_budget(method, terms) * pace * scale
            total += min(seconds, terms.max_seconds) * terms.num_seeds
    return total


def compare(
    problems: Sequence[ComparedProblem],
    methods: Sequence[str],
    terms: Terms,
    *,
    left_out: Mapping[str, str],
) -> Comparison:
    """Search with every method for every problem and seed, one after the other."""
    started = time.perf_counter()
    summaries = {}
    for compared in problems:
        found = [compare_method(compared.problem, method, terms) for method in methods]
        summaries[compared.name] = tuple(sorted(found, key=_rank))
        log_step("compared", f"{compared.name}: {_standing(summaries[compared.name])}")
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

    Where a search is stopped at the time limit, all seeds get the lowered budget of `_lowered_budget`, and the remark
    says so; where that is stopped too, the method is given up.
    """
    budget, remark = terms.budget_evaluations, ""
    searches: list[ComparedSearch] = []
    while len(searches) < terms.num_seeds:
        seed = len(searches)
        found = _search(problem, method, seed=seed, budget_evaluations=budget, max_seconds=terms.max_seconds)
        if isinstance(found, SearchResult):
            searches.append(ComparedSearch(method=method, seed=seed, result=found, remark=remark))
        elif not isinstance(found, TimeoutError):
            reason = reason_in_one_line(found)
            searches.append(ComparedSearch(method=method, seed=seed, result=None, remark=reason))
        elif budget == terms.budget_evaluations > 1:
            budget = _lowered_budget(method, terms)
            remark = (
                f"{terms.budget_evaluations:,} took more than {terms.max_seconds:g} s; {budget:,} instead"
            )
            searches.clear()
        else:
            reason = f"{budget:,} evaluations took more than {terms.max_seconds:g} s"
            searches = [
                ComparedSearch(method=method, seed=seed, result=None, remark=reason)
                for seed in range(terms.num_seeds)
            ]
    return MethodSummary(method=method, searches=tuple(searches))


def _lowered_budget(method: str, terms: Terms) -> int:
    """Return a tenth of the budget, or the method's own default where that is less."""
    return min(get_scheduler(method).default_budget_evaluations, max(1, terms.budget_evaluations // 10))


def _search(
    problem: SchedulingProblem, method: str, *, seed: int, budget_evaluations: int, max_seconds: float
) -> SearchResult | Exception:
    """Return what a search found, or why it found nothing; a TimeoutError where it was stopped."""
    limited = search_plan.with_options(timeout_seconds=max_seconds)
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


def _standing(summaries: Sequence[MethodSummary]) -> str:
    found = [summary for summary in summaries if summary.typical is not None]
    if not found:
        return "no method found a plan"
    best = found[0]
    return f"{best.method} first, {len(found)} of {len(summaries)} methods found a plan"
