"""What a run tells people at its end: on the terminal, as Prefect artifacts, and to the record of runs."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from heterps_core.cost_model.evaluation import StageEvaluation
from heterps_core.data.quality import ClickQuality
from heterps_core.explanation.explanation import PlanExplanation
from heterps_core.explanation.text import essential_lines, explanation_text
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import SchedulingPlan
from heterps_core.problem.scheduling_problem import SchedulingProblem
from heterps_core.training.training_run import TrainingRun
from heterps_core.units import MS_PER_S
from infra.billing import bill_as_text
from infra.waste import waste_as_text
from infra.workspace import Workspace
from tasks.run_report import PlanReport, RunReport
from tasks.tables import aligned_table, markdown_table

DEFAULT_MLFLOW_URL = "http://127.0.0.1:5000"
RULE = "-" * 78
ESTIMATED_NOTE = "times of device types that are not at hand are estimates from published figures"
STAGE_HEADER = ["stage", "layers", "device type", "replicas", "ms/batch", "USD/hour"]
SEARCH_HEADER = ["method", "USD per run", "samples/s", "gap", "evaluations", "seconds"]


@task(name="publish plan", cache_policy=NO_CACHE)
def publish_plan(report: PlanReport) -> None:
    """Show the plan and why it was chosen on the flow run's page."""
    create_markdown_artifact(plan_markdown(report), key="plan", description="The plan and what it promises")
    create_markdown_artifact(
        explanation_markdown(report.problem, report.explanation),
        key="why-this-plan",
        description="Why this plan, and what would change it",
    )


@task(name="publish bill", cache_policy=NO_CACHE)
def publish_bill(report: RunReport) -> None:
    """Show the bill on the flow run's page."""
    create_markdown_artifact(bill_markdown(report), key="bill", description="What the run cost")


def plan_summary(plan: SchedulingPlan) -> str:
    """Return a plan in one line."""
    stages = ", ".join(f"{stage.num_replicas} x {stage.device_type}" for stage in plan.stages)
    gap = (
        "optimal"
        if plan.optimality_gap == 0
        else f"at most {plan.optimality_gap:.2%} dearer than the cheapest plan"
    )
    return f"{plan.scheduler}: {stages}; {plan.throughput_samples_per_s:,.0f} samples/s, {gap}"


def training_summary(training: TrainingRun) -> str:
    """Return what a training run did in one line."""
    attempts = "" if training.num_attempts == 1 else f", {training.num_attempts} attempts"
    return (
        f"{len(training.steps):,} steps, {training.throughput_samples_per_s:,.0f} samples/s, "
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
        _rehearsal_lines(report),
        _quality_lines(report),
        [line for bill in report.bills for line in bill_as_text(bill).splitlines()]
        + waste_as_text(report.waste).splitlines(),
        _where_lines(report, workspace),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def plan_markdown(report: PlanReport) -> str:
    """Return the plan and the compared searches as Markdown."""
    plan = report.chosen.plan
    return "\n".join(
        [
            f"# Plan of run {report.run_id}",
            "",
            *markdown_table(STAGE_HEADER, _stage_rows(report)),
            "",
            f"- predicted throughput {plan.throughput_samples_per_s:,.0f} samples/s "
            f"(floor {report.problem.throughput_floor_samples_per_s:,.0f})",
            f"- {plan.price_usd_per_hour:.4f} USD/hour, {plan.cost_usd:.6f} USD for the run",
            f"- bought as {report.provisioning.summary}",
            f"- {_gap_text(report)}",
            *([f"- {ESTIMATED_NOTE}"] if report.is_estimated else []),
            "",
            "## Search methods",
            "",
            *markdown_table(SEARCH_HEADER, _search_rows(report)),
            "",
            *(f"- {line}" for line in _failed_search_lines(report)),
        ]
    )


def explanation_markdown(problem: SchedulingProblem, explanation: PlanExplanation) -> str:
    """Return the explanation of the plan as Markdown; its lines are aligned, so they stay as they are."""
    return f"# The plan, explained\n\n```\n{explanation_text(problem, explanation)}\n```\n"


def bill_markdown(report: RunReport) -> str:
    """Return the bills of all launches as Markdown."""
    lines = [f"# Bill of run {report.run_id}", ""]
    for bill in report.bills:
        lines += ["```", bill_as_text(bill), "```", ""]
    lines += ["```", waste_as_text(report.waste), "```", ""]
    lines.append(
        f"The whole plan in instances of a cloud: {report.provisioning.cloud_plan.price_usd_per_hour:.4f} USD/hour, "
        f"{report.provisioning.predicted_cost_usd:.6f} USD for the run."
    )
    return "\n".join(lines)


def _plan_lines(report: PlanReport) -> list[str]:
    plan = report.chosen.plan
    cloud = report.provisioning.cloud_plan
    return [
        f"Plan by {plan.scheduler} for {_job_text(report)}",
        *aligned_table(STAGE_HEADER, _stage_rows(report), left={1, 2}),
        f"  predicted  {plan.throughput_samples_per_s:,.0f} samples/s "
        f"(floor {report.problem.throughput_floor_samples_per_s:,.0f}), {plan.price_usd_per_hour:.4f} USD/hour, "
        f"{plan.cost_usd:.6f} USD for the run",
        _simulated_line(report),
        f"  bought as  {_instances_of(report)}: {cloud.price_usd_per_hour:.4f} USD/hour, "
        f"{report.provisioning.price_age}",
        f"  proof      {_gap_text(report)}",
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
        "Search methods, each with the same budget",
        *aligned_table(SEARCH_HEADER, _search_rows(report), left={0}),
        *(f"  {line}" for line in _failed_search_lines(report)),
    ]


def _stage_rows(report: PlanReport) -> list[list[str]]:
    return [
        [
            str(index),
            _layers_of(report.problem, part),
            part.stage.device_type,
            str(part.stage.num_replicas),
            f"{part.seconds * MS_PER_S:.2f}",
            f"{part.price_usd_per_hour:.4f}",
        ]
        for index, part in enumerate(report.chosen.evaluation.stages)
    ]


def _search_rows(report: PlanReport) -> list[list[str]]:
    return [
        [
            f"{name} (chosen)" if name == report.scheduler else name,
            f"{result.plan.cost_usd:.6f}",
            f"{result.plan.throughput_samples_per_s:,.0f}",
            f"{result.plan.optimality_gap:.2%}",
            f"{result.plan.num_evaluations:,}",
            f"{result.search_seconds:.2f}",
        ]
        for name, result in sorted(report.searches.results.items(), key=lambda item: item[1].plan.cost_usd)
    ]


def _failed_search_lines(report: PlanReport) -> list[str]:
    # The way out that an error ends with is not for a method that is only compared.
    return [f"{name}: {str(error).partition(';')[0]}" for name, error in report.searches.without_plan.items()]


def _rehearsal_lines(report: RunReport) -> list[str]:
    launched = " + ".join(str(stage.num_replicas) for stage in report.provisioning.launch_stages)
    planned = " + ".join(str(stage.num_replicas) for stage in report.chosen.plan.stages)
    measured = report.training.throughput_samples_per_s
    if not report.provisioning.is_rehearsal:
        return [
            "Throughput",
            f"  predicted  {report.chosen.plan.throughput_samples_per_s:,.0f} samples/s",
            f"  measured   {measured:,.0f} samples/s",
        ]
    error = report.prediction_error
    comparison = (
        "" if error is None else f" ({abs(error):.0%} {'above' if error > 0 else 'below'} the prediction)"
    )
    training = report.training
    restarted = (
        []
        if training.num_attempts == 1
        else [
            f"  restarted  {training.num_attempts - 1} times; {training.num_repeated_steps:,} steps were done again"
        ]
    )
    return [
        f"Rehearsal on this machine: {launched} workers for the plan's {planned}",
        f"  predicted  {report.prediction.throughput_samples_per_s:,.0f} samples/s",
        f"  measured   {report.training.undisturbed_throughput_samples_per_s:,.0f} samples/s{comparison}; "
        f"{measured:,.0f} over the whole time, with checkpoints",
        *restarted,
    ]


def _quality_lines(report: RunReport) -> list[str]:
    rows = [[report.model, *_quality_cells(report.training.quality)]]
    if report.baseline is not None:
        rows.append(["logistic regression", *_quality_cells(report.baseline.quality)])
    if report.best_reachable is not None:
        rows.append(["best reachable", *_quality_cells(report.best_reachable)])
    return [
        f"Quality on the {report.num_eval_rows:,} latest rows, trained on the {report.num_train_rows:,} before",
        *aligned_table(["model", "AUC", "log-loss"], rows, left={0}),
    ]


def _where_lines(report: PlanReport, workspace: Workspace) -> list[str]:
    services = workspace.running_services()
    url = services.mlflow_url if services else DEFAULT_MLFLOW_URL
    hint = "" if services else "   (after: make serve)"
    return [
        "Where to look",
        f"  MLflow  {report.tracked.address(url)}{hint}",
        f"  files   {workspace.run_directory(report.run_id)}",
    ]


def _gap_text(report: PlanReport) -> str:
    plan = report.chosen.plan
    if plan.optimality_gap == 0:
        return "optimal: no plan for this problem is cheaper (gap 0)"
    return f"at most {plan.optimality_gap:.2%} dearer than the cheapest plan for this problem"


def _layers_of(problem: SchedulingProblem, part: StageEvaluation) -> str:
    """Return a stage's layers by number, as explanations name them, and by name."""
    first, last = part.stage.first_layer, part.stage.last_layer
    if first == last:
        return f"{first} {problem.layers[first].name}"
    return f"{first}..{last} {problem.layers[first].name} .. {problem.layers[last].name}"


def _instances_of(report: PlanReport) -> str:
    groups = report.provisioning.cloud_plan.groups
    return " + ".join(f"{group.count} x {group.offer.instance_type.name}" for group in groups)


def _quality_cells(quality: ClickQuality) -> list[str]:
    return ["-" if quality.auc is None else f"{quality.auc:.4f}", f"{quality.log_loss:.4f}"]
