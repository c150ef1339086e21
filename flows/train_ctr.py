"""The whole line: data, profile, plan, machines, training, teardown, record and bill.

`make train-ctr` runs it from the command line, `prefect deployment run train-ctr` from a served
deployment; both are this one flow.
"""

from __future__ import annotations

import sys
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.runtime import flow_run as current_flow_run

from flows.schedule import TRAIN_CTR
from heterps_core.hardware import get_device_type
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
from tasks.data import check_source, prepare_data
from tasks.interruptions import interruption_summary, note_interruptions
from tasks.markets import check_markets, device_types_to_buy
from tasks.parameter_ranges import check_numbers
from tasks.planned_job import NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT, planned_job
from tasks.prices import price_files, price_folder, recheck_prices, refresh_before_renting
from tasks.profiling import charge_measurements, check_model_name, profile_layers
from tasks.provisioning import LOCAL_PROVIDER, REGION, find_offers, provision
from tasks.recording import record_plan, record_run, register_model
from tasks.reporting import (
    plan_summary,
    plan_text,
    publish_bill,
    publish_plan,
    report_text,
    training_summary,
)
from tasks.run_report import PlanReport, RunReport
from tasks.runs import (
    TrainingParameters,
    clean_up_run,
    keep_parameters,
    new_run_id,
    open_record,
    utc_now,
)
from tasks.scheduling import explain_choice, make_problem, predict_launch, search_with_all, simulate_choice
from tasks.story import tell, tell_block
from tasks.tracking import EndStatus, close_run
from tasks.training import check_update_mode, resume_summary, train, training_config, write_job

ALL_COSTS_COUNT: list[str] = []
DEFAULT_MARKETS = ["on-demand"]
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
    **numbers: Any,
) -> None:
    """Check the parameters in milliseconds, before any work or record begins.

    Raises:
        UnknownNameError: A name is in no registry; the message lists the known ones.
        DataError, ConfigurationError: A file is not there, the provider lacks what it needs, or a number is out
            of its range.
    """
    check_numbers(numbers)
    check_provider(Workspace.locate(), provider)
    get_scheduler(scheduler)
    check_model_name(model)
    check_update_mode_name(update_mode)
    for name in device_types:
        get_device_type(name)
    check_markets(markets=markets, provider=provider, catalogue=catalogue, region=region)
    price_files(Workspace.locate(), catalogue)
    NO_EXTRA_COSTS.without(leave_out_costs)
    check_source(data, schema_file=schema_file)


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
    model: str = "ctrdnn",
    scheduler: str = "reinforce",
    provider: str = "local",
    device_types: list[str] = DEFAULT_DEVICE_TYPES,
    markets: list[str] = DEFAULT_MARKETS,
    catalogue: str | None = None,
    region: str = REGION,
    throughput_floor_samples_per_s: float = 0.0,
    planned_samples: int | None = NIGHT_SAMPLES,
    planned_rows_per_slot: int | None = PRODUCTION_ROWS_PER_SLOT,
    epochs: int = 1,
    batch_size: int | None = None,
    update_mode: str = "sync",
    max_usd_per_hour: float | None = None,
    max_usd_per_run: float | None = None,
    max_usd_per_month: float | None = None,
    plan_only: bool = False,
    leave_out_costs: list[str] = ALL_COSTS_COUNT,
    budget_evaluations: int = 2_000,
    seed: int = 0,
    resume_run_id: str | None = None,
) -> str:
    """Train a click model on machines that a proven plan chose, and record what it cost.

    Args:
        data: File, folder or pattern of clicks in time order; empty for a made-up click stream.
        schema_file: JSON file that names label, numeric and categorical columns; empty for the Criteo format.
        model: Name of a model (ctrdnn, ctrdnn-16, 2emb, matchnet, nce), or your own as package.module:function.
        scheduler: Search method whose plan is used; exact proves every plan.
        provider: Where machines come from: local rehearses the plan on this machine, aws rents.
        device_types: What layers may be placed on.
        markets: How machines may be bought: on-demand, spot, or both; one machine is always on-demand.
        catalogue: File of prices to plan with instead of those of AWS, in SkyPilot's format.
        region: Of the prices; machines are rented in us-east-1 only.
        throughput_floor_samples_per_s: Least throughput of a plan in samples/s; 0 for none.
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
        resume_run_id: Go on with the training of this run from its newest checkpoint, with its data, model
            and numbers.

    Returns:
        The run's id.
    """
    check_parameters(
        data=data,
        schema_file=schema_file,
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
    workspace = Workspace.locate().create()
    caps = Caps(
        max_usd_per_hour=max_usd_per_hour,
        max_usd_per_run=max_usd_per_run,
        max_usd_per_month=max_usd_per_month,
    )
    run_id = resume_run_id or new_run_id(current_flow_run.id, now=utc_now())
    asked = TrainingParameters(
        data=data, schema_file=schema_file, model=model, epochs=epochs, batch_size=batch_size, seed=seed
    )
    asked = keep_parameters(workspace, asked, run_id=run_id, is_resumed=resume_run_id is not None)
    tell("run", run_id)
    tracked = open_record(
        workspace,
        run_id=run_id,
        model=asked.model,
        scheduler=scheduler,
        provider=provider,
        flow_run_id=current_flow_run.id,
    )

    clicks = prepare_data(workspace, data=asked.data, schema_file=asked.schema_file)
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
    problem = make_problem(
        profiled,
        offers,
        job,
        device_types=device_types,
        num_epochs=asked.epochs,
        throughput_floor_samples_per_s=throughput_floor_samples_per_s,
        leave_out_costs=leave_out_costs,
        profiling_usd=profiled.profiling_usd(run_id),
    )
    searches = search_with_all(
        problem, scheduler=scheduler, budget_evaluations=budget_evaluations, seed=asked.seed
    )
    plan = searches.results[scheduler].plan
    tell("plan", plan_summary(plan))
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
    )
    if plan_only:
        record_plan(workspace, planned, num_microbatches=config.num_microbatches)
        publish_plan(planned)
        close_run(workspace, tracked, status="FINISHED", reason="plan only")
        tell_block(plan_text(planned, workspace))
        return run_id

    if provider != LOCAL_PROVIDER:
        provisioning = recheck_prices(
            provisioning, caps=caps, spent_this_month_usd=spent_this_month_usd(workspace, provider)
        )
        tell("prices", provisioning.summary)
    prediction = predict_launch(profiled, provisioning.launch_stages, config)
    run_directory = RunDirectory(run_location(workspace, provider, run_id))
    if resume_run_id is not None:
        tell("resume", resume_summary(run_directory))
    write_job(
        run_directory,
        run_id=run_id,
        model=asked.model,
        dataset=dataset,
        stages=provisioning.launch_stages,
        config=config,
    )
    with (
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

    report = RunReport.of(
        planned,
        prediction=prediction,
        training=training,
        baseline=measure_baseline(clicks),
        best_reachable=clicks.best_reachable,
        bills=bills_of_run(workspace, provider, run_id),
    )
    text = report_text(report, workspace)
    # Not before the launch: figures and records take seconds that the training need not wait for.
    record_plan(workspace, planned, num_microbatches=config.num_microbatches)
    publish_plan(planned)
    record_run(workspace, report, text=text)
    register_model(workspace, run_directory, report, clicks)
    publish_bill(report)
    close_run(workspace, tracked, status="FINISHED", reason="completed")
    tell_block(text)
    return run_id


if __name__ == "__main__":
    from flows.command_line import main

    sys.exit(main(train_ctr, program="python -m flows.train_ctr", check=check_parameters))
