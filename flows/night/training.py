"""Trains a planned night: its machines are rented, followed, held against the caps, and ended."""

from __future__ import annotations

from datetime import datetime

from flows.night.opened_run import OpenedRun
from flows.night.plan import NightPlan
from heterps_core.cluster import Cluster
from heterps_core.errors import InterruptedTrainingError
from heterps_core.planning.provisioning.node_order import plan_traffic
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.training_run import TrainingRun
from infra.billing.caps import Caps
from infra.providers import get_provider
from tasks.clusters import keep_storage_usage, rented_cluster, storage_of_flow
from tasks.prices import recheck_prices
from tasks.profiling import charge_measurements
from tasks.provisioning import Provisioning
from tasks.records.runs import utc_now
from tasks.reports.run_report import training_summary
from tasks.running.budget import check_finished_within_budget, spent_this_month_usd, within_budget
from tasks.running.losses import interruption_summary, note_interruptions, note_loss
from tasks.running.progress import log_step
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
        disk_bytes=get_provider(run.asked.provider).disk_gb_each * 1e9,
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
            _keep_storage_usage(run, cluster, StorageUsage())
            loss = note_loss(
                run.workspace,
                run.run_id,
                error,
                run_directory=run_directory,
                cluster=cluster,
                now=utc_now(),
            )
            log_step("lost", loss.summary)
            return None
    _keep_storage_usage(run, cluster, training.storage)
    check_finished_within_budget(watch, training, run_id=run.run_id)
    leaving = note_interruptions(run.workspace, run.run_id, run_directory=run_directory, cluster=cluster)
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


def _keep_storage_usage(run: OpenedRun, cluster: Cluster, of_nodes: StorageUsage) -> None:
    launched_at = datetime.fromisoformat(cluster.created_at)
    of_flow = storage_of_flow(run.asked.provider, run.directory, since=launched_at, now=utc_now())
    keep_storage_usage(run.workspace, run.run_id, of_nodes + of_flow)
