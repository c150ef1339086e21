"""Plans a night: its layers are profiled, the cheapest plan is searched, its machines are chosen within the caps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from zoneinfo import ZoneInfo

from flows.night.run import OpenedRun
from flows.service.schedule import nightly_timezone
from heterps_core.data.distinct_values import tables_table
from heterps_core.data.reading.days import parse_day
from heterps_core.device_types import DEVICE_TYPES, in_markets
from heterps_core.errors import HeterpsError
from heterps_core.hardware import InstanceOffer, Market, hardware_name
from heterps_core.models.model_graph import host_bytes_of_worker
from heterps_core.planning.calibration import Calibration, Correction
from heterps_core.planning.explain.reasons import OtherPlan
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.offer_choice import offers_that_hold_workers
from heterps_core.planning.search.optimum import MAX_SECONDS
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.training.job import TrainingConfig, default_dense_learning_rate
from infra.inventory import HERE
from infra.prices.region_rates import rates_between
from infra.prices.service_charges import Rates
from infra.providers import get_provider, provider_of
from tasks import scheduling
from tasks.planning.deadline import Deadline, PlanningTime, deadline_for, explained_by, floor_text, floor_with
from tasks.planning.extra_costs import Crossing, job_extra_costs, pause_share
from tasks.planning.precision import cheapest_precision, in_float32_without_units, precisions_of
from tasks.planning.regions import Found, Regions, cheapest_region
from tasks.planning.table_disks import dry_run_table_memory_bytes, replica_disks, table_memory_bytes
from tasks.planning.wire_format import FULL, search_with_wire_dtype
from tasks.prices import RENTED_AS, device_types_of, offers_now
from tasks.profiling import PlannedJob, ProfiledModel, learn_from_runs, planned_job, profile_layers
from tasks.provisioning import (
    Provisioning,
    check_lifetime,
    not_rentable,
    provision,
    sold_types,
)
from tasks.publishing import publish_report
from tasks.recording import record_plan
from tasks.records.run_files import keep_explanation
from tasks.records.run_ids import utc_now
from tasks.records.run_record import close_run
from tasks.reports.run_report import PlanReport, plan_summary, taken_text
from tasks.reports.tables import cuts_table
from tasks.running.budget import spent_this_month_usd
from tasks.running.progress import log_block, log_step
from tasks.training import training_config


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

    def search_in(region: str, times: ProfiledModel) -> _PlanSearch:
        rentable, others = types[region]
        # Where all were tried, they are tried again.
        sold = [name for name in rentable if name not in without] or rentable
        held = offers_that_hold_workers(sold, offers[region], host_bytes_of_worker=host_bytes)
        starts_from_bytes = 0.0 if run.start.model is None else state_bytes
        crossing = regions.crossing(run.workspace, region, (read_bytes, starts_from_bytes, state_bytes))
        rates = rates_between(run.workspace.price_folder, region, regions.store)
        due = deadline and deadline.with_crossing(crossing)
        return _PlanSearch(run, job, due, sold, others, times, held, learning, planning_time, crossing, rates)

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
        rates=search.rates,
    )
    log_step("machines", provisioning.summary)
    config = search.config(problem, chosen, provisioning, wire_dtype=wire_dtype)
    spot_until = None
    if search.deadline is not None and chosen.evaluation.interruptions_per_hour > 0:
        spot_until = search.deadline.spot_until(chosen.evaluation.throughput_samples_per_s)
    region = "; ".join(filter(None, (why, search.crossing.text)))
    report = search.report(problem, searches, provisioning, config, region)
    return NightPlan(report, search.profiled, learning, search.deadline, spot_until)


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
        batch_size=asked.batch_size,
        planned_samples=asked.planned_samples,
        planned_rows_per_slot=asked.planned_rows_per_slot,
    )
    # The model that it begins with is judged on the same rows, after the trained one.
    return job if run.start.model is None else replace(job, evaluated_share=2 * job.evaluated_share)


def _deadline_of(run: OpenedRun, job: PlannedJob, *, model_bytes: float) -> Deadline | None:
    """Return when the rest of a run must be ready; None where no time was asked for."""
    from heterps_core.training.checkpoint import step_to_resume_from

    asked, share_left = run.asked, 1.0
    if asked.ready_by is None:
        return None
    if run.is_resumed:
        num_steps = run.dataset.num_batches(run.batch_size) * asked.epochs
        share_left = 1 - min(step_to_resume_from(run.directory), num_steps - 1) / num_steps
    return deadline_for(
        asked.ready_by,
        now=utc_now(),
        zone=ZoneInfo(nightly_timezone()),
        num_samples=job.num_samples * share_left,
        num_epochs=asked.epochs,
        pause_share=pause_share(job.evaluated_share / asked.epochs),
        model_bytes=model_bytes,
    )


@dataclass(frozen=True, slots=True)
class _PlanSearch:
    """The search for the plan of a run in a region, by times, offers and past runs."""

    run: OpenedRun
    job: PlannedJob
    deadline: Deadline | None
    device_types: Sequence[str]
    others: Sequence[str]
    """Device types without a machine image; their plans are shown where they cost less."""

    profiled: ProfiledModel
    offers: Sequence[InstanceOffer]
    learning: Calibration
    planning_time: PlanningTime
    crossing: Crossing
    rates: Rates

    def found(self) -> Found:
        """Search the plan, and its number format where none is asked for."""
        with explained_by(self.deadline):
            return search_with_wire_dtype(self.run.asked.wire_dtype, self.with_wire_dtype)

    def first_problems(self) -> list[SchedulingProblem]:
        """Return the problem of each zone that is searched first."""
        return self._problems(self.device_types, self.run.asked.wire_dtype or FULL)

    def with_wire_dtype(self, wire_dtype: str) -> tuple[SchedulingProblem, scheduling.Searches]:
        """Search a plan in time whose workers send in a number format."""
        asked = self.run.asked
        steady_types = [name for name in self.device_types if hardware_name(name) == name]
        has_both = self.deadline is not None and {*asked.markets} == {*Market} and bool(steady_types)
        return scheduling.search_in_time(
            self._problem(self.device_types, wire_dtype),
            self._problem(steady_types, wire_dtype) if has_both else None,
            self.deadline,
            search=self._search,
            max_usd_per_hour=asked.max_usd_per_hour,
        )

    def _problem(self, device_types: Sequence[str], wire_dtype: str) -> SchedulingProblem:
        problems = self._problems(device_types, wire_dtype)
        return self.learning.corrected(scheduling.problem_of_cheapest_zone(problems, self.planning_time))

    def _problems(self, device_types: Sequence[str], wire_dtype: str) -> list[SchedulingProblem]:
        asked = self.run.asked
        return scheduling.make_problems(
            self.profiled,
            self.offers,
            self.job,
            device_types=device_types,
            num_epochs=asked.epochs,
            throughput_floor_samples_per_s=floor_with(self.deadline, asked.throughput_floor_samples_per_s),
            extra_costs=job_extra_costs(
                self.profiled.planned_graph,
                leave_out=asked.leave_out_costs,
                profiling_usd=self.profiled.profiling_usd(self.run.run_id),
                is_rented=not get_provider(asked.provider).has_inventory,
                rates=self.rates,
                crossing=self.crossing,
            ),
            rates=self.rates,
            update_mode=asked.update_mode,
            wire_dtype=wire_dtype,
        )

    def _search(self, problem: SchedulingProblem) -> scheduling.Searches:
        asked = self.run.asked
        return scheduling.search_chosen(
            problem,
            scheduler=asked.scheduler,
            budget_evaluations=asked.budget_evaluations,
            seed=asked.seed,
            # With a deadline, faster plans and those without spot machines are proven as well.
            max_seconds=self.planning_time.share(1 if self.deadline is None else 2),
        )

    def _not_rentable(
        self, problem: SchedulingProblem, chosen: SearchResult, wire_dtype: str
    ) -> OtherPlan | None:
        """Return a cheaper plan of the chosen one's device types and those without an image."""
        if not self.others:
            return None
        used = dict.fromkeys(stage.device_type for stage in chosen.plan.stages)
        wider = self._problem([*used, *self.others], wire_dtype)
        floor = problem.throughput_floor_samples_per_s
        return scheduling.cheaper_plan(replace(wider, throughput_floor_samples_per_s=floor), chosen)

    def log_found(self, problem: SchedulingProblem, searches: scheduling.Searches) -> None:
        """Log the plan that was found, and check that its machines live long enough."""
        asked = self.run.asked
        log_step("calibrated", self.learning.summary(problem))
        floor = floor_text(
            self.deadline,
            asked.throughput_floor_samples_per_s,
            planned_with=problem.throughput_floor_samples_per_s,
        )
        taken = taken_text(searches, asked.scheduler)
        log_step("plan", plan_summary(searches.chosen.plan) + floor + taken)
        if not self.run.is_resumed:
            check_lifetime(searches.chosen.evaluation, provider=asked.provider)

    def config(
        self, problem: SchedulingProblem, chosen: SearchResult, bought: Provisioning, *, wire_dtype: str
    ) -> TrainingConfig:
        """Return the numbers of a run: those that were asked for, and those of its plan."""
        run, asked = self.run, self.run.asked
        settings = asked.values_for(TrainingConfig) | {
            "wire_dtype": wire_dtype,
            "precision": self.profiled.planned_request.precision,
            "batch_size": run.batch_size,
            "embedding_memory_bytes": asked.embedding_memory_bytes
            or self._memory_bytes(problem, chosen, bought),
            "embedding_folders": tuple(asked.embedding_folders),
            "dense_learning_rate": asked.dense_learning_rate or default_dense_learning_rate(asked.model),
        }
        return training_config(
            run.dataset,
            epochs=asked.epochs,
            num_stages=len(bought.launch_stages),
            samples_per_s=0.0 if run.is_dry_run else chosen.evaluation.throughput_samples_per_s,
            interruptions_per_hour=chosen.evaluation.interruptions_per_hour,
            day_number=0 if asked.day is None else parse_day(asked.day).toordinal(),
            **settings,
        )

    def _memory_bytes(
        self, problem: SchedulingProblem, chosen: SearchResult, bought: Provisioning
    ) -> int | None:
        """Return the memory of a worker for rows of tables; None where the plan holds all in memory."""
        run, memory_bytes = self.run, table_memory_bytes(problem, chosen.evaluation)
        if not run.is_dry_run or memory_bytes is None:
            return memory_bytes
        return dry_run_table_memory_bytes(
            memory_bytes,
            (self.profiled.planned_graph, chosen.plan.stages),
            dataset=run.dataset,
            model=run.asked.sized_model,
            stages=bought.launch_stages,
            embedding_optimizer=run.asked.embedding_optimizer,
            batch_size=run.batch_size,
            seed=run.asked.seed,
        )

    def report(
        self,
        problem: SchedulingProblem,
        searches: scheduling.Searches,
        provisioning: Provisioning,
        config: TrainingConfig,
        region: str,
    ) -> PlanReport:
        """Return the report of the plan that was found."""
        run, profiled, chosen = self.run, self.profiled, searches.chosen
        dataset = run.dataset
        prediction, correction = None, Correction()
        hardware = " | ".join(dict.fromkeys(stage.device_type for stage in provisioning.launch_stages))
        if run.is_dry_run:
            prediction = scheduling.predict_dry_run_here(
                profiled,
                provisioning.launch_stages,
                config,
                decoded_share=dataset.decoded_share(dataset.num_train_rows, batch_size=config.batch_size),
            )
            hardware = profiled.local_profile.hardware_fingerprint
            correction = self.learning.correction(hardware, model=problem.model)
        return PlanReport(
            run_id=run.run_id,
            model=run.asked.sized_model,
            data=run.clicks.description,
            num_train_rows=dataset.num_train_rows,
            num_eval_rows=dataset.num_eval_rows,
            problem=problem,
            searches=searches,
            scheduler=run.asked.scheduler,
            explanation=scheduling.explain_choice(
                problem, chosen, self._not_rentable(problem, chosen, config.wire_dtype), region
            ),
            simulation=scheduling.simulate_choice(problem, chosen),
            provisioning=provisioning,
            tracked=run.tracked,
            config=config,
            prediction=prediction,
            correction=correction,
            hardware=hardware,
            uncounted=profiled.graph.uncounted_text,
            busy=profiled.local_profile.busy_text,
            tables=tables_table(
                dataset.manifest.columns,
                dataset.features.slot_rows,
                has_dynamic_ids=dataset.features.dynamic_ids is not None,
            ),
            cuts=cuts_table(run.asked.sized_model, dataset.features, chosen.plan.stages),
            day=run.asked.day,
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
