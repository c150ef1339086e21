"""Measures device types on machines that are rented for it, so that plans need not rest on estimates.

Runs on request (`prefect deployment run profile-devices`). Only those are rented whose true speed may change the plan
by more than the rent costs; the provider local rehearses all of it with processes of this machine.
"""

from __future__ import annotations

import sys

from prefect import flow
from prefect.runtime import flow_run as current_flow_run

from flows.parameter_checks import check_run
from flows.parameters import DEFAULT_DEVICE_TYPES
from flows.service.clean_up import clean_up_after
from flows.service.schedule import PROFILE_DEVICES
from heterps_core.hardware import Market
from heterps_core.profiling.profiles.device_profile import VALID_FOR, hardware_name
from heterps_core.training.job import default_batch_size
from heterps_core.training.storage.run_directory import RunDirectory
from infra.billing.bill import bill_as_text
from infra.billing.caps import Caps
from infra.prices.price_catalogue import PriceCatalogue
from infra.workspace import Workspace
from tasks.clusters import bills_of_run, provider_of, run_location
from tasks.data import find_night_of, prepare_data
from tasks.planning.device_profiles import (
    check_all_measured,
    keep_profiles,
    measure_device_types,
    record_profiling,
    rented_for_measuring,
    with_costs,
)
from tasks.planning.measurement_decision import decide_measurements, measuring_plan
from tasks.planning.parameter_ranges import check_numbers
from tasks.planning.planned_job import NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT, planned_job
from tasks.prices import price_files, refresh_before_renting
from tasks.profiling import profile_layers
from tasks.provisioning import LOCAL_PROVIDER, REGION, find_offers
from tasks.records.runs import new_run_id, utc_now
from tasks.running.budget import spent_this_month_usd
from tasks.running.live_fleet import check_no_other_fleet
from tasks.running.run_lifecycle import close_run, open_profiling
from tasks.running.story import tell, tell_block
from tasks.scheduling import PROVING_SCHEDULER, make_problem


def check(
    *,
    data: str | None,
    schema_file: str | None,
    model: str,
    provider: str,
    device_types: list[str],
    catalogue: str | None,
    region: str,
    **numbers: float | None,
) -> None:
    """Check the parameters in milliseconds, as those of train-ctr are.

    Raises:
        UnknownNameError, DataError, ConfigurationError: See `flows.parameter_checks.check_run`.
    """
    check_numbers(numbers)
    check_run(
        data=data,
        schema_file=schema_file,
        model=model,
        scheduler=PROVING_SCHEDULER,
        provider=provider,
        device_types=device_types,
        markets=[Market.ON_DEMAND],
        catalogue=catalogue,
        region=region,
        leave_out_costs=[],
    )


@flow(
    name=PROFILE_DEVICES,
    flow_run_name="{model}",
    on_failure=[clean_up_after("FAILED")],
    on_cancellation=[clean_up_after("KILLED")],
    on_crashed=[clean_up_after("KILLED")],
)
def profile_devices(
    data: str | None = None,
    schema_file: str | None = None,
    model: str = "ctrdnn",
    provider: str = "local",
    device_types: list[str] = DEFAULT_DEVICE_TYPES,
    catalogue: str | None = None,
    region: str = REGION,
    throughput_floor_samples_per_s: float = 0.0,
    planned_samples: int | None = NIGHT_SAMPLES,
    planned_rows_per_slot: int | None = PRODUCTION_ROWS_PER_SLOT,
    epochs: int = 1,
    batch_size: int | None = None,
    nights: int = VALID_FOR.days,
    max_usd_per_hour: float | None = None,
    max_usd_per_run: float | None = None,
    max_usd_per_month: float | None = None,
) -> str:
    """Measure a click model on rented machines of the device types where that is worth its cost.

    Args:
        data: File, folder or pattern of clicks in time order; empty for a made-up click stream.
        schema_file: JSON file that names label, numeric and categorical columns; empty for the Criteo format.
        model: Name of a model, or your own as package.module:function; as for train-ctr.
        provider: Where machines come from: local rehearses on this machine and keeps nothing, aws rents.
        device_types: What may be measured.
        catalogue: File of prices to plan with instead of those of AWS, in SkyPilot's format.
        region: Of the prices; machines are rented in us-east-1 only.
        throughput_floor_samples_per_s: Least throughput of a plan in samples/s; 0 for none.
        planned_samples: Samples of the night that a rehearsed plan is made for; empty for those of the data.
        planned_rows_per_slot: Rows of each table that a rehearsed plan is made for; empty for those of the data.
        epochs: Passes over the training rows.
        batch_size: Samples per training step; empty to choose it as train-ctr does.
        nights: Runs of train-ctr that a measurement serves before it expires, 30 days after.
        max_usd_per_hour: Refuse to rent for more in USD/hour; empty for no cap.
        max_usd_per_run: Refuse to rent where that may cost more in USD until its time limit; empty for no cap.
        max_usd_per_month: The same with all that was spent in the calendar month; empty for no cap.

    Returns:
        The run's id.
    """
    check(**locals())
    workspace = Workspace.locate().create()
    caps = Caps(
        max_usd_per_hour=max_usd_per_hour,
        max_usd_per_run=max_usd_per_run,
        max_usd_per_month=max_usd_per_month,
    )
    run_id = new_run_id(current_flow_run.id, now=utc_now())
    check_no_other_fleet(workspace, run_id)
    # By this folder a hook finds the run of a flow run, also where its nodes meet elsewhere.
    workspace.run_directory(run_id).mkdir(parents=True)
    tell("run", run_id)
    tracked = open_profiling(workspace, run_id=run_id, tags={"heterps.provider": provider})

    clicks = prepare_data(workspace, data=data, schema_file=schema_file, night=find_night_of(data, None))
    tell("data", clicks.summary)
    dataset = clicks.open()
    job = planned_job(
        dataset,
        provider=provider,
        batch_size=batch_size,
        planned_samples=planned_samples,
        planned_rows_per_slot=planned_rows_per_slot,
    )
    device_types = list(dict.fromkeys(hardware_name(name) for name in device_types))
    profiled = profile_layers(
        workspace,
        clicks,
        job,
        model=model,
        batch_size=batch_size or default_batch_size(dataset.num_train_rows),
        device_types=device_types,
    )
    tell("profile", profiled.summary)

    if provider != LOCAL_PROVIDER:
        refresh_before_renting(workspace, regions=[region])
    offers = find_offers(
        device_types, catalogue=PriceCatalogue(price_files(workspace, catalogue)), region=region
    )
    problem = make_problem(
        profiled,
        offers,
        job,
        device_types=device_types,
        num_epochs=epochs,
        throughput_floor_samples_per_s=throughput_floor_samples_per_s,
    )
    decisions = decide_measurements(
        problem,
        profiled.graph,
        offers,
        measured=profiled.measured,
        nights=nights,
        minimum_billed_s=provider_of(workspace, provider).minimum_billed_s,
    )
    for decision in decisions:
        tell("weighed", f"{decision.device_type}: {decision.text}")
    rented = [each.device_type for each in decisions if each.is_rented]
    if not rented:
        record_profiling(workspace, tracked, decisions, None)
        close_run(workspace, tracked, status="FINISHED", reason="nothing was worth measuring")
        return run_id

    run_directory = RunDirectory(run_location(workspace, provider, run_id))
    with rented_for_measuring(
        workspace,
        provider,
        measuring_plan(rented, offers, profiled.graph),
        profiled,
        run_id=run_id,
        run_directory=run_directory,
        caps=caps,
        spent_this_month_usd=spent_this_month_usd(workspace, provider),
    ) as cluster:
        results = measure_device_types(run_directory, cluster)
    devices = with_costs(results, cluster, bills_of_run(workspace, provider, run_id), run_id=run_id)
    for line in keep_profiles(workspace, profiled, devices):
        tell("measured", line)
    record_profiling(workspace, tracked, decisions, devices)
    for bill in devices.bills:
        tell_block(bill_as_text(bill))
    check_all_measured(devices)
    close_run(workspace, tracked, status="FINISHED", reason="completed")
    return run_id


if __name__ == "__main__":
    from flows.command_line import main

    sys.exit(main(profile_devices, program="python -m flows.profile_devices", check=check))
