"""Trains a planned night, follows it within its caps, records what came of it, and judges its model."""

from __future__ import annotations

from flows.night.plan import NightPlan, OpenedRun, compared
from heterps_core.errors import InterruptedTrainingError
from heterps_core.planning.provisioning.node_order import plan_traffic
from heterps_core.training.node.node_life import leaving_nodes
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.training_run import TrainingRun
from infra.billing.caps import Caps
from tasks.clusters import bills_of_run, keep_storage_usage, rented_cluster
from tasks.data import source_name
from tasks.judging.baseline import measure_baseline
from tasks.judging.promotion_gates import PromotionDecision
from tasks.prices import recheck_prices
from tasks.profiling import charge_measurements
from tasks.promotion import promote_if_better
from tasks.provisioning import Provisioning
from tasks.publishing import publish_decision, publish_report
from tasks.recording import record_plan, record_run, register_model
from tasks.records.runs import COMPLETED, utc_now
from tasks.reports.run_report import RunReport, training_summary
from tasks.running.budget import check_finished_within_budget, spent_this_month_usd, within_budget
from tasks.running.losses import interruption_summary, note_loss
from tasks.running.progress import log_block, log_step
from tasks.running.run_lifecycle import close_run
from tasks.running.tidying import drop_what_resuming_needs
from tasks.scheduling import predict_launch
from tasks.training import check_trained_to_its_end, resume_summary, train, write_job


def train_night(run: OpenedRun, plan: NightPlan) -> TrainingRun | None:
    """Train on the machines of a plan; None where they were preempted or lost, and another launch can go on.

    Raises:
        BudgetExceededError: A cap is exceeded at the prices of now, or was reached.
        ProvisioningError: A machine could not be had.
        TrainingError: A worker failed in a way that would come again, too many launches were lost, or the run was
            asked to stop.
    """
    provisioning = _at_prices_of_now(run, plan.report.provisioning)
    run_directory = run.directory
    if run.is_resumed:
        log_step("resume", resume_summary(run_directory))
    write_job(
        run_directory,
        run_id=run.run_id,
        model=run.asked.sized_model,
        dataset=run.dataset,
        provisioning=provisioning,
        config=plan.config,
        start=run.start,
    )
    with (
        rented_cluster(
            run.workspace,
            run.asked.provider,
            provisioning,
            run_id=run.run_id,
            run_directory=run_directory,
            model=run.asked.sized_model,
            caps=run.asked.caps,
            traffic=plan_traffic(
                plan.profiled.graph,
                provisioning.launch_stages,
                batch_size=plan.config.batch_size,
                num_microbatches=plan.config.num_microbatches,
            ),
            spot_until=plan.spot_until,
        ) as cluster,
        within_budget(
            run.workspace,
            cluster,
            run.asked.caps,
            run_id=run.run_id,
            run_directory=run_directory,
            bucket_usd=provisioning.bucket_usd,
        ) as watch,
    ):
        if not run.is_dry_run:
            charge_measurements(run.workspace, plan.profiled, run_id=run.run_id)
        try:
            training = train(run_directory, cluster)
        except InterruptedTrainingError as error:
            if watch.stopped_by is not None:
                raise
            keep_storage_usage(run.workspace, run.run_id, run_directory, cluster, StorageUsage())
            loss = note_loss(
                run.workspace,
                run.run_id,
                error,
                run_directory=run_directory,
                launch_id=cluster.run_id,
                now=utc_now(),
            )
            log_step("lost", loss.summary)
            return None
    keep_storage_usage(run.workspace, run.run_id, run_directory, cluster, training.storage)
    check_finished_within_budget(watch, training, run_id=run.run_id)
    leaving = sorted(leaving_nodes(run_directory))
    if leaving and not training.is_complete:
        log_step("preempted", interruption_summary(training, leaving))
        return None
    check_trained_to_its_end(training, run_id=run.run_id)
    log_step("trained", training_summary(training))
    return training


def _at_prices_of_now(run: OpenedRun, provisioning: Provisioning) -> Provisioning:
    if run.is_dry_run:
        return provisioning
    rechecked = recheck_prices(
        provisioning,
        provider=run.asked.provider,
        caps=run.asked.caps,
        spent_this_month_usd=spent_this_month_usd(run.workspace, run.asked.provider),
    )
    log_step("prices", rechecked.summary)
    if run.asked.caps == Caps():
        log_step(
            "caps", "none is set: only the plan's own price limits this run; max_usd_per_run and _month would"
        )
    return rechecked


def judge_and_record(run: OpenedRun, plan: NightPlan, training: TrainingRun) -> None:
    """Record a trained night, let its model become champion where it passes the gates, and show all of it."""
    # First, so that whatever fails below does not lose the model.
    version = register_model(
        run.workspace,
        run.directory,
        plan.report,
        run.clicks,
        data=source_name(run.asked.data, run.asked.schema_file, run.asked.prepare_sql),
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
        baseline=measure_baseline(run.clicks) if run.asked.baseline else None,
        best_reachable=run.clicks.best_reachable,
        bills=bills_of_run(run.workspace, run.asked.provider, run.run_id),
    )
    record_plan(run.workspace, planned, report.bills)
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
        judgement=report.training.judgement,
        judged_beside=None if run.start.model is None else run.start.model.version,
    )
    if isinstance(decision, str):
        log_step("champion", f"version {version} is not judged: {decision}")
        return None
    log_step("champion", decision.why)
    publish_decision(run.workspace, run.tracked, decision)
    return decision
