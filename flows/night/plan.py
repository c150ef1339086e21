"""Plans a night: its layers are profiled, the cheapest plan is searched, its machines are chosen within the caps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from zoneinfo import ZoneInfo

from flows.night.plan_search import PlanSearch
from flows.night.run import OpenedRun
from flows.service.schedule import nightly_timezone
from heterps_core.device_types import DEVICE_TYPES, in_markets
from heterps_core.errors import BudgetExceededError, HeterpsError, InfeasiblePlanError
from heterps_core.hardware import InstanceOffer, Market, hardware_name
from heterps_core.models.model_graph import host_bytes_of_worker
from heterps_core.planning.calibration import Calibration
from heterps_core.planning.provisioning.offer_choice import offers_that_hold_workers
from heterps_core.planning.search.optimum import MAX_SECONDS
from heterps_core.units import SECONDS_PER_HOUR
from infra.inventory import HERE
from infra.prices.region_rates import rates_between
from infra.providers import get_provider, provider_of
from infra.providers.base import QuotaExceededError
from tasks import scheduling
from tasks.planning.deadline import Deadline, PlanningTime, deadline_for
from tasks.planning.extra_costs import fast_flow_text, pause_share
from tasks.planning.precision import cheapest_precision, in_float32_without_units, precisions_of
from tasks.planning.regions import Regions, cheapest_region
from tasks.planning.table_disks import replica_disks
from tasks.prices import RENTED_AS, device_types_of, offers_now
from tasks.profiling import PlannedJob, ProfiledModel, learn_from_runs, planned_job, profile_layers
from tasks.provisioning import (
    not_rentable,
    provision,
    sold_types,
)
from tasks.publishing import publish_report
from tasks.recording import record_plan
from tasks.records.run_files import keep_explanation
from tasks.records.run_ids import utc_now
from tasks.records.run_record import close_run
from tasks.reports.run_report import PlanReport
from tasks.running.budget import spent_this_month_usd
from tasks.running.progress import log_block, log_step


@dataclass(frozen=True, slots=True)
class NightPlan:
    """The plan of a run, and its sources."""

    report: PlanReport
    profiled: ProfiledModel
    learning: Calibration
    deadline: Deadline | None
    spot_until: datetime | None
    """Until when its spot machines may be waited for; None where there is no deadline, or no machine on spot."""


def compared(run: OpenedRun, report: PlanReport) -> PlanReport:
    """Return a report with the plans of the other search methods, which takes seconds."""
    searches = scheduling.with_compared(
        report.searches, report.problem, budget_evaluations=run.asked.budget_evaluations, seed=run.asked.seed
    )
    return replace(report, searches=searches)


def plan_night(run: OpenedRun, *, without: Collection[str] = ()) -> NightPlan:
    """Find the plan of a run and the machines that it buys; nothing is launched.

    Args:
        without: Device types that are not available: they are left out, where others are left.
    """
    asked = run.asked
    job = _job_of(run)
    known = device_types_of(run.workspace, asked.provider)
    wanted = in_markets(asked.device_types or known, [Market(market) for market in asked.markets])
    regions = Regions.of(run.workspace, asked.provider, asked.regions, data=asked.data)
    offers, price_files = offers_now(run.workspace, asked.provider, wanted, regions=regions.rented)
    types = {region: _types_in(run, regions, region, wanted, offers[region]) for region in regions.rented}
    all_types = list(dict.fromkeys(name for each in types.values() for name in chain(*each)))
    profiled, *rounded = (
        _profiled(run, job, all_types, precision, is_here=asked.provider == HERE)
        for precision in _precisions_of(run)
    )
    log_step("profile", profiled.summary)
    state_bytes = sum(layer.state_bytes for layer in profiled.planned_graph.layers)
    deadline = _deadline_of(run, job, model_bytes=state_bytes)
    host_bytes = host_bytes_of_worker(job.num_samples)
    learning = learn_from_runs(run.workspace, run_id=run.run_id)
    planning_time = PlanningTime(asked.max_planning_seconds or MAX_SECONDS)
    read_bytes = (
        (asked.epochs + job.evaluated_share) * job.num_samples * run.dataset.manifest.source_row_bytes
    )

    limits = {
        region: provider_of(run.workspace, asked.provider, region=region).unit_limits(
            rentable, offers[region]
        )
        for region, (rentable, _) in types.items()
    }
    for region, limit in limits.items():
        if limit.text:
            log_step("quotas", f"of vCPUs in {region}, left for each device type alone: {limit.text}")

    def search_in(region: str, times: ProfiledModel) -> PlanSearch:
        rentable, others = types[region]
        # Where all were tried, they are tried again.
        most_units = limits[region].most
        allowed = [name for name in rentable if most_units.get(name, 1)]
        sold = [name for name in allowed if name not in without] or allowed
        held = offers_that_hold_workers(sold, offers[region], host_bytes_of_worker=host_bytes)
        starts_from_bytes = 0.0 if run.start.model is None else state_bytes
        crossing = regions.crossing(run.workspace, region, (read_bytes, starts_from_bytes, state_bytes))
        rates = rates_between(run.workspace.price_folder, region, regions.store)
        due = deadline and deadline.with_crossing(crossing)
        return PlanSearch(
            run, job, due, sold, others, times, held, learning, planning_time, crossing, rates, most_units
        )

    found = {}
    for times in (profiled, *(in_float32_without_units(each, profiled) for each in rounded)):
        searches_by_region = {region: search_in(region, times) for region in regions.rented}
        found[times.planned_request.precision] = cheapest_region(searches_by_region, planning_time)
    search, (wire_dtype, problem, searches), why = found[
        cheapest_precision({name: plan[2].chosen.plan.cost_usd for name, (_, plan, _) in found.items()})
    ]
    chosen = searches.chosen
    search.log_found(problem, searches)
    provisioning = provision(
        chosen.plan,
        search.offers,
        provider=asked.provider,
        caps=asked.caps,
        spent_this_month_usd=spent_this_month_usd(run.workspace, asked.provider),
        price_files=price_files,
        state_bytes=state_bytes,
        disks=replica_disks(problem, chosen.evaluation),
        fixed_usd=problem.extra_costs.fixed_usd,
        free_hours=chosen.evaluation.run_seconds / SECONDS_PER_HOUR,
        rates=search.rates,
    )
    try:
        provider_of(run.workspace, asked.provider, region=provisioning.region).check_quotas(
            provisioning.cloud_plan
        )
    except QuotaExceededError as exceeded:
        log_step("quotas", str(exceeded))
        sharing = set(limits[provisioning.region].sharing[exceeded.quotas[0]])
        used = sharing & {group.device_type for group in provisioning.cloud_plan.groups}
        if within := _with_one_type_of(run, sharing, used=used, without=without):
            return within
    log_step("machines", provisioning.summary)
    config = search.config(problem, chosen, provisioning, wire_dtype=wire_dtype)
    spot_until = None
    if search.deadline is not None and chosen.evaluation.interruptions_per_hour > 0:
        spot_until = search.deadline.spot_until(chosen.evaluation.throughput_samples_per_s)
    flows = ""
    if not get_provider(asked.provider).has_inventory:
        flows = fast_flow_text(problem, chosen.plan.stages, chosen.evaluation.throughput_samples_per_s)
    region = "; ".join(filter(None, (why, search.crossing.text, flows)))
    report = search.report(problem, searches, provisioning, config, region)
    return NightPlan(report, search.profiled, learning, search.deadline, spot_until)


def _with_one_type_of(
    run: OpenedRun, sharing: set[str], *, used: set[str], without: Collection[str]
) -> NightPlan | None:
    """Return the cheapest plan with one device type of those that exceed a quota together, and none of the others.

    None where no such plan is found: its launch tries purchases that ask less of the quota. Types that were left out,
    and are used where a region sells no other, are not kept: each plan leaves out more than the one before it.
    """
    plans = []
    for kept in used - {*without} if len(used) > 1 else ():
        with suppress(InfeasiblePlanError, BudgetExceededError):
            plans.append(plan_night(run, without={*without, *sharing} - {kept}))
    return min(plans, key=lambda plan: plan.report.chosen.plan.cost_usd, default=None)


def _types_in(
    run: OpenedRun, regions: Regions, region: str, wanted: list[str], offers: Sequence[InstanceOffer]
) -> tuple[list[str], list[str]]:
    """Return the device types for a plan in a region, and those that are sold there but have no machine image."""
    sold, is_one_of_several = sold_types(wanted, offers), len(regions.rented) > 1
    if run.asked.device_types:
        return (sold if is_one_of_several else wanted), []
    rented_from = provider_of(run.workspace, run.asked.provider, region=region)
    refused = not_rentable(rented_from, is_one_of_several=is_one_of_several)
    rentable = [name for name in sold if hardware_name(name) not in refused]
    return rentable, [name for name in sold if hardware_name(name) in refused]


def _precisions_of(run: OpenedRun) -> tuple[str, ...]:
    return precisions_of(run.asked.precision, run.asked.sized_model)


def _profiled(
    run: OpenedRun, job: PlannedJob, device_types: list[str], precision: str, *, is_here: bool
) -> ProfiledModel:
    return profile_layers(
        run.workspace,
        run.clicks,
        job,
        model=run.asked.sized_model,
        batch_size=run.batch_size,
        device_types=device_types,
        trained_with=run.asked.trained_with | {"precision": precision},
        is_here=is_here,
    )


def log_rented_price(run: OpenedRun) -> None:
    """Log what a run on machines that are not rented would cost on rented ones."""
    if not get_provider(run.asked.provider).has_inventory:
        return
    job, known = _job_of(run), [*DEVICE_TYPES]
    try:
        [region, *_] = Regions.of(run.workspace, RENTED_AS, run.asked.regions, data=run.asked.data).rented
        offers, _ = offers_now(run.workspace, RENTED_AS, known, regions=[region])
        sold = sold_types(known, offers[region])
        profiled = _profiled(run, job, sold, _precisions_of(run)[0], is_here=run.asked.provider == HERE)
        log_step(
            "rented", scheduling.price_on(offers[region], profiled, job, sold, num_epochs=run.asked.epochs)
        )
    except HeterpsError as problem:
        log_step("rented", f"a price is not known: {problem}")


def _job_of(run: OpenedRun) -> PlannedJob:
    """Return the job that a run is planned for."""
    asked = run.asked
    job = planned_job(
        run.dataset,
        is_dry_run=run.is_dry_run,
        batch_size=run.planned_batch_size or asked.batch_size,
        max_samples=asked.max_samples,
        planned_samples=asked.planned_samples,
        planned_rows_per_slot=asked.planned_rows_per_slot,
    )
    # The model that it begins with is judged on the same rows, after the trained one.
    if run.start.model is None:
        return replace(job, starts_from_model=run.is_resumed)
    return replace(job, evaluated_share=2 * job.evaluated_share, starts_from_model=True)


def _deadline_of(run: OpenedRun, job: PlannedJob, *, model_bytes: float) -> Deadline | None:
    """Return when the rest of a run must be ready; None where no time was asked for."""
    from heterps_core.training.checkpoint import step_to_resume_from

    asked, share_left = run.asked, 1.0
    if asked.ready_by is None:
        return None
    if run.is_resumed:
        share_left = 1 - min(step_to_resume_from(run.directory), run.num_steps - 1) / run.num_steps
    return deadline_for(
        asked.ready_by,
        now=utc_now(),
        zone=ZoneInfo(nightly_timezone()),
        num_samples=job.num_samples * share_left,
        num_epochs=asked.epochs,
        pause_share=pause_share(job.evaluated_share / asked.epochs),
        model_bytes=model_bytes,
    )


def end_with_plan(run: OpenedRun, plan: NightPlan) -> None:
    """Record a plan, show it, and end the run there: what would be bought, for how much and why."""
    keep_explanation(run.workspace, plan.report)
    report = compared(run, plan.report)
    record_plan(run.workspace, report)
    text = publish_report(run.workspace, report)
    log_rented_price(run)
    close_run(run.workspace, run.tracked, status="FINISHED", reason="plan only")
    log_block(text)
