"""Measures device types on machines that are rented for it, so that plans need not rest on estimates.

Runs on request (`prefect deployment run profile-devices`). Rents a machine of each device type without a measurement
that still counts, in the first region that `regions` names; the provider local makes a dry run of all of it with
processes of this machine.
"""

from __future__ import annotations

import sys

from flows.parameters import USUAL_DEVICE_TYPES, ProfileParameters

if __name__ == "__main__":
    # Before Prefect is loaded, so that --help and a wrong value are answered at once.
    from flows.command_line import main

    sys.exit(main("flows.profile_devices", ProfileParameters))

from prefect import flow
from prefect.runtime import flow_run as current_flow_run

from flows.parameter_model import takes
from flows.service.recovery import clean_up_after
from flows.service.schedule import PROFILE_DEVICES
from heterps_core.hardware import hardware_name
from heterps_core.training.job import default_batch_size
from infra.providers import get_provider
from infra.workspace import Workspace
from tasks.clusters import bills_of_run, directory_of_run
from tasks.data import prepare_data
from tasks.planning import device_profiles
from tasks.planning.regions import Regions
from tasks.prices import device_types_of, offers_now
from tasks.profiling import planned_job, profile_layers
from tasks.records.mlflow_names import Kind
from tasks.records.run_ids import new_run_id, utc_now
from tasks.records.run_record import close_run
from tasks.reports.bills import bill_text
from tasks.running.budget import spent_this_month_usd
from tasks.running.live_fleet import check_no_other_fleet
from tasks.running.progress import log_block, log_step
from tasks.running.run_lifecycle import open_run


@flow(
    name=PROFILE_DEVICES,
    flow_run_name="{model}",
    validate_parameters=False,
    on_failure=[clean_up_after("FAILED")],
    on_cancellation=[clean_up_after("KILLED")],
    on_crashed=[clean_up_after("KILLED")],
)
@takes(ProfileParameters)
def profile_devices(asked: ProfileParameters) -> str:
    """Measure a click model on a rented machine of each device type.

    Returns:
        The run's id.
    """
    workspace = Workspace.locate().create()
    run_id = new_run_id(current_flow_run.id, now=utc_now())
    check_no_other_fleet(workspace, run_id)
    # By this folder a hook finds the run of a flow run, also where its nodes meet elsewhere.
    workspace.run_folder(run_id).mkdir(parents=True)
    log_step("run", run_id)
    tracked = open_run(
        workspace,
        run_id=run_id,
        run_name=f"{Kind.PROFILING} {run_id}",
        tags={"heterps.provider": asked.provider},
        kind=Kind.PROFILING,
    )

    clicks = prepare_data(workspace, asked.source, night=asked.source.night(None))
    log_step("data", clicks.summary)
    dataset = clicks.open()
    job = planned_job(
        dataset,
        is_dry_run=get_provider(asked.provider).is_dry_run,
        batch_size=asked.batch_size,
        planned_samples=asked.planned_samples,
        planned_rows_per_slot=asked.planned_rows_per_slot,
    )
    usual = (
        device_types_of(workspace, asked.provider)
        if get_provider(asked.provider).has_inventory
        else USUAL_DEVICE_TYPES
    )
    device_types = list(dict.fromkeys(hardware_name(name) for name in asked.device_types or usual))
    profiled = profile_layers(
        workspace,
        clicks,
        job,
        model=asked.sized_model,
        batch_size=asked.batch_size or default_batch_size(dataset.num_train_rows),
        device_types=device_types,
        trained_with=asked.trained_with,
    )
    log_step("profile", profiled.summary)

    region = Regions.of(workspace, asked.provider, asked.regions, data=asked.data).rented[0]
    offers, _ = offers_now(workspace, asked.provider, device_types, regions=[region])
    for kept in profiled.measured.values():
        log_step(
            "measured", f"{kept.device_type} {kept}; counts until {kept.expires_at:%Y-%m-%d}, not rented"
        )
    rented = [name for name in device_types if name not in map(hardware_name, profiled.measured)]
    if not rented:
        close_run(workspace, tracked, status="FINISHED", reason="all device types are measured")
        return run_id

    run_directory = directory_of_run(workspace, asked.provider, run_id)
    with device_profiles.rented_for_measuring(
        workspace,
        asked.provider,
        device_profiles.measuring_plan(rented, offers[region], profiled.graph),
        profiled.planned_request,
        run_id=run_id,
        run_directory=run_directory,
        caps=asked.caps,
        spent_this_month_usd=spent_this_month_usd(workspace, asked.provider),
    ) as cluster:
        results = device_profiles.measure_device_types(run_directory, cluster)
    workspace.forget_run_key(run_id)
    devices = device_profiles.with_costs(
        results, cluster, bills_of_run(workspace, asked.provider, run_id), run_id=run_id
    )
    for line in device_profiles.keep_profiles(workspace, profiled, devices):
        log_step("measured", line)
    device_profiles.record_profiling(workspace, tracked, devices)
    for bill in devices.bills:
        log_block(bill_text(bill))
    device_profiles.check_all_measured(devices)
    close_run(workspace, tracked, status="FINISHED", reason="completed")
    return run_id
