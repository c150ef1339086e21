"""The plan that is least wrong where estimated times are: minimax regret over cases of times off by their spread.

The regret of a plan in a case is what it costs more than the cheapest plan there, as a share. Cases are the times as
they are estimated; each estimate at either end of its spread, with the others as they are estimated or all at the
opposite end; all slow; all fast; and for each plan in question its own types slow and all others fast, where a plan
whose cost is a sum of intervals regrets most (Averbakh and Lebedev, Discrete Applied Mathematics 138, 2004). The
plans in question are the one at hand and the cheapest of every case.

So a regret is exact in its case. That no case within the spread is worse is not proven, and neither that no plan that
is cheapest in none of the cases would do better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from heterps_core.errors import InfeasiblePlanError
from heterps_core.hardware import hardware_name
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.estimates import Estimate, estimates_of, with_errors
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.planning.search.schedulers.base import result_with_bound
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.plans.scheduling_plan import Stage

ROBUST = "robust"
"""What stands in a plan in the place of a search method."""

Plan = tuple[Stage, ...]

Case = tuple[tuple[Estimate, float], ...]
"""Estimates and where in their spread they are: -1 at the fast end, 1 at the slow one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstRegret:
    """Where a plan is worst, replica counts as they were bought."""

    share: float
    """What it costs more than the cheapest plan, over the cases in which it keeps all constraints."""

    slow: tuple[Estimate, ...]
    fast: tuple[Estimate, ...]

    num_broken: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RobustChoice(JsonDocument):
    """The plan of least worst regret beside the one at hand."""

    json_form = JsonForm(version=1)

    stages: Plan
    """Of those that break fewest cases the one with the least worst regret."""

    cost_usd: float
    """At the estimated times, like the next one."""

    cost_at_hand_usd: float
    regret: WorstRegret
    regret_at_hand: WorstRegret
    num_cases: int
    """In which there is a plan at all; 1 where no time has a spread."""

    num_plans: int
    largest_gap: float
    """Of the cases' cheapest plans above what is proven, by which regrets may be larger; 0 where all are proven."""

    def __str__(self) -> str:
        if self.num_cases == 1:
            return "no time has a spread, so there is nothing to choose"
        gap = f"; regrets may be {self.largest_gap:.1%} larger, where optima are not proven" * (
            self.largest_gap > 0
        )
        tried = (
            f"of {self.num_plans} plans in {self.num_cases} cases of times off by their spread; one that is cheapest "
            f"in none of these may do better{gap}"
        )
        if self.num_plans == 1:
            return (
                f"this plan is the cheapest in all {self.num_cases} cases of times off by their spread{gap}"
            )
        if self.cost_usd == self.cost_at_hand_usd:
            return f"this plan has the least worst regret, {_regret_text(self.regret)}, {tried}"
        extra = self.cost_usd / self.cost_at_hand_usd - 1
        return (
            f"{extra:+.2%} at the estimated times for a worst regret of {_regret_text(self.regret)} in place of "
            f"{_regret_text(self.regret_at_hand)}: the least {tried}"
        )


def robust_result(problem: SchedulingProblem, result: SearchResult) -> tuple[SearchResult, RobustChoice]:
    """Return the robust plan in the place of one that a search found; the same one where that is robust."""
    choice = choose_robust(problem, result.plan.stages)
    if choice.stages == result.plan.stages:
        return result, choice
    robust = result_with_bound(
        problem,
        result.plan.cost_lower_bound_usd,
        scheduler=ROBUST,
        seed=result.plan.seed,
        stages=choice.stages,
        num_evaluations=choice.num_plans * choice.num_cases,
        history=(),
        search_seconds=result.search_seconds,
        certificate_seconds=result.certificate_seconds,
    )
    return robust, choice


def choose_robust(problem: SchedulingProblem, stages: Sequence[Stage]) -> RobustChoice:
    """Return the plan of least worst regret, the one at hand where none has less; one search for each case."""
    estimates = tuple(estimates_of(problem))
    problems: dict[Case, SchedulingProblem] = {}
    plans: dict[Plan, None] = {tuple(stages): None}
    gaps = [0.0]

    def search(*cases: Case) -> None:
        for case in cases:
            if case not in problems:
                problems[case] = with_errors(problem, dict(case))
                with suppress(InfeasiblePlanError):
                    optimum = find_optimum(problems[case])
                    plans[optimum.stages] = None
                    gaps.append(optimum.cost_usd / optimum.cost_lower_bound_usd - 1)

    search((), *(((each, end),) for each in estimates for end in (-1.0, 1.0)))
    search(*(tuple((each, end) for each in estimates) for end in (-1.0, 1.0)))
    odd_ones = [(odd, end) for odd in estimates for end in (-1.0, 1.0)]
    search(*(tuple((each, end if each == odd else -end) for each in estimates) for odd, end in odd_ones))
    search(*(_worst_case_of(plan, estimates) for plan in tuple(plans)))
    usd = {
        case: costs
        for case, changed in problems.items()
        if min((costs := {plan: cost_or_infinite(changed, plan) for plan in plans}).values()) < math.inf
    }
    regrets = {plan: _worst_regret(plan, usd) for plan in plans}
    # Of equals the first: the plan at hand, else the one of the case that was searched first.
    robust = min(plans, key=lambda plan: (regrets[plan].num_broken, round(regrets[plan].share, 9)))
    at_hand = next(iter(plans))
    return RobustChoice(
        stages=robust,
        cost_usd=usd[()][robust],
        cost_at_hand_usd=usd[()][at_hand],
        regret=regrets[robust],
        regret_at_hand=regrets[at_hand],
        num_cases=len(usd),
        num_plans=len(plans),
        largest_gap=max(gaps),
    )


def cost_or_infinite(problem: SchedulingProblem, stages: Sequence[Stage]) -> float:
    """Return what a plan costs in USD, infinite where it breaks a constraint."""
    evaluation = evaluate(problem, stages)
    return math.inf if evaluation.violations else evaluation.cost_usd


def _worst_case_of(plan: Plan, estimates: Sequence[Estimate]) -> Case:
    used = {hardware_name(stage.device_type) for stage in plan}
    return tuple((each, 1.0 if each.device_type in used else -1.0) for each in estimates)


def _worst_regret(plan: Plan, usd: Mapping[Case, Mapping[Plan, float]]) -> WorstRegret:
    shares = {case: costs[plan] / min(costs.values()) - 1 for case, costs in usd.items()}
    kept = {case: share for case, share in shares.items() if share < math.inf}
    worst = max(kept, key=kept.__getitem__, default=())
    return WorstRegret(
        share=kept.get(worst, 0.0),
        slow=tuple(each for each, end in worst if end > 0),
        fast=tuple(each for each, end in worst if end < 0),
        num_broken=len(shares) - len(kept),
    )


def _regret_text(regret: WorstRegret) -> str:
    cases = "case" if regret.num_broken == 1 else "cases"
    broken = f" and {regret.num_broken} {cases} in which it breaks a limit" * (regret.num_broken > 0)
    return f"{regret.share:.1%} ({_case_text(regret)}){broken}"


def _case_text(regret: WorstRegret) -> str:
    off = regret.slow + regret.fast
    if not off:
        return "the estimated times"
    if not (regret.slow and regret.fast):
        return f"{off[0] if len(off) == 1 else 'all times'} at the {'slow' if regret.slow else 'fast'} end"
    few, ends = (regret.slow, ("slow", "fast"))
    if len(regret.fast) < len(few):
        few, ends = regret.fast, ("fast", "slow")
    named = str(few[0]) if len(few) == 1 else ", ".join(dict.fromkeys(each.device_type for each in few))
    return f"{named} at the {ends[0]} end, all others at the {ends[1]} one"
