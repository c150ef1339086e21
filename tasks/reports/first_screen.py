"""What a person sees first of a plan or a run: its machines, one cost, one speed, one proof; of 80 columns."""

from __future__ import annotations

from heterps_core.text_table import NOT_KNOWN, labelled_lines, usd_text
from heterps_core.units import SECONDS_PER_HOUR, ratio
from tasks.judging.baseline import Baseline
from tasks.judging.promotion_gates import PromotionDecision
from tasks.reports.document import RULE
from tasks.reports.run_report import PlanReport, RunReport, gap_text

COLUMNS = 80

_SECONDS_PER_MINUTE = 60.0


def plan_screen(report: PlanReport) -> str:
    """Return what would be bought, for how much and how long."""
    facts = [
        _rows(report),
        *_plan_facts(report),
        ("cost", f"promised {report.promised_cost}"),
        ("speed", f"promised {report.promised_speed}"),
        ("launched", "nothing"),
    ]
    return _screen(f"Plan {report.run_id}: {report.model}", facts, report)


def run_screen(report: RunReport, decision: PromotionDecision | str) -> str:
    """Return what a finished run cost, how fast and how good it was, and what its model became.

    In place of a decision it may be told why the model was not judged.
    """
    auc = report.quality.auc
    baseline = report.baseline.quality.auc if isinstance(report.baseline, Baseline) else None
    facts = [
        _rows(report),
        *_plan_facts(report),
        (
            "cost",
            f"promised {report.promised_cost}; billed {usd_text(report.billed_usd)} ({report.billed_where})",
        ),
        ("speed", f"promised {report.promised_speed}; measured {report.measured_speed}"),
        (
            "quality",
            f"AUC {NOT_KNOWN if auc is None else f'{auc:.4f}'}"
            + (f"; a logistic regression has {baseline:.4f}" if baseline is not None else ""),
        ),
    ]
    training = report.training
    if training.num_attempts > 1:
        again = f"{training.num_repeated_steps:,} steps done again"
        facts.append(("restarted", f"{training.num_attempts - 1} times; {again}"))
    champion = f"not judged: {decision}" if isinstance(decision, str) else _champion(decision)
    return _screen(f"Run {report.run_id}: {report.model}", [*facts, ("champion", champion)], report)


def _champion(decision: PromotionDecision) -> str:
    if decision.is_promoted:
        return f"yes: version {decision.version} serves from now on"
    if decision.champion_version is None:
        way_out = f"heterps predict --version {decision.version} uses it anyway"
        return f"no: version {decision.version} did not pass every gate; {way_out}"
    return f"no: version {decision.champion_version} stays; version {decision.version} is not proven better"


def duration_text(seconds: float) -> str:
    """Return a length of time in the unit that suits it.

    Example:
        >>> duration_text(41.2), duration_text(158.0), duration_text(9_000.0)
        ('41 seconds', '3 minutes', '2.5 hours')
    """
    if seconds < _SECONDS_PER_MINUTE:
        return f"{seconds:.0f} seconds"
    if seconds < 2 * SECONDS_PER_HOUR:
        return f"{seconds / _SECONDS_PER_MINUTE:.0f} minutes"
    return f"{seconds / SECONDS_PER_HOUR:.1f} hours"


def _rows(report: PlanReport) -> tuple[str, str]:
    held_out = f"the latest {report.num_eval_rows:,} are held out"
    return "rows", f"{report.data}: {report.num_train_rows:,} to train on, {held_out}"


def _plan_facts(report: PlanReport) -> list[tuple[str, str]]:
    bought, plan, num_planned = report.provisioning, report.chosen.plan, report.problem.num_samples
    machines = bought.machines
    if machines.startswith("1 x ") and "+" not in machines:
        machines = f"fits on one {machines.removeprefix('1 x ')}"
    seconds = ratio(plan.cost_usd, plan.price_usd_per_hour, otherwise=0.0) * SECONDS_PER_HOUR
    text = f"{machines}: {duration_text(seconds)} from start to end"
    if num_planned != report.num_train_rows:
        text = (
            f"of a night of {num_planned:,.0f} samples (planned_samples): {text}; your rows are trained with "
            f"its stages, {sum(stage.num_replicas for stage in bought.launch_stages)} processes here"
        )
    return [("plan", text), ("proof", gap_text(plan))]


def _screen(title: str, facts: list[tuple[str, str]], report: PlanReport) -> str:
    more = f"  stages, bill, gates, why this plan:  heterps explain {report.run_id}"
    return "\n".join(["", RULE, title, RULE, "", *labelled_lines(facts, width=COLUMNS), "", more])
