"""Writes a finished run into the record of runs: settings, figures, pictures, documents and the model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.hardware import Market
from heterps_core.training.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks import click_model, tracking
from tasks.click_model import ClickModel, example_rows
from tasks.data import PreparedClicks
from tasks.figures import cost_figure, stages_figure
from tasks.front_figure import front_figure
from tasks.reporting import explanation_markdown
from tasks.run_report import PlanReport, RunReport
from tasks.tracking import RunSettings


@task(name="record plan", cache_policy=NO_CACHE)
def record_plan(workspace: Workspace, report: PlanReport, *, num_microbatches: int) -> None:
    """Write plan, searches and their figures to MLflow, before anything is launched.

    The chosen plan's figures stand on the parent run too, as the comparison page folds children away.
    """
    run, chosen = report.tracked, report.chosen
    for name, result in report.searches.results.items():
        tracking.record_search(
            workspace, run, result, _settings(report, name), is_chosen=name == report.scheduler
        )
    tracking.record_settings(workspace, run, _settings(report, report.scheduler))
    tracking.record_metrics(workspace, run, {**tracking.plan_metrics(chosen), **report.plan_metrics()})
    tracking.record_document(workspace, run, "plan.json", chosen.plan.to_json())
    tracking.record_document(workspace, run, "problem.json", report.problem.to_json())
    tracking.record_document(workspace, run, "explanation.json", report.explanation.to_json())
    tracking.record_text(
        workspace, run, "explanation.md", explanation_markdown(report.problem, report.explanation)
    )
    if report.explanation.front:
        figure = front_figure(report.problem, report.explanation)
        tracking.record_figure(workspace, run, "cost_of_throughput.png", figure)
    tracking.record_document(workspace, run, "provisioning.json", report.provisioning.cloud_plan.to_json())
    for path in report.provisioning.price_files:
        tracking.record_file(workspace, run, path)
    figure = stages_figure(
        report.problem,
        chosen.evaluation,
        num_microbatches=num_microbatches,
        title=f"{report.problem.model}: plan of {report.scheduler} over time",
    )
    tracking.record_figure(workspace, run, "stages_over_time.png", figure)
    tracking.record_figure(
        workspace,
        run,
        "plans_compared.png",
        cost_figure(report.problem, report.searches.results, chosen=report.scheduler),
    )


@task(name="record run", cache_policy=NO_CACHE)
def record_run(workspace: Workspace, report: RunReport, *, text: str) -> None:
    """Write what came of the plan to MLflow: throughput, quality and the bill."""
    run = report.tracked
    tracking.record_metrics(workspace, run, report.metrics())
    steps = report.training.steps
    tracking.record_series(workspace, run, {"train/log_loss": [(step.step, step.loss) for step in steps]})
    for bill in report.bills:
        tracking.record_document(workspace, run, f"bills/{bill.run_id}.json", bill.to_json())
    tracking.record_text(workspace, run, "report.txt", text)


@task(name="register model", cache_policy=NO_CACHE)
def register_model(
    workspace: Workspace, run_directory: RunDirectory, report: RunReport, clicks: PreparedClicks
) -> str:
    """Register the trained model as the newest challenger; return its version.

    Raises:
        CheckpointError: The run's checkpoint cannot be read.
    """
    from heterps_core.serving.exported_model import export_model

    with TemporaryDirectory(prefix="heterps-model-") as name:
        folder = Path(name) / "click_model"
        manifest = clicks.open().manifest
        export_model(run_directory, manifest, folder)
        example = example_rows(manifest.schema)
        return tracking.register_model(
            workspace,
            report.tracked,
            folder,
            loader_module=click_model.__name__,
            example=example,
            # The folder is read back, so that what is registered is known to load.
            example_prediction=ClickModel(folder).predict(example),
        )


def _settings(report: PlanReport, scheduler: str) -> RunSettings:
    plan = report.searches.results[scheduler].plan
    return RunSettings.of_plan(
        plan.stages,
        method=scheduler,
        model=report.model,
        market=Market.ON_DEMAND,
        batch_size=report.problem.batch_size,
        seed=plan.seed,
    )
