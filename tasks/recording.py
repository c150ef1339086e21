"""Puts a run into its record: settings, figures, documents; and its model into the registry."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from heterps_core.data.distinct_values import IdTurnover
from heterps_core.errors import ConfigurationError
from heterps_core.planning.explain.text import explanation_text
from heterps_core.training.storage.run_directory import STEPS, RunDirectory
from infra.billing.bill import Bill
from infra.workspace import Workspace
from tasks.data import PreparedClicks
from tasks.records import model_registry, tracking
from tasks.records.mlflow_names import CHALLENGER_ALIAS, Tag, TrackedRun
from tasks.records.run_record import note, note_file, note_metrics, note_series
from tasks.reports.run_report import PlanReport, RunReport
from tasks.reports.stage_outcomes import stage_series
from tasks.running.progress import log_step
from tasks.steps import step

START_TO_FIRST_STEP = "overhead/start_to_first_step_s"

STORE_WAIT_S = 1_800.0
"""How long a trained model waits to be registered; its machines have ended, so that waiting costs nothing."""

_STORE_POLL_S = 5.0


@step("record plan")
def record_plan(workspace: Workspace, report: PlanReport, bills: Sequence[Bill] = ()) -> None:
    """Add plan, searches and their figures to the run's record.

    The chosen plan's figures stand on the parent run too, as MLflow's table folds children away; with the
    markets of the machines that the bills name, which may be others than the plan's.
    """
    run, chosen = report.tracked, report.chosen
    for name, result in report.searches.results.items():
        tracking.record_search(
            workspace,
            run,
            result,
            _settings(report, name),
            name=f"search {name}",
            is_chosen=name == report.searches.taken,
        )
    trained_with = {f"training.{name}": str(value) for name, value in asdict(report.config).items()}
    settings = _settings(report, report.searches.taken) | {"market": _bought_in(report, bills)}
    note(workspace, run, name=report.name_with_plan, parameters=settings | trained_with)
    note_metrics(workspace, run, {**tracking.plan_metrics(chosen), **report.plan_metrics()})
    documents = {
        "plan": chosen.plan,
        "problem": report.problem,
        "explanation": report.explanation,
        "provisioning": report.provisioning.cloud_plan,
    }
    for name, document in documents.items():
        note_file(workspace, run.run_id, f"{name}.json", document.to_json())
    explanation = f"{explanation_text(report.explanation)}\n\n{report.tables_text}"
    note_file(workspace, run.run_id, "explanation.md", f"# The plan, explained\n\n```\n{explanation}\n```\n")
    for path in report.provisioning.price_files:
        note_file(workspace, run.run_id, path.name, path.read_bytes())


@step("record run")
def record_run(workspace: Workspace, report: RunReport) -> None:
    """Add the outcome of a plan to the run's record: throughput, quality, the bill, and the speed to learn from."""
    run = report.tracked
    note_metrics(workspace, run, report.metrics())
    losses = [(step.step, step.loss) for step in report.training.steps]
    note_series(workspace, run, {"train/log_loss": losses, **stage_series(report.stages)})
    if report.speed is not None:
        note(workspace, run, tags={Tag.SPEED: json.dumps(report.speed.to_json())})
    for bill in report.bills:
        note_file(workspace, run.run_id, f"bills/{bill.run_id}.json", bill.to_json())


def _start_to_first_step_s(run: RunDirectory, *, started_at: datetime) -> float | None:
    """Return the seconds from a flow's start to its first training step; None where it has trained none.

    A worker writes its first step down at once, so the first file of steps is as old as that step, by the clock of
    the store. Files of a run that is resumed are older than the flow that resumes it.
    """
    seconds = [stamp / 1e9 - started_at.timestamp() for stamp in run.stamps(STEPS).values()]
    return min((since for since in seconds if since > 0), default=None)


def record_overhead(
    workspace: Workspace, tracked: TrackedRun, run: RunDirectory, *, started_at: datetime
) -> None:
    """Add to the run's record how long the run took until its first training step."""
    seconds = _start_to_first_step_s(run, started_at=started_at)
    note_metrics(workspace, tracked, {START_TO_FIRST_STEP: seconds})


@step("register model")
def register_model(
    workspace: Workspace,
    run_directory: RunDirectory,
    report: PlanReport,
    clicks: PreparedClicks,
    *,
    data: str,
    day: str | None = None,
) -> tuple[str, tuple[IdTurnover, ...]]:
    """Register the trained model as the newest challenger; return its version, and what became of dynamic ids.

    Where MLflow's store does not answer, it is waited for, as a registration cannot be kept for later.

    Args:
        data: Name of their source.
        day: That the rows are of; None where the data is not cut into days.

    Raises:
        CheckpointError: The run's checkpoint cannot be read.
        ConfigurationError: MLflow's store has not answered for `STORE_WAIT_S`.
    """
    from heterps_core.serving.exported_model import export_model

    # On the file system of MLflow's own artifacts, which link the files.
    with TemporaryDirectory(prefix=".model-", dir=workspace.run_folder(report.run_id)) as name:
        folder = Path(name) / "click_model"
        id_turnover = export_model(run_directory, clicks.open().manifest, folder, model=report.model)
        _wait_for_store(workspace)
        version = model_registry.register_model(
            workspace, report.tracked, folder, model=report.model, data=data, day=day
        )
        return version, id_turnover


def _wait_for_store(workspace: Workspace) -> None:
    """Return once the store answers, or after `STORE_WAIT_S`, when the next call says why it does not."""
    until_s = time.monotonic() + STORE_WAIT_S
    is_said = False
    while time.monotonic() < until_s:
        with suppress(ConfigurationError):
            model_registry.version_called(workspace, CHALLENGER_ALIAS)
            return
        if not is_said:
            log_step("register", f"waits for MLflow's store, at most {STORE_WAIT_S / 60:.0f} minutes")
            is_said = True
        time.sleep(_STORE_POLL_S)


def _settings(report: PlanReport, scheduler: str) -> dict[str, str]:
    plan = report.searches.results[scheduler].plan
    return tracking.run_settings(
        plan.stages,
        method=scheduler,
        model=report.model,
        batch_size=report.problem.batch_size,
        seed=plan.seed,
    )


def _bought_in(report: PlanReport, bills: Sequence[Bill]) -> str:
    """Return the markets of each stage's machines: those that were rented, else those that the plan would rent."""
    rented = [
        (line.stage, line.market)
        for bill in bills
        if not bill.is_dry_run
        for line in bill.lines
        if not line.is_waste
    ]
    planned = [(group.stage, str(group.offer.market)) for group in report.provisioning.cloud_plan.groups]
    stages: dict[int, set[str]] = {}
    for stage, market in rented or planned:
        stages.setdefault(stage, set()).add(market)
    return " | ".join(" + ".join(sorted(markets)) for _, markets in sorted(stages.items()))
