"""Plans and runs in a line or less."""

from __future__ import annotations

from heterps_core.plans.scheduling_plan import SchedulingPlan
from heterps_core.text_table import NOT_KNOWN
from heterps_core.training.training_run import TrainingRun
from tasks.scheduling import Searches


def plan_summary(plan: SchedulingPlan) -> str:
    """Return a plan in one line."""
    stages = ", ".join(f"{stage.num_replicas} x {stage.device_type}" for stage in plan.stages)
    gap = "optimal" if plan.optimality_gap == 0 else _gap_at_most(plan)
    return f"{plan.scheduler}: {stages}; {plan.throughput_samples_per_s:,.0f} samples/s, {gap}"


def taken_text(searches: Searches, asked: str) -> str:
    """Return why a plan is not that of the method that was asked for; nothing where it is."""
    if searches.taken == asked:
        return ""
    if asked in searches.without_plan:
        return f"; {asked}, which was asked for, found no plan"
    extra = searches.results[asked].plan.cost_usd / searches.chosen.plan.cost_usd - 1
    return f"; the plan of {asked}, which was asked for, costs {extra:.2%} more"


def training_summary(training: TrainingRun) -> str:
    """Return what a training run did in one line."""
    assert training.quality is not None
    attempts = "" if training.num_attempts == 1 else f", {training.num_attempts} attempts"
    return (
        f"{len(training.steps):,} steps, {speed_text(training.throughput_samples_per_s)} samples/s, "
        f"log-loss {training.quality.log_loss:.4f} on held-out rows{attempts}"
    )


def gap_text(plan: SchedulingPlan) -> str:
    """Return what is proven of the plan's cost."""
    if plan.optimality_gap == 0:
        return "optimal: no plan for this problem is cheaper (gap 0)"
    return f"{_gap_at_most(plan)} for this problem"


def speed_text(samples_per_s: float | None) -> str:
    """Return a speed; "-" where too few steps were trained to measure one."""
    return NOT_KNOWN if samples_per_s is None else f"{samples_per_s:,.0f}"


def _gap_at_most(plan: SchedulingPlan) -> str:
    return f"at most {plan.optimality_gap:.2%} more expensive than the cheapest plan"
