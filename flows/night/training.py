"""Trains a planned night within its caps, records it, and judges its model."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from flows.night.plan import NightPlan, compared, log_rented_price
from flows.night.run import OpenedRun
from heterps_core.data.distinct_values import turnover_summary
from heterps_core.training.outcome import Complete, Failed, Stopped
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.training_run import TrainingRun
from infra.billing.caps import Caps
from infra.providers import get_provider
from infra.providers.base import InsufficientCapacityError
from tasks.clusters import bills_of_run, keep_storage_usage
from tasks.judging.baseline import measure_baselines
from tasks.judging.challenge import Challenger
from tasks.judging.promotion_gates import PromotionDecision
from tasks.profiling import charge_measurements
from tasks.promotion import promote_if_better
from tasks.publishing import publish_decision, publish_report
from tasks.recording import record_plan, record_run, register_model
from tasks.records.mlflow_names import COMPLETED
from tasks.records.run_files import keep_explanation
from tasks.records.run_record import close_run, note_metrics
from tasks.reports.run_report import RunReport, training_summary
from tasks.running.budget import within_budget
from tasks.running.fleet import Fleet, FleetRun, launched
from tasks.running.losses import restarts_of
from tasks.running.night_fleet import NightFleet, Replan, replan_without
from tasks.running.progress import log_block, log_step
from tasks.running.tidying import drop_what_resuming_needs
from tasks.training import resume_summary, stopped_error, write_job


def train_night(run: OpenedRun, plan: NightPlan) -> TrainingRun | Replan:
    """Train on the machines of a plan, and on others where some are lost, or return how to plan again.

    Raises:
        BudgetExceededError: A cap is exceeded, or was reached.
        ProvisioningError: Machines are not available, and no other device types are left.
        RunStoppedError: The run was asked to stop.
        TrainingError: A worker failed in a way that would come again, or too many launches were lost.
    """
    keep_explanation(run.workspace, plan.report)
    note_metrics(run.workspace, run.tracked, plan.report.promises())
    write = partial(
        write_job,
        run.directory,
        run_id=run.run_id,
        model=run.asked.sized_model,
        dataset=run.dataset,
        config=plan.report.config,
        start=run.start,
    )
    fleet_run = FleetRun(
        workspace=run.workspace,
        run_id=run.run_id,
        directory=run.directory,
        provider_name=run.asked.provider,
        region=plan.report.provisioning.region,
        model=run.asked.sized_model,
        caps=run.asked.caps,
        problem=plan.report.problem,
        num_steps=run.num_steps,
        deadline=plan.deadline,
        max_restarts_per_hour=run.asked.max_restarts_per_hour,
        write_job=lambda bought: write(bought, is_under_way=True),
    )
    bought = plan.report.provisioning
    if get_provider(run.asked.provider).charges_services and run.asked.caps == Caps():
        log_step("caps", "no cap set; set max_usd_per_run or max_usd_per_month")
    if run.is_resumed:
        log_step("resume", resume_summary(run.directory))
    write(bought)
    with ExitStack() as machines:
        try:
            cluster = machines.enter_context(launched(fleet_run, bought, spot_until=plan.spot_until))
        except InsufficientCapacityError as problem:
            return replan_without(fleet_run, bought, problem)
        fixed_usd = bought.bucket_usd + plan.report.problem.extra_costs.crossing_usd
        watch = machines.enter_context(within_budget(fleet_run, cluster, bucket_usd=fixed_usd))
        if not run.is_dry_run:
            charge_measurements(run.workspace, plan.profiled, run_id=run.run_id)
        outcome = NightFleet(fleet_run, Fleet(cluster, bought), machines).train(watch)
        of_nodes = outcome.training.storage if isinstance(outcome, Complete | Stopped) else StorageUsage()
        crosses = plan.report.problem.extra_costs.crossing_usd > 0
        keep_storage_usage(run.workspace, run.run_id, run.directory, cluster, of_nodes, crosses=crosses)
    match outcome:
        case Complete(training):
            log_step("trained", training_summary(training))
            return training
        case Stopped():
            raise stopped_error(outcome, run_id=run.run_id)
        case Failed(error):
            raise error
        case Replan():
            return outcome


def judge_and_record(run: OpenedRun, plan: NightPlan, training: TrainingRun) -> None:
    """Record a trained night, let its model become champion where it passes the gates, and show all of it."""
    # First, so that whatever fails below does not lose the model.
    version, id_turnover = register_model(
        run.workspace,
        run.directory,
        plan.report,
        run.clicks,
        data=run.asked.source.name,
        day=run.asked.day,
    )
    if id_turnover:
        log_step("ids", turnover_summary(id_turnover))
    # Not before the launch: what is compared, drawn and recorded takes seconds that the training need not wait for.
    planned = compared(run, plan.report)
    report = RunReport.of(
        planned,
        learning=plan.learning,
        training=training,
        baselines=measure_baselines(run.clicks) if run.asked.baseline else {},
        best_reachable=run.clicks.best_reachable,
        bills=bills_of_run(run.workspace, run.asked.provider, run.run_id),
        restarts=restarts_of(run.workspace, run.run_id, run.directory),
        id_turnover=id_turnover,
    )
    record_plan(run.workspace, planned, report.bills)
    record_run(run.workspace, report)
    decision = _judged(run, report, version)
    log_rented_price(run)
    text = publish_report(run.workspace, report, decision=decision)
    close_run(run.workspace, run.tracked, status="FINISHED", reason=COMPLETED)
    drop_what_resuming_needs(run.directory)
    run.workspace.forget_run_key(run.run_id)
    log_block(text)


def _judged(run: OpenedRun, report: RunReport, version: str) -> PromotionDecision | str:
    """Decide what the registered model becomes; return that, or why it is not judged."""
    challenger = Challenger(
        version=version,
        gates=run.asked.gates,
        usd_per_million_samples=report.billed_usd_per_million_samples,
        planned_usd_per_million_samples=report.chosen.plan.usd_per_million_samples,
        baseline=report.baseline,
        judgement=report.training.judgement,
        judged_beside=None if run.start.model is None else run.start.model.version,
    )
    decision = promote_if_better(run.workspace, challenger, run.dataset)
    if isinstance(decision, str):
        log_step("champion", f"version {version} is not judged: {decision}")
        return decision
    log_step("champion", decision.why)
    publish_decision(run.workspace, run.tracked, decision)
    return decision
