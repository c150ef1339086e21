"""What a run tells people at its end: on the terminal, as Prefect artifacts, and to the record of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from heterps_core.cost_model.evaluation import StageEvaluation
from heterps_core.data.quality import ClickQuality
from heterps_core.plans.scheduling_plan import SchedulingPlan
from heterps_core.scheduling.problem import SchedulingProblem
from heterps_core.scheduling.rehearsal import RehearsalPrediction
from heterps_core.scheduling.search_result import SearchResult
from heterps_core.training.training_run import TrainingRun
from heterps_core.units import MS_PER_S
from infra.billing import Bill, bill_as_text
from infra.workspace import Workspace
from tasks.baseline import Baseline
from tasks.provisioning import Provisioning
from tasks.scheduling import Searches
from tasks.tracking import TrackedRun

DEFAULT_MLFLOW_URL = "http://127.0.0.1:5000"
RULE = "-" * 78
ESTIMATED_NOTE = "times of device types that are not at hand are estimates from published figures"
STAGE_HEADER = ["stage", "layers", "device type", "replicas", "ms/batch", "USD/hour"]
SEARCH_HEADER = ["method", "USD per run", "samples/s", "gap", "evaluations", "seconds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Everything that a finished run can be judged by."""

    run_id: str
    model: str
    data: str
    num_train_rows: int
    num_eval_rows: int
    problem: SchedulingProblem
    searches: Searches
    scheduler: str
    provisioning: Provisioning
    prediction: RehearsalPrediction
    training: TrainingRun
    baseline: Baseline | None
    best_reachable: ClickQuality | None
    bills: Sequence[Bill]
    tracked: TrackedRun
    is_estimated: bool
    """Times of at least one device type of the plan are a roofline and not a measurement."""

    @property
    def chosen(self) -> SearchResult:
        """Result of the scheduler whose plan was taken."""
        return self.searches.results[self.scheduler]

    @property
    def prediction_error(self) -> float | None:
        """Throughput of the rehearsal's median step over the predicted one, less 1; None where none was measured."""
        measured = self.training.undisturbed_throughput_samples_per_s
        if not self.provisioning.is_rehearsal or measured == 0:
            return None
        return measured / self.prediction.throughput_samples_per_s - 1

    @property
    def billed_usd(self) -> float:
        """Of all launches, at list prices where it is a rehearsal."""
        return sum(bill.total_usd for bill in self.bills)

    def metrics(self) -> dict[str, float | None]:
        """Return the figures of the whole run under their stable names, beside those of its plan."""
        quality, baseline, best = self.training.quality, self.baseline, self.best_reachable
        samples = sum(step.num_samples for step in self.training.steps)
        return {
            "predicted/rehearsal_throughput_samples_per_s": self.prediction.throughput_samples_per_s,
            "measured/throughput_samples_per_s": self.training.throughput_samples_per_s,
            "measured/undisturbed_throughput_samples_per_s": self.training.undisturbed_throughput_samples_per_s,
            "measured/prediction_error": self.prediction_error,
            "measured/samples": float(samples),
            "measured/repeated_steps": float(self.training.num_repeated_steps),
            "cost/billed_usd": self.billed_usd,
            "cost/waste_usd": sum(bill.waste_usd for bill in self.bills),
            "cost/cloud_price_usd_per_hour": self.provisioning.cloud_plan.price_usd_per_hour,
            "cost/cloud_usd": self.provisioning.predicted_cost_usd,
            "quality/auc": quality.auc,
            "quality/log_loss": quality.log_loss,
            "quality/baseline_auc": baseline.quality.auc if baseline else None,
            "quality/baseline_log_loss": baseline.quality.log_loss if baseline else None,
            "quality/best_reachable_auc": best.auc if best else None,
            "quality/best_reachable_log_loss": best.log_loss if best else None,
        }


@task(name="publish artifacts", cache_policy=NO_CACHE)
def publish_artifacts(report: RunReport) -> None:
    """Show the plan and the bill on the flow run's page."""
    create_markdown_artifact(plan_markdown(report), key="plan", description="The plan and what it promises")
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


def report_text(report: RunReport, workspace: Workspace) -> str:
    """Return the final report for a terminal."""
    parts = [
        ["", RULE, f"Run {report.run_id}: {report.model} on {report.data}", RULE],
        _plan_lines(report),
        _search_lines(report),
        _rehearsal_lines(report),
        _quality_lines(report),
        [line for bill in report.bills for line in bill_as_text(bill).splitlines()],
        _where_lines(report, workspace),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def plan_markdown(report: RunReport) -> str:
    """Return the plan and the compared searches as Markdown."""
    plan = report.chosen.plan
    return "\n".join(
        [
            f"# Plan of run {report.run_id}",
            "",
            *_markdown_table(STAGE_HEADER, _stage_rows(report)),
            "",
            f"- predicted throughput {plan.throughput_samples_per_s:,.0f} samples/s "
            f"(floor {report.problem.throughput_floor_samples_per_s:,.0f})",
            f"- {plan.price_usd_per_hour:.4f} USD/hour, {plan.cost_usd:.6f} USD for the run",
            f"- {_gap_text(report)}",
            *([f"- {ESTIMATED_NOTE}"] if report.is_estimated else []),
            "",
            "## Search methods",
            "",
            *_markdown_table(SEARCH_HEADER, _search_rows(report)),
            "",
            *(f"- {line}" for line in _failed_search_lines(report)),
        ]
    )


def bill_markdown(report: RunReport) -> str:
    """Return the bills of all launches as Markdown."""
    lines = [f"# Bill of run {report.run_id}", ""]
    for bill in report.bills:
        lines += ["```", bill_as_text(bill), "```", ""]
    lines.append(
        f"The whole plan in instances of a cloud: {report.provisioning.cloud_plan.price_usd_per_hour:.4f} USD/hour, "
        f"{report.provisioning.predicted_cost_usd:.6f} USD for the run."
    )
    return "\n".join(lines)


def _plan_lines(report: RunReport) -> list[str]:
    plan = report.chosen.plan
    cloud = report.provisioning.cloud_plan
    return [
        f"Plan by {plan.scheduler} for {_job_text(report)}",
        *_aligned(STAGE_HEADER, _stage_rows(report), left={1, 2}),
        f"  predicted  {plan.throughput_samples_per_s:,.0f} samples/s "
        f"(floor {report.problem.throughput_floor_samples_per_s:,.0f}), {plan.price_usd_per_hour:.4f} USD/hour, "
        f"{plan.cost_usd:.6f} USD for the run",
        f"  bought as  {_instances_of(report)}: {cloud.price_usd_per_hour:.4f} USD/hour",
        f"  proof      {_gap_text(report)}",
        *([f"  note       {ESTIMATED_NOTE}"] if report.is_estimated else []),
        *_dearer_lines(report),
    ]


def _dearer_lines(report: RunReport) -> list[str]:
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


def _search_lines(report: RunReport) -> list[str]:
    return [
        "Search methods, each with the same budget",
        *_aligned(SEARCH_HEADER, _search_rows(report), left={0}),
        *(f"  {line}" for line in _failed_search_lines(report)),
    ]


def _stage_rows(report: RunReport) -> list[list[str]]:
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


def _search_rows(report: RunReport) -> list[list[str]]:
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


def _failed_search_lines(report: RunReport) -> list[str]:
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
        *_aligned(["model", "AUC", "log-loss"], rows, left={0}),
    ]


def _where_lines(report: RunReport, workspace: Workspace) -> list[str]:
    services = workspace.running_services()
    url = services.mlflow_url if services else DEFAULT_MLFLOW_URL
    hint = "" if services else "   (after: make serve)"
    return [
        "Where to look",
        f"  MLflow  {report.tracked.address(url)}{hint}",
        f"  files   {workspace.run_directory(report.run_id)}",
    ]


def _gap_text(report: RunReport) -> str:
    plan = report.chosen.plan
    if plan.optimality_gap == 0:
        return "optimal: no plan for this problem is cheaper (gap 0)"
    return f"at most {plan.optimality_gap:.2%} dearer than the cheapest plan for this problem"


def _layers_of(problem: SchedulingProblem, part: StageEvaluation) -> str:
    first, last = problem.layers[part.stage.first_layer].name, problem.layers[part.stage.last_layer].name
    return first if first == last else f"{first} .. {last}"


def _instances_of(report: RunReport) -> str:
    groups = report.provisioning.cloud_plan.groups
    return " + ".join(f"{group.count} x {group.offer.instance_type.name}" for group in groups)


def _quality_cells(quality: ClickQuality) -> list[str]:
    return ["-" if quality.auc is None else f"{quality.auc:.4f}", f"{quality.log_loss:.4f}"]


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: set[int]) -> list[str]:
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
