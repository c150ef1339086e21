"""Trains a planned night, follows it within its caps, records what came of it, and judges its model."""

from __future__ import annotations

from contextlib import ExitStack

from flows.night.plan import NightPlan, OpenedRun, compared
from heterps_core.cluster import Cluster
from heterps_core.data.distinct_values import turnover_summary
from heterps_core.errors import ProvisioningError
from heterps_core.planning.provisioning.node_order import plan_traffic
from heterps_core.training.outcome import Complete, Failed, MachinesLost, Stopped
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
from tasks.running.budget import check_not_stopped, spent_this_month_usd, within_budget
from tasks.running.losses import note_loss, restart_budget
from tasks.running.progress import log_block, log_step
from tasks.running.replacement import replaced_machines
from tasks.running.run_lifecycle import close_run
from tasks.running.tidying import drop_what_resuming_needs
from tasks.scheduling import predict_launch
from tasks.training import resume_summary, stopped_error, train, write_job


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
    with ExitStack() as fleet:
        cluster = fleet.enter_context(
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
            )
        )
        watch = fleet.enter_context(
            within_budget(
                run.workspace,
                cluster,
                run.asked.caps,
                run_id=run.run_id,
                run_directory=run_directory,
                bucket_usd=provisioning.bucket_usd,
            )
        )
        if not run.is_dry_run:
            charge_measurements(run.workspace, plan.profiled, run_id=run.run_id)
        outcome = train(run_directory, cluster)
        launched = cluster
        while isinstance(outcome, MachinesLost):
            check_not_stopped(watch, outcome, run_id=run.run_id)
            following = _next_generation(fleet, run, provisioning, cluster, outcome)
            if following is None:
                break
            cluster = following
            outcome = train(run_directory, cluster)
        of_nodes = outcome.training.storage if isinstance(outcome, Complete | Stopped) else StorageUsage()
        keep_storage_usage(run.workspace, run.run_id, run_directory, launched, of_nodes)
        check_not_stopped(watch, outcome, run_id=run.run_id)
    match outcome:
        case Complete(training):
            log_step("trained", training_summary(training))
            return training
        case Stopped():
            raise stopped_error(outcome, run_id=run.run_id)
        case Failed(error):
            raise error
    return None


def _next_generation(
    fleet: ExitStack, run: OpenedRun, provisioning: Provisioning, cluster: Cluster, lost: MachinesLost
) -> Cluster | None:
    """Note a loss and return the cluster that goes on; None where the whole fleet is to be planned again.

    Args:
        fleet: Ends what is launched.

    Raises:
        BudgetExceededError: A cap is exceeded by what would take the place of lost machines.
        TrainingError: The run may not restart again.
    """
    loss = note_loss(
        run.workspace,
        run.run_id,
        lost,
        run_directory=run.directory,
        launch_id=cluster.run_id,
        max_restarts_per_hour=restart_budget(
            run.asked.max_restarts_per_hour,
            interruptions_per_hour=provisioning.launch_plan.interruptions_per_hour,
        ),
        now=utc_now(),
    )
    log_step("preempted" if loss.is_noticed else "lost", loss.summary)
    if not lost.node_ids:
        return cluster.next_generation()
    try:
        following = fleet.enter_context(
            replaced_machines(
                run.workspace,
                cluster,
                lost,
                provisioning,
                run_id=run.run_id,
                run_directory=run.directory,
                model=run.asked.sized_model,
                caps=run.asked.caps,
            )
        )
    except ProvisioningError as problem:
        log_step("replan", f"{problem}; the rest of the fleet is ended, and the run is planned again")
        return None
    num_kept = len(cluster.nodes) - len(lost.node_ids)
    log_step("replaced", f"{', '.join(lost.node_ids)}; {num_kept} of {len(cluster.nodes)} machines stay")
    return following


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
    version, id_turnover = register_model(
        run.workspace,
        run.directory,
        plan.report,
        run.clicks,
        data=source_name(run.asked.data, run.asked.schema_file, run.asked.prepare_sql),
        day=run.asked.day,
    )
    if id_turnover:
        log_step("ids", turnover_summary(id_turnover))
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
        id_turnover=id_turnover,
    )
    record_plan(run.workspace, planned, report.bills)
    record_run(run.workspace, report)
    decision = _judged(run, report, version)
    text = publish_report(run.workspace, report, decision=decision)
    close_run(run.workspace, run.tracked, status="FINISHED", reason=COMPLETED)
    drop_what_resuming_needs(run.directory)
    run.workspace.forget_run_key(run.run_id)
    log_block(text)


def _judged(run: OpenedRun, report: RunReport, version: str) -> PromotionDecision | str:
    """Decide what the registered model becomes; return that, or why it is not judged."""
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
        return decision
    log_step("champion", decision.why)
    publish_decision(run.workspace, run.tracked, decision)
    return decision
