"""The whole line: data, profile, plan, machines, training, teardown, record and bill.

`make train-ctr` runs it from the command line, `prefect deployment run train-ctr` from a served
deployment; both are this one flow.
"""

from __future__ import annotations

import sys
from functools import partial

from prefect import flow
from prefect.runtime import flow_run as current_flow_run

from flows.night_outcome import judge_and_record
from flows.night_plan import PlanningTerms, end_with_plan, plan_night
from flows.night_training import train_night
from flows.opened_run import begin_run
from flows.parameter_checks import check_run, gates_of
from flows.parameters import (
    DEFAULT_DEVICE_TYPES,
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
    Usd,
)
from flows.service.clean_up import clean_up_after
from flows.service.schedule import TRAIN_CTR
from infra.billing.caps import Caps
from infra.workspace import Workspace
from tasks.data import find_night_of, source_name
from tasks.judging.promotion_gates import PromotionGates
from tasks.planning.planned_job import NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT
from tasks.provisioning import REGION
from tasks.records.runs import TrainingParameters, finished_run, new_run_id, utc_now
from tasks.reports.overhead import record_overhead
from tasks.running.live_fleet import only_fleet
from tasks.running.start import CHAMPION
from tasks.running.story import tell

ALL_COSTS_COUNT: list[str] = []
DEFAULT_MARKETS = ["on-demand"]
DEFAULT_GATES = PromotionGates()


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
        scheduler: Search method of the plan; exact proves every plan, and its own is taken where it is cheaper.
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
    parameters = locals()
    check_run(**parameters)
    started_at = utc_now()
    terms = PlanningTerms(
        scheduler=scheduler,
        budget_evaluations=budget_evaluations,
        device_types=device_types,
        markets=markets,
        catalogue=catalogue,
        region=region,
        throughput_floor_samples_per_s=throughput_floor_samples_per_s,
        ready_by=ready_by,
        planned_samples=planned_samples,
        planned_rows_per_slot=planned_rows_per_slot,
        leave_out_costs=leave_out_costs,
    )
    caps = Caps(
        max_usd_per_hour=max_usd_per_hour,
        max_usd_per_run=max_usd_per_run,
        max_usd_per_month=max_usd_per_month,
    )
    gates = gates_of(parameters)

    workspace = Workspace.locate().create()
    run_id = resume_run_id or new_run_id(current_flow_run.id, now=utc_now())
    is_resumed = resume_run_id is not None
    night = None if is_resumed else find_night_of(data, day)
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
    begin = partial(
        begin_run,
        workspace,
        asked,
        night,
        run_id=run_id,
        scheduler=scheduler,
        provider=provider,
        caps=caps,
        is_resumed=is_resumed,
    )
    if plan_only:
        run = begin()
        end_with_plan(run, plan_night(run, terms))
        return run_id

    with only_fleet(workspace, run_id, flow_run_id=str(current_flow_run.id)):
        if night is not None and not again:
            source = source_name(data, schema_file)
            earlier = finished_run(workspace, day=str(night.day), data=source, model=model)
            if earlier is not None:
                tell(
                    "done",
                    f"run {earlier} has trained {model} on {night.day} of {data}; again=True trains once more",
                )
                return earlier
        run = begin()
        plan = plan_night(run, terms)
        while (training := train_night(run, plan)) is None:
            # Its machines were preempted or lost; what can be had and what it costs may have changed.
            run = begin(is_resumed=True)
            plan = plan_night(run, terms)
        record_overhead(workspace, run.tracked, run.directory, started_at=started_at)
        judge_and_record(run, plan, training, gates)
        return run_id


if __name__ == "__main__":
    from flows.command_line import main

    sys.exit(main(train_ctr, program="python -m flows.train_ctr", check=check_run))
