"""What a run tells people on the terminal."""

from __future__ import annotations

from heterps_core.planning.explain.explanation import PlanExplanation
from heterps_core.planning.explain.text import essential_lines, explanation_text
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import SchedulingPlan
from heterps_core.training.training_run import TrainingRun
from infra.billing.bill import bill_as_text
from infra.billing.waste import waste_as_text
from infra.workspace import Workspace
from tasks.records.mlflow_views import nights_address
from tasks.reports.report_tables import (
    ESTIMATED_NOTE,
    QUALITY_HEADER,
    SEARCH_HEADER,
    STAGE_HEADER,
    STAGE_SPEED_HEADER,
    baseline_lines,
    failed_search_lines,
    floor_text,
    gap_text,
    quality_rows,
    search_rows,
    speed_rows,
    speed_text,
    stage_rows,
)
from tasks.reports.run_report import PlanReport, RunReport
from tasks.reports.tables import aligned_table
from tasks.scheduling import Searches

DEFAULT_MLFLOW_URL = "http://127.0.0.1:5000"
RULE = "-" * 78


def plan_summary(plan: SchedulingPlan) -> str:
    """Return a plan in one line."""
    stages = ", ".join(f"{stage.num_replicas} x {stage.device_type}" for stage in plan.stages)
    gap = (
        "optimal"
        if plan.optimality_gap == 0
        else f"at most {plan.optimality_gap:.2%} dearer than the cheapest plan"
    )
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
    attempts = "" if training.num_attempts == 1 else f", {training.num_attempts} attempts"
    return (
        f"{len(training.steps):,} steps, {speed_text(training.throughput_samples_per_s)} samples/s, "
        f"log-loss {training.quality.log_loss:.4f} on held-out rows{attempts}"
    )


def plan_text(report: PlanReport, workspace: Workspace) -> str:
    """Return the report of a run that ends with its plan, for a terminal."""
    parts = [
        ["", RULE, f"Plan {report.run_id}: {report.model} on {report.data}", RULE],
        _plan_lines(report),
        _search_lines(report),
        purchase_lines(report.provisioning.cloud_plan),
        _where_lines(report, workspace),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def purchase_lines(plan: ProvisioningPlan) -> list[str]:
    """Return what would be bought, line by line, with the age of each price."""
    rows = [
        [
            str(group.stage),
            str(group.count),
            group.offer.instance_type.name,
            str(group.offer.market),
            group.offer.zone or group.offer.region,
            f"{group.offer.price_usd_per_hour:.4f}",
            f"{group.price_usd_per_hour:.4f}",
            group.offer.price_as_of[:10],
        ]
        for group in plan.groups
    ]
    header = ["stage", "count", "instance", "market", "where", "USD/hour each", "USD/hour", "price of"]
    return [
        "Would be bought; nothing was",
        *aligned_table(header, rows, left={2, 3, 4}),
        f"  in all     {plan.price_usd_per_hour:.4f} USD/hour",
    ]


def report_text(report: RunReport, workspace: Workspace) -> str:
    """Return the final report for a terminal."""
    parts = [
        ["", RULE, f"Run {report.run_id}: {report.model} on {report.data}", RULE],
        _plan_lines(report),
        _search_lines(report),
        _speed_lines(report),
        _quality_lines(report),
        [line for bill in report.bills for line in bill_as_text(bill).splitlines()]
        + waste_as_text(report.waste).splitlines(),
        _where_lines(report, workspace),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def explanation_markdown(problem: SchedulingProblem, explanation: PlanExplanation) -> str:
    """Return the explanation of the plan as Markdown; its lines are aligned, so they stay as they are."""
    return f"# The plan, explained\n\n```\n{explanation_text(problem, explanation)}\n```\n"


def _plan_lines(report: PlanReport) -> list[str]:
    plan = report.chosen.plan
    cloud = report.provisioning.cloud_plan
    return [
        f"Plan by {plan.scheduler} for {_job_text(report)}{taken_text(report.searches, report.scheduler)}",
        *aligned_table(STAGE_HEADER, stage_rows(report), left={1, 2}),
        f"  predicted  {plan.throughput_samples_per_s:,.0f} samples/s "
        f"({floor_text(report)}), {plan.price_usd_per_hour:.4f} USD/hour, {plan.cost_usd:.6f} USD for the run",
        _simulated_line(report),
        f"  bought as  {_instances_of(report)}: {cloud.price_usd_per_hour:.4f} USD/hour, "
        f"{report.provisioning.price_age}",
        f"  proof      {gap_text(report)}",
        *([f"  note       {ESTIMATED_NOTE}"] if report.is_estimated else []),
        *_dearer_lines(report),
        *essential_lines(report.explanation),
    ]


def _simulated_line(report: PlanReport) -> str:
    """Say what is left of the closed form's throughput where every step fills and drains the pipeline."""
    simulation, problem_rows = report.simulation, report.problem.batch_size
    planned, reached = report.chosen.plan.throughput_samples_per_s, simulation.run.throughput_samples_per_s
    return (
        f"  simulated  {reached:,.0f} samples/s ({reached / planned - 1:+.0%}), "
        f"{report.simulated_cost_usd:.6f} USD for the run: step by step, as the trainer works, "
        f"micro-batches of {problem_rows // simulation.load.num_microbatches:,}"
    )


def _dearer_lines(report: PlanReport) -> list[str]:
    """Say so where another method found a cheaper plan than the chosen one."""
    best = min(report.searches.results, key=lambda name: report.searches.results[name].plan.cost_usd)
    cheapest, chosen = report.searches.results[best].plan.cost_usd, report.chosen.plan.cost_usd
    if chosen <= cheapest * (1 + 1e-6):
        return []
    return [
        f"  warning    {best} found a plan that is {1 - cheapest / chosen:.1%} cheaper: --scheduler {best}"
    ]


def _job_text(report: RunReport) -> str:
    problem = report.problem
    state_bytes = sum(layer.state_bytes for layer in problem.layers)
    return (
        f"{problem.num_samples * problem.num_epochs:,.0f} samples in batches of {problem.batch_size:,}, "
        f"{_gigabytes(state_bytes)} of weights and optimizer state"
    )


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e10 else f"{num_bytes / 1e9:.2g} GB"


def _search_lines(report: PlanReport) -> list[str]:
    return [
        "Search methods, and how many plans each has rated",
        *aligned_table(SEARCH_HEADER, search_rows(report), left={0}),
        *(f"  {line}" for line in failed_search_lines(report)),
    ]


def _speed_lines(report: RunReport) -> list[str]:
    training, error = report.training, report.prediction_error
    launched = " + ".join(str(stage.num_replicas) for stage in report.provisioning.launch_stages)
    planned = " + ".join(str(stage.num_replicas) for stage in report.chosen.plan.stages)
    heading = "Speed"
    if report.provisioning.is_rehearsal:
        heading = f"Rehearsal on this machine: {launched} workers for the plan's {planned}"
    comparison = (
        "" if error is None else f" ({abs(error):.0%} {'above' if error > 0 else 'below'} the prediction)"
    )
    restarted = (
        []
        if training.num_attempts == 1
        else [
            f"  restarted  {training.num_attempts - 1} times; {training.num_repeated_steps:,} steps were done again"
        ]
    )
    return [
        heading,
        f"  predicted  {report.predicted_throughput_samples_per_s:,.0f} samples/s",
        f"  measured   {speed_text(training.undisturbed_throughput_samples_per_s)} samples/s{comparison}; "
        f"{speed_text(training.throughput_samples_per_s)} over the whole time, with checkpoints",
        *restarted,
        *([f"  learnt     {report.correction.summary}"] if report.provisioning.is_rehearsal else []),
        *aligned_table(STAGE_SPEED_HEADER, speed_rows(report), left={1}),
    ]


def _quality_lines(report: RunReport) -> list[str]:
    return [
        f"Quality on the {report.num_eval_rows:,} latest rows, trained on the {report.num_train_rows:,} before",
        *aligned_table(QUALITY_HEADER, quality_rows(report), left={0}),
        *(f"  {line}" for line in baseline_lines(report)),
    ]


def _where_lines(report: PlanReport, workspace: Workspace) -> list[str]:
    services = workspace.running_services()
    url = services.mlflow_url if services else DEFAULT_MLFLOW_URL
    hint = "" if services else "   (after: make serve)"
    return [
        "Where to look",
        f"  MLflow  {report.tracked.address(url)}{hint}",
        f"  nights  {nights_address(report.tracked, url)}",
        f"  files   {workspace.run_directory(report.run_id)}",
    ]


def _instances_of(report: PlanReport) -> str:
    groups = report.provisioning.cloud_plan.groups
    return " + ".join(f"{group.count} x {group.offer.instance_type.name}" for group in groups)
