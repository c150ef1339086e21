"""A launch to try a home: its cheapest machine goes through the whole bootstrap, measures a small model, and ends."""

from __future__ import annotations

import time
from contextlib import suppress

from heterps_core.data.features import FeatureSpec
from heterps_core.device_types import get_device_type
from heterps_core.errors import ProvisioningError, TrainingError
from heterps_core.hardware import DeviceKind
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.profiling.measurement.layer_profiler import trace_model
from heterps_core.profiling.measuring_process import ProfileRequest
from infra.billing.caps import Caps
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.clusters import bills_of_run, directory_of_run
from tasks.planning.device_profiles import measure_device_types, measuring_plan, rented_for_measuring
from tasks.planning.regions import Regions
from tasks.prices import catalogue_of, device_types_of
from tasks.provisioning import find_offers, not_rentable
from tasks.records.run_ids import new_run_id, utc_now
from tasks.running.budget import spent_this_month_usd

_SMALL = ProfileRequest(
    model="lr", features=FeatureSpec(num_dense=2, slot_rows=(1_000,) * 2), batch_size=256, budget_s=1.0
)
_MOST_USD = 0.25


def try_launch(workspace: Workspace, provider: str, *, region: str | None) -> str:
    """Return in one line which machine was launched, after how many seconds it had measured, and its cost.

    Args:
        region: None for that of the run store, or the provider's own.

    Raises:
        BudgetExceededError: The cheapest machine would cost more than 0.25 USD until its time limit.
        ProvisioningError: Another run has machines alive, or it was not available, or could not be ended.
        TrainingError: It did not measure.
    """
    place = Regions.of(workspace, provider, [region] if region else [], data=None).rented[0]
    run_id = new_run_id(None, now=utc_now())
    plan = _cheapest(workspace, provider, region=place)
    workspace.create().run_folder(run_id).mkdir(parents=True)
    run = directory_of_run(workspace, provider, run_id)
    began_s = time.monotonic()
    try:
        with rented_for_measuring(
            workspace,
            provider,
            plan,
            _SMALL,
            run_id=run_id,
            run_directory=run,
            caps=Caps(max_usd_per_run=_MOST_USD),
            spent_this_month_usd=spent_this_month_usd(workspace, provider),
        ) as cluster:
            up_s = time.monotonic() - began_s
            results = measure_device_types.fn(run, cluster)
            measured_s = time.monotonic() - began_s
    finally:
        workspace.forget_run_key(run_id)
    if results.problems:
        raise TrainingError("; ".join(results.problems.values()))
    usd = sum(bill.total_usd for bill in bills_of_run(workspace, provider, run_id))
    machine = plan.groups[0].offer.instance_type.name
    return f"{machine} was up after {up_s:.0f} s, had measured after {measured_s:.0f} s, and is ended: {usd:.4f} USD"


def _cheapest(workspace: Workspace, provider: str, *, region: str) -> ProvisioningPlan:
    """Return the plan of the cheapest machine without cards that an image boots.

    Raises:
        ProvisioningError: The region has none.
    """
    unbootable = not_rentable(provider_of(workspace, provider, region=region))
    able = [
        name
        for name in device_types_of(workspace, provider)
        if name not in unbootable and get_device_type(name).kind is DeviceKind.CPU
    ]
    offers = find_offers.fn(able, catalogue=catalogue_of(workspace, provider), region=region)
    graph, plans = trace_model(_SMALL), []
    for name in able:
        # Not all are sold in each region.
        with suppress(ProvisioningError):
            plans.append(measuring_plan([name], offers, graph))
    if not plans:
        raise ProvisioningError(f"{region} has no machine to try a launch on; name another one by --region")
    return min(plans, key=lambda plan: plan.price_usd_per_hour)
