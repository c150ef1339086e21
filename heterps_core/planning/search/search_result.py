"""What a search hands back: the plan with its proof, its cost breakdown, and how the search went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from heterps_core.planning.cost_model.evaluation import PlanEvaluation
from heterps_core.plans.scheduling_plan import SchedulingPlan


class HistoryPoint(NamedTuple):
    """The best cost known after some evaluations; a search records one point per improvement."""

    num_evaluations: int
    seconds: float
    best_cost_usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plan of one search."""

    plan: SchedulingPlan
    """With `cost_lower_bound_usd` and `optimality_gap` proven by the exact bound."""

    evaluation: PlanEvaluation
    history: tuple[HistoryPoint, ...]
    search_seconds: float
    """Wall time of the search alone; the proof of the bound is not in it."""

    certificate_seconds: float
    """Wall time of proving the lower bound after the search; 0 where the search is itself the proof."""
