"""The tables of a plan and of a run, cell by cell, for a terminal and for pages."""

from __future__ import annotations

from heterps_core.judging.quality import ClickQuality
from heterps_core.planning.cost_model.evaluation import StageEvaluation
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.units import MS_PER_S
from tasks.judging.baseline import Baseline
from tasks.reports.blocks.stage_outcomes import StageOutcome
from tasks.reports.run_report import PlanReport, RunReport

ESTIMATED_NOTE = "times of device types that are not at hand are estimates from published figures"
STAGE_HEADER = ["stage", "layers", "device type", "replicas", "ms/batch", "USD/hour"]
STAGE_SPEED_HEADER = [
    "stage",
    "device type",
    "workers",
    "predicted ms",
    "measured ms",
    "predicted/s",
    "measured/s",
    "waited",
    "predicted USD",
    "measured USD",
]
"""Milliseconds of the stage's own work for a batch, its samples per second, and its machines' price
while steps ran."""

NOT_MEASURED = "-"
SEARCH_HEADER = ["method", "USD per run", "samples/s", "gap", "evaluations", "seconds"]
QUALITY_HEADER = ["model", "AUC", "log-loss"]


def stage_rows(report: PlanReport) -> list[list[str]]:
    """Return the stages of a plan, under `STAGE_HEADER`."""
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


def search_rows(report: PlanReport) -> list[list[str]]:
    """Return what each search method found, the cheapest first, under `SEARCH_HEADER`."""
    return [
        [
            _method_text(report, name),
            f"{result.plan.cost_usd:.6f}",
            f"{result.plan.throughput_samples_per_s:,.0f}",
            f"{result.plan.optimality_gap:.2%}",
            f"{result.plan.num_evaluations:,}",
            f"{result.search_seconds:.2f}",
        ]
        for name, result in sorted(report.searches.results.items(), key=lambda item: item[1].plan.cost_usd)
    ]


def _method_text(report: PlanReport, name: str) -> str:
    if name == report.searches.taken:
        return f"{name} (chosen)"
    return f"{name} (asked for)" if name == report.scheduler else name


def failed_search_lines(report: PlanReport) -> list[str]:
    """Return a line for each method that found no plan."""
    # The way out that an error ends with is not for a method that is only compared.
    return [f"{name}: {str(error).partition(';')[0]}" for name, error in report.searches.without_plan.items()]


def speed_rows(report: RunReport) -> list[list[str]]:
    """Return predicted and measured figures of each stage, under `STAGE_SPEED_HEADER`."""
    return [_speed_cells(stage) for stage in report.stages]


def quality_rows(report: RunReport) -> list[list[str]]:
    """Return the trained model beside what it is compared with, under `QUALITY_HEADER`."""
    rows = [[report.model, *_quality_cells(report.training.quality)]]
    if isinstance(report.baseline, Baseline):
        rows.append(["logistic regression", *_quality_cells(report.baseline.quality)])
    if report.best_reachable is not None:
        rows.append(["best reachable", *_quality_cells(report.best_reachable)])
    return rows


def baseline_lines(report: RunReport) -> list[str]:
    """Return what must be known of the logistic regression: that there is none, or that it saw a sample."""
    if not isinstance(report.baseline, Baseline):
        return [f"There is no logistic regression to compare with: {report.baseline.why}."]
    if report.baseline.num_train_rows < report.num_train_rows:
        return [
            f"The logistic regression was fitted on {report.baseline.num_train_rows:,} of these training rows, "
            f"evenly over them."
        ]
    return []


def floor_text(report: PlanReport) -> str:
    """Return the least throughput that was asked for."""
    floor = report.problem.throughput_floor_samples_per_s
    return f"at least {floor:,.0f} were asked for" if floor > 0 else "no floor was set"


def speed_text(samples_per_s: float | None) -> str:
    """Return a speed for people; "-" where too few steps were trained to measure one."""
    return "-" if samples_per_s is None else f"{samples_per_s:,.0f}"


def gap_text(report: PlanReport) -> str:
    """Return what is proven of the plan's cost."""
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


def _speed_cells(stage: StageOutcome) -> list[str]:
    measured, speed = stage.measured_seconds, stage.measured_throughput_samples_per_s
    return [
        str(stage.index),
        stage.device_type,
        str(stage.num_replicas),
        f"{stage.predicted_seconds * MS_PER_S:.2f}",
        NOT_MEASURED if measured is None else f"{measured * MS_PER_S:.2f}",
        f"{stage.predicted_throughput_samples_per_s:,.0f}",
        NOT_MEASURED if speed is None else f"{speed:,.0f}",
        NOT_MEASURED if stage.idle_share is None else f"{stage.idle_share:.0%}",
        f"{stage.predicted_usd:.6f}",
        f"{stage.measured_usd:.6f}",
    ]


def _quality_cells(quality: ClickQuality) -> list[str]:
    return ["-" if quality.auc is None else f"{quality.auc:.4f}", f"{quality.log_loss:.4f}"]
