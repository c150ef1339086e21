"""Writes a finished run into the record of runs: settings, figures, pictures, documents and the model."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks.data import PreparedClicks
from tasks.learning import speed_tag
from tasks.records import model_registry, tracking
from tasks.records.mlflow_names import CHALLENGER_ALIAS, NOTE_TAG
from tasks.records.mlflow_store import deliver_waiting
from tasks.records.mlflow_views import experiment_tags, run_name, run_note
from tasks.records.tracked_run import RunSettings
from tasks.reports.blocks.stage_outcomes import stage_series
from tasks.reports.pages import Picture
from tasks.reports.report_pictures import plan_pictures
from tasks.reports.reporting import explanation_markdown
from tasks.reports.run_report import PlanReport, RunReport
from tasks.running.story import tell

STORE_WAIT_S = 1_800.0
"""How long a trained model waits to be registered; its machines have ended, so that waiting costs nothing."""

STORE_POLL_S = 5.0


@task(name="record plan", cache_policy=NO_CACHE)
def record_plan(workspace: Workspace, report: PlanReport, *, num_microbatches: int) -> dict[str, Picture]:
    """Write plan, searches and their figures to MLflow; return the pictures, which are drawn once.

    The chosen plan's figures stand on the parent run too, as the comparison page folds children away.
    """
    run, chosen = report.tracked, report.chosen
    tracking.tag_experiment(workspace, run, experiment_tags())
    tracking.name_run(workspace, run, run_name(report))
    for name, result in report.searches.results.items():
        tracking.record_search(
            workspace, run, result, _settings(report, name), is_chosen=name == report.searches.taken
        )
    tracking.record_settings(workspace, run, _settings(report, report.searches.taken))
    tracking.record_metrics(workspace, run, {**tracking.plan_metrics(chosen), **report.plan_metrics()})
    tracking.record_document(workspace, run, "plan.json", chosen.plan.to_json())
    tracking.record_document(workspace, run, "problem.json", report.problem.to_json())
    tracking.record_document(workspace, run, "explanation.json", report.explanation.to_json())
    tracking.record_text(
        workspace, run, "explanation.md", explanation_markdown(report.problem, report.explanation)
    )
    tracking.record_document(workspace, run, "provisioning.json", report.provisioning.cloud_plan.to_json())
    for path in report.provisioning.price_files:
        tracking.record_file(workspace, run, path)
    pictures = plan_pictures(report, num_microbatches=num_microbatches)
    for picture in pictures.values():
        tracking.record_bytes(workspace, run, picture.name, picture.png)
    return pictures


@task(name="record run", cache_policy=NO_CACHE)
def record_run(workspace: Workspace, report: RunReport, *, text: str) -> None:
    """Write what came of the plan to MLflow: throughput, quality, the bill, and what later runs learn from."""
    run = report.tracked
    tracking.record_metrics(workspace, run, report.metrics())
    steps = report.training.steps
    tracking.record_series(
        workspace,
        run,
        {"train/log_loss": [(step.step, step.loss) for step in steps], **stage_series(report.stages)},
    )
    tags = {NOTE_TAG: run_note(report)}
    if report.speed is not None:
        tags |= speed_tag(report.speed)
    tracking.tag_run(workspace, run, tags)
    for bill in report.bills:
        tracking.record_document(workspace, run, f"bills/{bill.run_id}.json", bill.to_json())
    tracking.record_text(workspace, run, "report.txt", text)


@task(name="register model", cache_policy=NO_CACHE)
def register_model(
    workspace: Workspace,
    run_directory: RunDirectory,
    report: PlanReport,
    clicks: PreparedClicks,
    *,
    data: str,
    day: str | None = None,
) -> str:
    """Register the trained model as the newest challenger; return its version.

    Where MLflow's store does not answer, it is waited for, as a registration cannot be kept for later.

    Args:
        workspace: Where runs are recorded.
        run_directory: Where the newest checkpoint is.
        report: Of the run's plan.
        clicks: What it was trained on.
        data: Name of their source.
        day: That the rows are of; None where the data is not cut into days.

    Raises:
        CheckpointError: The run's checkpoint cannot be read.
        ConfigurationError: MLflow's store has not answered for `STORE_WAIT_S`.
    """
    from heterps_core.serving.export import export_model

    with TemporaryDirectory(prefix="heterps-model-") as name:
        folder = Path(name) / "click_model"
        export_model(run_directory, clicks.open().manifest, folder, model=report.model)
        _wait_for_store(workspace)
        return model_registry.register_model(
            workspace, report.tracked, folder, run_id=report.run_id, model=report.model, data=data, day=day
        )


def _wait_for_store(workspace: Workspace) -> None:
    """Return once the store has all that waited for it, or after `STORE_WAIT_S`, when the next call says why."""
    until_s = time.monotonic() + STORE_WAIT_S
    is_told = False
    while not _has_everything(workspace) and time.monotonic() < until_s:
        if not is_told:
            tell("register", f"waits for MLflow's store, at most {STORE_WAIT_S / 60:.0f} minutes")
            is_told = True
        time.sleep(STORE_POLL_S)


def _has_everything(workspace: Workspace) -> bool:
    """Tell whether the store answers and nothing waits for it any more."""
    try:
        model_registry.version_called(workspace, CHALLENGER_ALIAS)
    except ConfigurationError:
        return False
    return deliver_waiting(workspace)


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
