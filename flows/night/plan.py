"""Opens and plans a night: what it begins with, its rows, what layers cost where, and which machines that buys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from zoneinfo import ZoneInfo

from prefect.runtime import flow_run as current_flow_run

from flows.parameter_checks import resumed_parameters
from flows.parameters import TrainedParameters, TrainParameters
from flows.service.prefect_connection import name_flow_run
from flows.service.schedule import nightly_timezone
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.distinct_values import tables_table
from heterps_core.data.reading.days import Night, parse_day
from heterps_core.device_types import in_markets
from heterps_core.hardware import Market
from heterps_core.models.model_graph import host_bytes_of_worker
from heterps_core.planning.calibration import Calibration, Correction
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.provisioning.offer_choice import offers_that_hold_workers
from heterps_core.planning.search.optimum import MAX_SECONDS
from heterps_core.training.job import (
    CHAMPION,
    TrainingConfig,
    default_batch_size,
    default_dense_learning_rate,
)
from heterps_core.training.storage.run_directory import RunDirectory
from infra.prices.price_catalogue import PriceCatalogue
from infra.providers import get_provider
from infra.workspace import Workspace
from tasks.clusters import directory_of_run
from tasks.data import PreparedClicks, find_night_of, prepare_data, schema_of, source_name
from tasks.learning import learn_from_runs
from tasks.planning.deadline import Deadline, deadline_for, explained_by, floor_text, floor_with
from tasks.planning.extra_costs import pause_share
from tasks.planning.planning_time import PlanningTime
from tasks.planning.table_disks import (
    dry_run_table_memory_bytes,
    replica_disks,
    table_memory_bytes,
)
from tasks.planning.wire_format import search_with_wire_dtype
from tasks.prices import price_files, refresh_before_renting
from tasks.profiling import ProfiledModel, planned_job, profile_layers
from tasks.provisioning import check_lifetime, find_offers, provision
from tasks.publishing import publish_plan
from tasks.recording import record_plan
from tasks.records.champion import champion_before
from tasks.records.mlflow_names import DATA_TAG, DAY_TAG, MODEL_TAG, START_TAG
from tasks.records.mlflow_store import client_of
from tasks.records.runs import check_not_finished, keep_explanation, save_parameters, utc_now
from tasks.records.tracking import TrackedRun
from tasks.reports.cuts_table import cuts_table
from tasks.reports.run_report import PlanReport, plan_summary, taken_text
from tasks.running.budget import spent_this_month_usd
from tasks.running.progress import log_block, log_step
from tasks.running.run_lifecycle import close_run, open_run
from tasks.running.start import Start, choose_start, fits_night, load_start
from tasks.scheduling import (
    Searches,
    explain_choice,
    make_problem,
    predict_dry_run_here,
    search_chosen,
    search_in_time,
    simulate_choice,
    with_compared,
)
from tasks.training import training_config


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRun:
    """A run of train-ctr, from when its record is open."""

    workspace: Workspace
    run_id: str
    is_resumed: bool
    asked: TrainParameters
    """Of a run that is resumed, what decides its model is what it began with."""

    tracked: TrackedRun
    start: Start
    clicks: PreparedClicks
    dataset: PreparedDataset

    @property
    def is_dry_run(self) -> bool:
        """Nothing is charged for it."""
        return not get_provider(self.asked.provider).charges_money

    @property
    def batch_size(self) -> int:
        """Samples of a training step."""
        return self.asked.batch_size or default_batch_size(self.dataset.num_train_rows)

    @property
    def directory(self) -> RunDirectory:
        """Where the flow's host and the nodes meet."""
        return directory_of_run(self.workspace, self.asked.provider, self.run_id)


def begin_run(
    workspace: Workspace,
    asked: TrainParameters,
    night: Night | None,
    *,
    run_id: str,
    is_resumed: bool,
) -> OpenedRun:
    """Open the record of a run, choose what it begins with, and prepare its rows.

    Args:
        asked: Its parameters; a run that is resumed keeps those that decide its model.
        night: Of `asked`; None where the data has no days, or the run is resumed.
    """
    if is_resumed:
        check_not_finished(workspace, run_id)
        asked = asked.model_copy(update=resumed_parameters(workspace, run_id))
        night = find_night_of(asked.data, asked.day) if asked.day else night
    else:
        save_parameters(workspace, run_id, asked.values_for(TrainedParameters))
    log_step("run", run_id)
    name_flow_run(asked.name_of(run_id))
    tracked = open_run(
        workspace,
        run_id=run_id,
        run_name=asked.name_of(run_id),
        tags={
            "heterps.provider": asked.provider,
            "prefect.flow_run_id": current_flow_run.id or "",
            MODEL_TAG: asked.sized_model,
            DATA_TAG: source_name(asked.data, asked.schema_file, asked.prepare_sql),
            **({DAY_TAG: asked.day} if asked.day else {}),
        },
    )
    start = load_start(directory_of_run(workspace, asked.provider, run_id)) if is_resumed else None
    if start is None:
        champion, schema = None, schema_of(asked.schema_file)
        if night is not None and asked.start_from == CHAMPION:
            fits = partial(fits_night, model=asked.sized_model, schema=schema)
            champion = champion_before(workspace, night.day, fits=fits)
        start = choose_start(
            champion,
            start_from=asked.start_from,
            day=None if night is None else night.day,
            model=asked.sized_model,
            schema=schema,
            optimizers=asked.model_dump(include={"dense_optimizer", "embedding_optimizer"}),
        )
    if start.reason:
        log_step("start", start.reason)
    if start.model is not None:
        client_of(workspace).set_tag(tracked.mlflow_run_id, START_TAG, start.model.version)
    clicks = prepare_data(
        workspace,
        data=asked.data,
        schema_file=asked.schema_file,
        prepare_sql=asked.prepare_sql,
        night=night,
        slot_rows=start.slot_rows,
        numeric_transform=start.numeric_transform,
        text_rule=start.text_rule,
        late_rows=asked.late_rows,
        # What was let pass once is not asked again.
        data_checks=None if is_resumed else asked.data_checks,
    )
    log_step("data", clicks.summary)
    return OpenedRun(
        workspace=workspace,
        run_id=run_id,
        is_resumed=is_resumed,
        asked=asked,
        tracked=tracked,
        start=start,
        clicks=clicks,
        dataset=clicks.open(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NightPlan:
    """The plan of a run, and what it was made from."""

    report: PlanReport
    profiled: ProfiledModel
    learning: Calibration
    config: TrainingConfig
    deadline: Deadline | None
    spot_until: datetime | None
    """Until when its spot machines may be waited for; None where there is no deadline, or no machine on spot."""

    without: frozenset[str]
    """Device types that could not be had."""


def compared(run: OpenedRun, report: PlanReport) -> PlanReport:
    """Return a report with the plans of the other search methods, which takes seconds."""
    searches = with_compared(
        report.searches,
        report.problem,
        budget_evaluations=run.asked.budget_evaluations,
        seed=run.asked.seed,
    )
    return replace(report, searches=searches)


def plan_night(run: OpenedRun, *, without: Collection[str] = ()) -> NightPlan:
    """Find the plan of a run and the machines that it buys; nothing is launched.

    Args:
        without: Device types that could not be had: they are left out, where others are left.
    """
    asked = run.asked
    job = planned_job(
        run.dataset,
        is_dry_run=run.is_dry_run,
        batch_size=asked.batch_size,
        planned_samples=asked.planned_samples,
        planned_rows_per_slot=asked.planned_rows_per_slot,
    )
    if run.start.model is not None:
        # Which is judged on the same rows, behind the trained one.
        job = replace(job, evaluated_share=2 * job.evaluated_share)
    deadline = None
    if asked.ready_by is not None:
        deadline = deadline_for(
            asked.ready_by,
            now=utc_now(),
            zone=ZoneInfo(nightly_timezone()),
            num_samples=job.num_samples * _share_left(run),
            num_epochs=asked.epochs,
            pause_share=pause_share(job.evaluated_share / asked.epochs),
        )
    markets = [Market(market) for market in asked.markets]
    wanted = in_markets(asked.device_types, markets)
    # Where all were tried, they are tried again.
    device_types = [name for name in wanted if name not in without] or wanted
    profiled = profile_layers(
        run.workspace,
        run.clicks,
        job,
        model=asked.sized_model,
        batch_size=run.batch_size,
        device_types=device_types,
        trained_with=asked.trained_with,
    )
    log_step("profile", profiled.summary)

    refresh_before_renting(run.workspace, asked.provider, regions=[asked.region])
    prices = PriceCatalogue(price_files(run.workspace, listed=get_provider(asked.provider).price_file))
    offers = offers_that_hold_workers(
        device_types,
        find_offers(device_types, catalogue=prices, region=asked.region),
        host_bytes_of_worker=host_bytes_of_worker(job.num_samples),
    )
    learning = learn_from_runs(run.workspace, run_id=run.run_id)

    planning_time = PlanningTime(asked.max_planning_seconds or MAX_SECONDS)

    def problem_with(names: Sequence[str], wire_dtype: str) -> SchedulingProblem:
        return learning.corrected(
            make_problem(
                profiled,
                offers,
                job,
                device_types=names,
                num_epochs=asked.epochs,
                throughput_floor_samples_per_s=floor_with(deadline, asked.throughput_floor_samples_per_s),
                leave_out_costs=asked.leave_out_costs,
                profiling_usd=profiled.profiling_usd(run.run_id),
                update_mode=asked.update_mode,
                wire_dtype=wire_dtype,
                planning_time=planning_time,
            )
        )

    def search(problem: SchedulingProblem) -> Searches:
        return search_chosen(
            problem,
            scheduler=asked.scheduler,
            budget_evaluations=asked.budget_evaluations,
            seed=asked.seed,
            # With a deadline, faster plans and those without spot machines are proven as well.
            max_seconds=planning_time.share(1 if deadline is None else 2),
        )

    def search_with(wire_dtype: str) -> tuple[SchedulingProblem, Searches]:
        steady_types = [
            name for name in in_markets(asked.device_types, [Market.ON_DEMAND]) if name in device_types
        ]
        has_both = deadline is not None and set(markets) == set(Market) and bool(steady_types)
        return search_in_time(
            problem_with(device_types, wire_dtype),
            problem_with(steady_types, wire_dtype) if has_both else None,
            deadline,
            search=search,
            max_usd_per_hour=asked.max_usd_per_hour,
        )

    with explained_by(deadline):
        wire_dtype, problem, searches = search_with_wire_dtype(asked.wire_dtype, search_with)
    log_step("calibrated", learning.summary(problem))

    chosen = searches.chosen
    floor = floor_text(
        deadline,
        asked.throughput_floor_samples_per_s,
        planned_with=problem.throughput_floor_samples_per_s,
    )
    log_step("plan", plan_summary(chosen.plan) + floor + taken_text(searches, asked.scheduler))
    if not run.is_resumed:
        check_lifetime(chosen.evaluation, provider=asked.provider)
    explanation = explain_choice(problem, chosen)
    simulation = simulate_choice(problem, chosen)

    provisioning = provision(
        chosen.plan,
        offers,
        provider=asked.provider,
        caps=asked.caps,
        spent_this_month_usd=spent_this_month_usd(run.workspace, asked.provider),
        price_files=[file.path for file in prices.files],
        state_bytes=sum(layer.state_bytes for layer in profiled.planned_graph.layers),
        disks=replica_disks(problem, chosen.evaluation),
    )
    log_step("machines", provisioning.summary)

    settings = asked.values_for(TrainingConfig) | {"wire_dtype": wire_dtype, "batch_size": run.batch_size}
    settings["embedding_folders"] = tuple(asked.embedding_folders)
    settings["dense_learning_rate"] = asked.dense_learning_rate or default_dense_learning_rate(asked.model)
    if asked.embedding_memory_bytes is None:
        memory_bytes = table_memory_bytes(problem, chosen.evaluation)
        if run.is_dry_run and memory_bytes is not None:
            memory_bytes = dry_run_table_memory_bytes(
                memory_bytes,
                (profiled.planned_graph, chosen.plan.stages),
                dataset=run.dataset,
                model=asked.sized_model,
                stages=provisioning.launch_stages,
                embedding_optimizer=asked.embedding_optimizer,
                batch_size=run.batch_size,
                seed=asked.seed,
            )
        settings["embedding_memory_bytes"] = memory_bytes
    config = training_config(
        run.dataset,
        epochs=asked.epochs,
        num_stages=len(provisioning.launch_stages),
        samples_per_s=0.0 if run.is_dry_run else chosen.evaluation.throughput_samples_per_s,
        interruptions_per_hour=chosen.evaluation.interruptions_per_hour,
        day_number=0 if asked.day is None else parse_day(asked.day).toordinal(),
        **settings,
    )
    prediction, correction = None, Correction()
    if run.is_dry_run:
        stages = provisioning.launch_stages
        prediction = predict_dry_run_here(profiled, stages, config)
        hardware = profiled.local_profile.hardware_fingerprint
        correction = learning.correction(hardware, model=problem.model)
    report = PlanReport(
        run_id=run.run_id,
        model=asked.sized_model,
        data=run.clicks.description,
        num_train_rows=run.dataset.num_train_rows,
        num_eval_rows=run.dataset.num_eval_rows,
        problem=problem,
        searches=searches,
        scheduler=asked.scheduler,
        explanation=explanation,
        simulation=simulation,
        provisioning=provisioning,
        tracked=run.tracked,
        config=config,
        prediction=prediction,
        correction=correction,
        is_estimated=bool(profiled.estimated_device_types),
        uncounted=profiled.graph.uncounted_text,
        tables=tables_table(
            run.dataset.manifest.columns,
            run.dataset.features.slot_rows,
            has_dynamic_ids=run.dataset.features.dynamic_ids is not None,
        ),
        cuts=cuts_table(asked.sized_model, run.dataset.features, chosen.plan.stages),
        day=asked.day,
    )
    spot_until = None
    if deadline is not None and chosen.evaluation.interruptions_per_hour > 0:
        spot_until = deadline.spot_until(chosen.evaluation.throughput_samples_per_s)
    return NightPlan(
        report=report,
        profiled=profiled,
        learning=learning,
        config=config,
        deadline=deadline,
        spot_until=spot_until,
        without=frozenset(without),
    )


def _share_left(run: OpenedRun) -> float:
    """Return the share of the run's steps that its newest checkpoint leaves to be trained."""
    from heterps_core.training.checkpoint import step_to_resume_from

    if not run.is_resumed:
        return 1.0
    num_steps = run.dataset.num_batches(run.batch_size) * run.asked.epochs
    return 1 - min(step_to_resume_from(run.directory), num_steps - 1) / num_steps


def end_with_plan(run: OpenedRun, plan: NightPlan) -> None:
    """Record a plan, show it, and end the run there: what would be bought, for how much and why."""
    keep_explanation(run.workspace, plan.report)
    report = compared(run, plan.report)
    record_plan(run.workspace, report)
    text = publish_plan(run.workspace, report)
    close_run(run.workspace, run.tracked, status="FINISHED", reason="plan only")
    log_block(text)
