"""The whole line: data, profile, plan, machines, training, teardown, record and bill.

`make train-ctr` runs it from the command line, `prefect deployment run train-ctr` from a served
deployment; both are this one flow.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.runtime import flow_run as current_flow_run

from flows.parameters import (
    BatchSize,
    CostTerm,
    Count,
    Day,
    MarketName,
    ProviderName,
    RowCount,
    SchedulerName,
    Seed,
    StartName,
    Throughput,
    UpdateMode,
    Usd,
)
from flows.schedule import TRAIN_CTR, nightly_timezone
from heterps_core.device_types import get_device_type
from heterps_core.problem.extra_costs import NO_EXTRA_COSTS
from heterps_core.scheduling.schedulers import get_scheduler
from heterps_core.training.job import check_update_mode_name, default_batch_size
from heterps_core.training.run_directory import RunDirectory
from infra.caps import Caps
from infra.catalogue.interruptions import read_counted
from infra.catalogue.price_catalogue import PriceCatalogue
from infra.workspace import Workspace
from tasks.baseline import measure_baseline
from tasks.budget import check_finished_within_budget, spent_this_month_usd, within_budget
from tasks.clusters import bills_of_run, check_provider, keep_storage_usage, rented_cluster, run_location
from tasks.data import check_source, find_night_of, prepare_data, schema_of, source_name
from tasks.deadline import deadline_for, explained_by, floor_text, floor_with, parse_time_of_day
from tasks.interruptions import interruption_summary, note_interruptions
from tasks.kept_explanation import keep_explanation
from tasks.learning import learn_from_runs
from tasks.live_fleet import check_no_other_fleet, only_fleet
from tasks.markets import check_markets, device_types_to_buy
from tasks.parameter_ranges import check_numbers
from tasks.planned_job import NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT, planned_job
from tasks.prices import price_files, price_folder, recheck_prices, refresh_before_renting
from tasks.profiling import charge_measurements, check_model_name, profile_layers
from tasks.promotion import promote_if_better
from tasks.promotion_gates import PromotionGates
from tasks.promotion_report import publish_decision
from tasks.provisioning import LOCAL_PROVIDER, REGION, find_offers, provision
from tasks.publishing import publish_plan, publish_report
from tasks.recording import record_plan, record_run, register_model
from tasks.reporting import plan_summary, plan_text, report_text, training_summary
from tasks.run_report import PlanReport, RunReport
from tasks.runs import (
    COMPLETED,
    TrainingParameters,
    clean_up_run,
    finished_run,
    keep_parameters,
    new_run_id,
    open_record,
    utc_now,
)
from tasks.scheduling import (
    explain_choice,
    make_problem,
    predict_launch,
    search_chosen,
    simulate_choice,
    with_compared,
)
from tasks.start import CHAMPION, check_start_name, start_of_run
from tasks.story import tell, tell_block
from tasks.tracking import START_TAG, EndStatus, close_run, tag_run
from tasks.training import check_update_mode, resume_summary, train, training_config, write_job

ALL_COSTS_COUNT: list[str] = []
DEFAULT_MARKETS = ["on-demand"]
DEFAULT_GATES = PromotionGates()
DEFAULT_DEVICE_TYPES = ["cpu-c7i", "cpu-r6in", "gpu-t4", "gpu-t4-20gbit"]


def clean_up_after(status: EndStatus) -> Any:
    """Return a hook that ends machines by run id and closes the record with `status`."""

    def clean_up(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        reason = f"{state.name}: {(state.message or 'no message').splitlines()[0]}"
        clean_up_run(
            Workspace.locate(),
            str(flow_run.id),
            resume_run_id=flow_run.parameters.get("resume_run_id"),
            status=status,
            reason=reason,
        )

    return clean_up


def check_parameters(
    *,
    data: str | None,
    schema_file: str | None,
    model: str,
    scheduler: str,
    provider: str,
    device_types: list[str],
    markets: list[str],
    catalogue: str | None,
    region: str,
    leave_out_costs: list[str],
    update_mode: str = "sync",
    day: str | None = None,
    start_from: str = CHAMPION,
    ready_by: str | None = None,
    **numbers: Any,
) -> None:
    """Check the parameters in milliseconds, before any work or record begins.

    Raises:
        UnknownNameError: A name is in no registry; the message lists the known ones.
        DataError, ConfigurationError: A file or day is not there, the provider lacks what it needs, or a number is
            out of its range.
    """
    check_numbers(numbers)
    check_provider(Workspace.locate(), provider)
    get_scheduler(scheduler)
    check_model_name(model)
    check_update_mode_name(update_mode)
    check_start_name(start_from)
    if ready_by is not None:
        parse_time_of_day(ready_by)
    for name in device_types:
        get_device_type(name)
    check_markets(markets=markets, provider=provider, catalogue=catalogue, region=region)
    price_files(Workspace.locate(), catalogue)
    NO_EXTRA_COSTS.without(leave_out_costs)
    check_source(data, schema_file=schema_file, day=day)


@flow(
    name=TRAIN_CTR,
    flow_run_name="{model}-{scheduler}",
    on_failure=[clean_up_after("FAILED")],
    on_cancellation=[clean_up_after("KILLED")],
    on_crashed=[clean_up_after("KILLED")],
)
def train_ctr(
    data: str | None = None,
    schema_file: str | None = None,
    day: Day | None = None,
    again: bool = False,
    start_from: StartName = CHAMPION,
    model: str = "ctrdnn",
    scheduler: SchedulerName = "reinforce",
    provider: ProviderName = "local",
    device_types: list[str] = DEFAULT_DEVICE_TYPES,
    markets: list[MarketName] = DEFAULT_MARKETS,
    catalogue: str | None = None,
    region: str = REGION,
    throughput_floor_samples_per_s: Throughput = 0.0,
    ready_by: str | None = None,
    planned_samples: Count | None = NIGHT_SAMPLES,
    planned_rows_per_slot: RowCount | None = PRODUCTION_ROWS_PER_SLOT,
    epochs: Count = 1,
    batch_size: BatchSize | None = None,
    update_mode: UpdateMode = "sync",
    max_usd_per_hour: Usd | None = None,
    max_usd_per_run: Usd | None = None,
    max_usd_per_month: Usd | None = None,
    plan_only: bool = False,
    leave_out_costs: list[CostTerm] = ALL_COSTS_COUNT,
    budget_evaluations: Count = 2_000,
    seed: Seed = 0,
    least_auc_gain: float = DEFAULT_GATES.least_auc_gain,
    most_log_loss_rise: float = DEFAULT_GATES.most_log_loss_rise,
    most_calibration_rise: float = DEFAULT_GATES.most_calibration_rise,
    most_usd_per_million_samples_ratio: float = DEFAULT_GATES.most_usd_per_million_samples_ratio,
    least_clicks: Count = DEFAULT_GATES.least_clicks,
    promotion_confidence: float = DEFAULT_GATES.confidence,
    resume_run_id: str | None = None,
) -> str:
    """Train a click model on machines that a proven plan chose, and record what it cost.

    Args:
        data: File, folder or pattern of clicks in time order, or a folder of folders day=YYYY-MM-DD; empty for a
            made-up click stream.
        schema_file: JSON file that names label, numeric and categorical columns; empty for the Criteo format.
        day: Day to train on, YYYY-MM-DD, judged on the one after it; empty for the latest whose next day is there
            too. Only for data that is cut into days.
        again: Train a day once more that has been trained on with the same data and model.
        start_from: What a day begins with: champion goes on with its weights, scratch draws new ones.
        model: Name of a model (ctrdnn, ctrdnn-16, 2emb, matchnet, nce), or your own as package.module:function.
        scheduler: Search method whose plan is used; exact proves every plan.
        provider: Where machines come from: local rehearses the plan on this machine, aws rents.
        device_types: What layers may be placed on.
        markets: How machines may be bought: on-demand, spot, or both; one machine is always on-demand.
        catalogue: File of prices to plan with instead of those of AWS, in SkyPilot's format.
        region: Of the prices; machines are rented in us-east-1 only.
        throughput_floor_samples_per_s: Least throughput of a plan in samples/s; 0 for none.
        ready_by: Time of day in the time zone of the schedule, such as 06:00, by which the model must be ready:
            raises the floor as far as that needs; empty for no deadline.
        planned_samples: Samples of the night that a rehearsed plan is made for; empty for those of the data.
        planned_rows_per_slot: Rows of each table that a rehearsed plan is made for; empty for those of the data.
        epochs: Passes over the training rows.
        batch_size: Samples per training step; empty to choose it from the number of rows.
        update_mode: How embeddings are updated: sync, by all workers together; or hybrid, by parameter servers as
            gradients come, which needs a plan that is cut behind the embeddings.
        max_usd_per_hour: Refuse a plan that costs more in USD/hour; empty for no cap.
        max_usd_per_run: Refuse a plan that costs more in USD for the whole run, and stop a run at a checkpoint before
            it has spent more; empty for no cap.
        max_usd_per_month: The same for all runs of a calendar month together; empty for no cap.
        plan_only: Launch nothing: say what would be bought, for how much and why, and end.
        leave_out_costs: Costs that plans are not charged for: startup, search, storage, transfer, spot-risk.
        budget_evaluations: Plans that each search method may rate.
        seed: Of all random choices in search and training.
        least_auc_gain: The new model becomes champion only where the interval of its AUC less the champion's, on rows
            that neither has seen, lies above this; below 0 a loss of so much is borne.
        most_log_loss_rise: Only where the interval of its log-loss less the champion's lies below this.
        most_calibration_rise: Only where its ratio of predicted to observed clicks is no farther from 1 than this
            beyond the champion's.
        most_usd_per_million_samples_ratio: Only where a million samples cost at most this many times the champion's,
            or its gain in AUC is proven.
        least_clicks: Only where the rows have so many clicks and so many rows without one.
        promotion_confidence: Of those intervals.
        resume_run_id: Go on with the training of this run from its newest checkpoint, with its data, model
            and numbers.

    Returns:
        The run's id; where the day is done already, that of the run that did it.
    """
    check_parameters(
        data=data,
        schema_file=schema_file,
        day=day,
        start_from=start_from,
        ready_by=ready_by,
        model=model,
        scheduler=scheduler,
        provider=provider,
        device_types=device_types,
        markets=markets,
        catalogue=catalogue,
        region=region,
        leave_out_costs=leave_out_costs,
        update_mode=update_mode,
        throughput_floor_samples_per_s=throughput_floor_samples_per_s,
        planned_samples=planned_samples,
        planned_rows_per_slot=planned_rows_per_slot,
        epochs=epochs,
        batch_size=batch_size,
        max_usd_per_hour=max_usd_per_hour,
        max_usd_per_run=max_usd_per_run,
        max_usd_per_month=max_usd_per_month,
        budget_evaluations=budget_evaluations,
        seed=seed,
    )
    gates = PromotionGates(
        least_auc_gain=least_auc_gain,
        most_log_loss_rise=most_log_loss_rise,
        most_calibration_rise=most_calibration_rise,
        most_usd_per_million_samples_ratio=most_usd_per_million_samples_ratio,
        least_clicks=least_clicks,
        confidence=promotion_confidence,
    )
    workspace = Workspace.locate().create()
    caps = Caps(
        max_usd_per_hour=max_usd_per_hour,
        max_usd_per_run=max_usd_per_run,
        max_usd_per_month=max_usd_per_month,
    )
    run_id = resume_run_id or new_run_id(current_flow_run.id, now=utc_now())
    is_resumed = resume_run_id is not None
    night = None if is_resumed else find_night_of(data, day)
    source = source_name(data, schema_file)
    if night is not None and not (again or plan_only):
        earlier = finished_run(workspace, day=str(night.day), data=source, model=model)
        if earlier is not None:
            tell(
                "done",
                f"run {earlier} has trained {model} on {night.day} of {data}; again=True trains once more",
            )
            return earlier
    if not plan_only:
        check_no_other_fleet(workspace, run_id)
    asked = TrainingParameters(
        data=data,
        schema_file=schema_file,
        model=model,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        day=None if night is None else str(night.day),
        start_from=start_from,
    )
    asked = keep_parameters(workspace, asked, run_id=run_id, is_resumed=is_resumed)
    night = find_night_of(asked.data, asked.day) if is_resumed and asked.day else night
    tell("run", run_id)
    tracked = open_record(
        workspace,
        run_id=run_id,
        model=asked.model,
        scheduler=scheduler,
        provider=provider,
        flow_run_id=current_flow_run.id,
        data=source_name(asked.data, asked.schema_file),
        day=asked.day,
    )

    start = start_of_run(
        workspace,
        RunDirectory(run_location(workspace, provider, run_id)) if is_resumed else None,
        start_from=asked.start_from,
        day=None if night is None else night.day,
        model=asked.model,
        schema=schema_of(asked.schema_file),
    )
    if start.reason:
        tell("start", start.reason)
    if start.model is not None:
        tag_run(workspace, tracked, {START_TAG: start.model.version})
    clicks = prepare_data(
        workspace,
        data=asked.data,
        schema_file=asked.schema_file,
        night=night,
        buckets_per_slot=start.buckets_per_slot,
        numeric_transform=start.numeric_transform,
    )
    tell("data", clicks.summary)
    dataset = clicks.open()
    batch_size = asked.batch_size or default_batch_size(dataset.num_train_rows)

    job = planned_job(
        dataset,
        provider=provider,
        batch_size=asked.batch_size,
        planned_samples=planned_samples,
        planned_rows_per_slot=planned_rows_per_slot,
    )
    device_types = device_types_to_buy(workspace, device_types, markets, run_id=run_id)
    profiled = profile_layers(
        workspace, clicks, job, model=asked.model, batch_size=batch_size, device_types=device_types
    )
    tell("profile", profiled.summary)

    if provider != LOCAL_PROVIDER:
        refresh_before_renting(workspace, regions=[region])
    prices = PriceCatalogue(price_files(workspace, catalogue))
    offers = find_offers(
        device_types,
        catalogue=prices,
        region=region,
        counted_interruptions=read_counted(price_folder(workspace)),
    )
    deadline = None
    if ready_by is not None:
        deadline = deadline_for(
            ready_by,
            now=utc_now(),
            zone=ZoneInfo(nightly_timezone()),
            num_samples=job.num_samples,
            num_epochs=asked.epochs,
        )
    with explained_by(deadline):
        problem = make_problem(
            profiled,
            offers,
            job,
            device_types=device_types,
            num_epochs=asked.epochs,
            throughput_floor_samples_per_s=floor_with(deadline, throughput_floor_samples_per_s),
            leave_out_costs=leave_out_costs,
            profiling_usd=profiled.profiling_usd(run_id),
        )
    learning = learn_from_runs(workspace, run_id=run_id)
    problem = learning.corrected(problem)
    tell("learnt", learning.summary(problem))
    with explained_by(deadline):
        searches = search_chosen(
            problem, scheduler=scheduler, budget_evaluations=budget_evaluations, seed=asked.seed
        )
    plan = searches.results[scheduler].plan
    tell("plan", plan_summary(plan) + floor_text(deadline, throughput_floor_samples_per_s))
    explanation = explain_choice(problem, searches.results[scheduler])
    simulation = simulate_choice(problem, searches.results[scheduler])

    provisioning = provision(
        plan,
        offers,
        provider=provider,
        caps=caps,
        spent_this_month_usd=spent_this_month_usd(workspace, provider),
        price_files=[file.path for file in prices.files],
    )
    tell("machines", provisioning.summary)

    config = training_config(
        dataset,
        batch_size=batch_size,
        epochs=asked.epochs,
        seed=asked.seed,
        num_stages=len(provisioning.launch_stages),
        update_mode=update_mode,
    )
    check_update_mode(config, model=asked.model, dataset=dataset, stages=provisioning.launch_stages)
    planned = PlanReport(
        run_id=run_id,
        model=asked.model,
        data=clicks.description,
        num_train_rows=dataset.num_train_rows,
        num_eval_rows=dataset.num_eval_rows,
        problem=problem,
        searches=searches,
        scheduler=scheduler,
        explanation=explanation,
        simulation=simulation,
        provisioning=provisioning,
        tracked=tracked,
        is_estimated=bool(profiled.estimated_device_types),
        day=asked.day,
    )
    keep_explanation(workspace, planned)
    comparing = {"budget_evaluations": budget_evaluations, "seed": asked.seed}
    if plan_only:
        planned = replace(planned, searches=with_compared(searches, problem, **comparing))
        pictures = record_plan(workspace, planned, num_microbatches=config.num_microbatches)
        publish_plan(workspace, planned, pictures)
        close_run(workspace, tracked, status="FINISHED", reason="plan only")
        tell_block(plan_text(planned, workspace))
        return run_id

    if provider != LOCAL_PROVIDER:
        provisioning = recheck_prices(
            provisioning, caps=caps, spent_this_month_usd=spent_this_month_usd(workspace, provider)
        )
        tell("prices", provisioning.summary)
    run_directory = RunDirectory(run_location(workspace, provider, run_id))
    if is_resumed:
        tell("resume", resume_summary(run_directory))
    write_job(
        run_directory,
        run_id=run_id,
        model=asked.model,
        dataset=dataset,
        stages=provisioning.launch_stages,
        config=config,
        start=start,
    )
    with (
        only_fleet(workspace, run_id),
        rented_cluster(
            workspace,
            provider,
            provisioning,
            run_id=run_id,
            run_directory=run_directory,
            model=asked.model,
            caps=caps,
        ) as cluster,
        within_budget(workspace, cluster, caps, run_id=run_id, run_directory=run_directory) as watch,
    ):
        if provider != LOCAL_PROVIDER:
            charge_measurements(workspace, profiled, run_id=run_id)
        training = train(run_directory, cluster)
    keep_storage_usage(workspace, run_id, training.storage + run_directory.usage)
    check_finished_within_budget(watch, training, run_id=run_id)
    leaving = note_interruptions(workspace, run_id, run_directory=run_directory, cluster=cluster)
    if leaving and not training.is_complete:
        tell("taken back", interruption_summary(training, leaving))
        return train_ctr(**{**current_flow_run.parameters, "resume_run_id": run_id})
    tell("trained", training_summary(training))

    # Not before the launch: what is compared, drawn and recorded takes seconds that the training need not wait for.
    planned = replace(planned, searches=with_compared(searches, problem, **comparing))
    prediction = predict_launch(profiled, provisioning.launch_stages, config)
    report = RunReport.of(
        planned,
        this_machine=profiled.local_profile.hardware_fingerprint,
        learning=learning,
        prediction=prediction,
        training=training,
        baseline=measure_baseline(clicks),
        best_reachable=clicks.best_reachable,
        bills=bills_of_run(workspace, provider, run_id),
    )
    text = report_text(report, workspace)
    pictures = record_plan(workspace, planned, num_microbatches=config.num_microbatches)
    record_run(workspace, report, text=text)
    version = register_model(workspace, run_directory, report, clicks, day=asked.day)
    decision = promote_if_better(
        workspace,
        run_id=run_id,
        version=version,
        day=asked.day,
        dataset=dataset,
        usd_per_million_samples=report.billed_usd_per_million_samples,
        gates=gates,
    )
    unjudged = f"version {version} is not judged: the champion has been trained on later days"
    tell("champion", unjudged if decision is None else decision.why)
    if decision is not None:
        publish_decision(workspace, tracked, decision)
    publish_report(workspace, report, pictures, decision=decision)
    close_run(workspace, tracked, status="FINISHED", reason=COMPLETED)
    tell_block(text)
    return run_id


if __name__ == "__main__":
    from flows.command_line import main

    sys.exit(main(train_ctr, program="python -m flows.train_ctr", check=check_parameters))
