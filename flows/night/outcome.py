"""What came of a night: measured against its plan, recorded, and its model judged against the champion."""

from __future__ import annotations

from flows.night.opened_run import OpenedRun
from flows.night.plan import NightPlan, compared
from heterps_core.training.training_run import TrainingRun
from tasks.clusters import bills_of_run
from tasks.data import source_name
from tasks.judging.baseline import measure_baseline
from tasks.judging.promotion_gates import PromotionDecision
from tasks.promotion import promote_if_better
from tasks.publishing import publish_decision, publish_report
from tasks.recording import record_plan, record_run, register_model
from tasks.records.runs import COMPLETED
from tasks.reports.run_report import RunReport
from tasks.running.progress import log_block, log_step
from tasks.running.run_lifecycle import close_run
from tasks.running.tidying import drop_what_resuming_needs
from tasks.scheduling import predict_launch


def judge_and_record(run: OpenedRun, plan: NightPlan, training: TrainingRun) -> None:
    """Record a trained night, let its model become champion where it passes the gates, and show all of it.

    Raises:
        CheckpointError: The run's checkpoint, or the champion's files, cannot be used.
        ConfigurationError: MLflow's store does not answer.
    """
    # First, so that whatever fails below does not lose the model.
    version = register_model(
        run.workspace,
        run.directory,
        plan.report,
        run.clicks,
        data=source_name(run.asked.data, run.asked.schema_file),
        day=run.asked.day,
    )
    # Not before the launch: what is compared, drawn and recorded takes seconds that the training need not wait for.
    planned = compared(run, plan.report)
    report = RunReport.of(
        planned,
        this_machine=plan.profiled.local_profile.hardware_fingerprint,
        learning=plan.learning,
        prediction=predict_launch(plan.profiled, plan.report.provisioning.launch_stages, plan.config),
        training=training,
        baseline=measure_baseline(run.clicks),
        best_reachable=run.clicks.best_reachable,
        bills=bills_of_run(run.workspace, run.asked.provider, run.run_id),
    )
    record_plan(run.workspace, planned)
    record_run(run.workspace, report)
    decision = _judged(run, report, version)
    text = publish_report(run.workspace, report, decision=decision)
    close_run(run.workspace, run.tracked, status="FINISHED", reason=COMPLETED)
    drop_what_resuming_needs(run.directory)
    run.workspace.forget_run_key(run.run_id)
    log_block(text)


def _judged(run: OpenedRun, report: RunReport, version: str) -> PromotionDecision | None:
    """Decide what the registered model becomes; None where it is not judged."""
    decision = promote_if_better(
        run.workspace,
        run_id=run.run_id,
        version=version,
        day=run.asked.day,
        dataset=run.dataset,
        usd_per_million_samples=report.billed_usd_per_million_samples,
        gates=run.asked.gates,
        baseline=report.baseline,
    )
    if isinstance(decision, str):
        log_step("champion", f"version {version} is not judged: {decision}")
        return None
    log_step("champion", decision.why)
    publish_decision(run.workspace, run.tracked, decision)
    return decision
