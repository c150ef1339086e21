"""Plans a night: what its layers cost where, which machines that asks for, and why these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zoneinfo import ZoneInfo

from flows.opened_run import OpenedRun
from flows.service.schedule import nightly_timezone
from heterps_core.models.worker_memory import host_bytes_of_worker
from heterps_core.planning.provisioning.offer_choice import offers_that_hold_workers
from heterps_core.training.job import TrainingConfig
from infra.prices.interruptions import read_counted
from infra.prices.price_catalogue import PriceCatalogue
from tasks.learning import Learning, learn_from_runs
from tasks.planning.deadline import Deadline, deadline_for, explained_by, floor_text, floor_with
from tasks.planning.markets import device_types_to_buy
from tasks.planning.planned_job import PlannedJob, planned_job
from tasks.prices import price_files, price_folder, refresh_before_renting
from tasks.profiling import ProfiledModel, profile_layers
from tasks.provisioning import check_lifetime, find_offers, provision
from tasks.publishing import publish_plan
from tasks.recording import record_plan
from tasks.records.runs import utc_now
from tasks.reports.blocks.kept_explanation import keep_explanation
from tasks.reports.reporting import plan_summary, plan_text, taken_text
from tasks.reports.run_report import PlanReport
from tasks.running.budget import spent_this_month_usd
from tasks.running.run_lifecycle import close_run
from tasks.running.story import tell, tell_block
from tasks.scheduling import (
    explain_choice,
    make_problem,
    search_chosen,
    simulate_choice,
    with_compared,
)
from tasks.training import training_config


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningTerms:
    """What a plan may be made of, what it must reach, and how it is searched for; fields as in train-ctr."""

    scheduler: str
    budget_evaluations: int
    device_types: Sequence[str]
    markets: Sequence[str]
    catalogue: str | None
    region: str
    throughput_floor_samples_per_s: float
    ready_by: str | None
    planned_samples: int | None
    planned_rows_per_slot: int | None
    leave_out_costs: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NightPlan:
    """The plan of a run, and what it was made from."""

    report: PlanReport
    profiled: ProfiledModel
    learning: Learning
    config: TrainingConfig
    budget_evaluations: int

    def compared(self) -> PlanReport:
        """Return the report with the plans of the other search methods, which takes seconds."""
        searches = with_compared(
            self.report.searches,
            self.report.problem,
            budget_evaluations=self.budget_evaluations,
            seed=self.config.seed,
        )
        return replace(self.report, searches=searches)


def plan_night(run: OpenedRun, terms: PlanningTerms) -> NightPlan:
    """Find the plan of a run and the machines that it buys; nothing is launched.

    Raises:
        InfeasiblePlanError: No plan meets the floor, the deadline, or fits.
        BudgetExceededError: The plan costs more than the caps allow.
        UnknownNameError, ConfigurationError, ProvisioningError: See the steps.
    """
    job = planned_job(
        run.dataset,
        provider=run.provider,
        batch_size=run.asked.batch_size,
        planned_samples=terms.planned_samples,
        planned_rows_per_slot=terms.planned_rows_per_slot,
    )
    deadline = _deadline(run, terms, job)
    device_types = device_types_to_buy(run.workspace, terms.device_types, terms.markets, run_id=run.run_id)
    profiled = profile_layers(
        run.workspace,
        run.clicks,
        job,
        model=run.asked.model,
        batch_size=run.batch_size,
        device_types=device_types,
    )
    tell("profile", profiled.summary)

    if not run.is_rehearsal:
        refresh_before_renting(run.workspace, regions=[terms.region])
    prices = PriceCatalogue(price_files(run.workspace, terms.catalogue))
    offers = find_offers(
        device_types,
        catalogue=prices,
        region=terms.region,
        counted_interruptions=read_counted(price_folder(run.workspace)),
    )
    offers = offers_that_hold_workers(
        device_types, offers, host_bytes_of_worker=host_bytes_of_worker(job.num_samples)
    )
    with explained_by(deadline):
        problem = make_problem(
            profiled,
            offers,
            job,
            device_types=device_types,
            num_epochs=run.asked.epochs,
            throughput_floor_samples_per_s=floor_with(deadline, terms.throughput_floor_samples_per_s),
            leave_out_costs=terms.leave_out_costs,
            profiling_usd=profiled.profiling_usd(run.run_id),
        )
    learning = learn_from_runs(run.workspace, run_id=run.run_id)
    problem = learning.corrected(problem)
    tell("learnt", learning.summary(problem))
    with explained_by(deadline):
        searches = search_chosen(
            problem,
            scheduler=terms.scheduler,
            budget_evaluations=terms.budget_evaluations,
            seed=run.asked.seed,
        )
    chosen = searches.chosen
    floor = floor_text(deadline, terms.throughput_floor_samples_per_s)
    tell("plan", plan_summary(chosen.plan) + floor + taken_text(searches, terms.scheduler))
    if not run.is_resumed:
        check_lifetime(chosen.evaluation, provider=run.provider)
    explanation = explain_choice(problem, chosen)
    simulation = simulate_choice(problem, chosen)

    provisioning = provision(
        chosen.plan,
        offers,
        provider=run.provider,
        caps=run.caps,
        spent_this_month_usd=spent_this_month_usd(run.workspace, run.provider),
        price_files=[file.path for file in prices.files],
        state_bytes=sum(layer.state_bytes for layer in profiled.planned_graph.layers),
    )
    tell("machines", provisioning.summary)

    config = training_config(
        run.dataset,
        batch_size=run.batch_size,
        epochs=run.asked.epochs,
        seed=run.asked.seed,
        num_stages=len(provisioning.launch_stages),
    )
    report = PlanReport(
        run_id=run.run_id,
        model=run.asked.model,
        data=run.clicks.description,
        num_train_rows=run.dataset.num_train_rows,
        num_eval_rows=run.dataset.num_eval_rows,
        problem=problem,
        searches=searches,
        scheduler=terms.scheduler,
        explanation=explanation,
        simulation=simulation,
        provisioning=provisioning,
        tracked=run.tracked,
        is_estimated=bool(profiled.estimated_device_types),
        day=run.asked.day,
    )
    keep_explanation(run.workspace, report)
    return NightPlan(
        report=report,
        profiled=profiled,
        learning=learning,
        config=config,
        budget_evaluations=terms.budget_evaluations,
    )


def end_with_plan(run: OpenedRun, plan: NightPlan) -> None:
    """Record a plan, show it, and end the run there: what would be bought, for how much and why."""
    report = plan.compared()
    pictures = record_plan(run.workspace, report, num_microbatches=plan.config.num_microbatches)
    publish_plan(run.workspace, report, pictures)
    close_run(run.workspace, run.tracked, status="FINISHED", reason="plan only")
    tell_block(plan_text(report, run.workspace))


def _deadline(run: OpenedRun, terms: PlanningTerms, job: PlannedJob) -> Deadline | None:
    if terms.ready_by is None:
        return None
    return deadline_for(
        terms.ready_by,
        now=utc_now(),
        zone=ZoneInfo(nightly_timezone()),
        num_samples=job.num_samples,
        num_epochs=run.asked.epochs,
    )
