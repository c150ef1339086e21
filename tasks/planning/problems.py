"""From profiles and prices to the planning problem of a night."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from heterps_core.device_types import get_device_type
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import AWS, InstanceOffer
from heterps_core.models.model_graph import reserved_bytes
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.problem_builder import build_problem, unit_type
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel, UnitType
from heterps_core.planning.provisioning import offer_choice
from heterps_core.planning.search.optimum import find_optimum, may_have_plan
from heterps_core.training.job import DELAYED, default_update_mode
from infra.inventory import HERE
from infra.prices.service_charges import RATES, Rates
from tasks.planning.deadline import PlanningTime
from tasks.planning.extra_costs import job_extra_costs, pause_share, with_starts
from tasks.planning.table_disks import with_table_disks
from tasks.profiling import PlannedJob, ProfiledModel

_MAX_UNITS = (64, 256, 1_024)
"""Most units of a device type in a plan: the order of a new account's quota; more where no plan does with that."""


def make_problems(
    profiled: ProfiledModel,
    offers: Sequence[InstanceOffer],
    job: PlannedJob,
    *,
    device_types: Sequence[str],
    num_epochs: int,
    throughput_floor_samples_per_s: float,
    extra_costs: ExtraCosts | None = None,
    rates: Rates = RATES,
    update_mode: str | None = None,
    wire_dtype: str = "float32",
    most_units: Mapping[str, int] | None = None,
) -> list[SchedulingProblem]:
    """Return the planning problem of profiles, offers, a job, a floor and extra costs in each zone of a region.

    The step is the trainer's, which drains where updates are not delayed: without an update mode, in short runs.
    There is one problem where no price is of one zone alone. Units are as many as a plan needs, of a device type
    `most_units` at most. Tables may lie on
    disks where some unit cannot hold them.

    Raises:
        ProvisioningError: A device type is sold in no zone.
    """
    sold = offer_choice.unit_prices(offers)
    if not device_types:
        raise ProvisioningError(
            "no device type is sold there that has a machine image and a quota (heterps doctor says how)"
        )
    for name in device_types:
        if name not in sold:
            offer_choice.instance_sizes(name, offers)  # says what is sold
    update_mode = update_mode or default_update_mode(job.num_samples * num_epochs / job.batch_size)
    extra_costs = extra_costs or job_extra_costs(profiled.planned_graph)
    if offers[0].cloud == HERE:
        # All stages share this machine, at its price once.
        extra_costs = replace(extra_costs, machine_usd_per_hour=offers[0].price_usd_per_hour)
        offers = [replace(offer, price_usd_per_hour=0.0) for offer in offers]
    problems = []
    for zone in offer_choice.zones_of(offers):
        in_zone = offer_choice.offers_in_zone(offers, zone)
        units = _units(profiled, job, in_zone, device_types, wire_dtype=wire_dtype)
        in_memory = build_problem(
            profiled.planned_graph,
            profiled.profiles,
            units,
            batch_size=job.batch_size,
            num_samples=job.num_samples,
            num_epochs=num_epochs,
            throughput_floor_samples_per_s=throughput_floor_samples_per_s,
            extra_costs=extra_costs,
            step_model=StepModel.TRAINER,
            pause_share=pause_share(job.evaluated_share / num_epochs),
            drains=update_mode != DELAYED,
            wire_dtype=wire_dtype,
            decoded_share=job.decoded_share,
        )
        # Tables with dynamic ids are in memory.
        is_in_memory = profiled.planned_request.features.dynamic_ids is not None
        problem = (
            in_memory if is_in_memory else with_table_disks(in_memory, profiled.planned_graph, in_zone, rates)
        )
        if offers[0].cloud == AWS:
            problem = with_starts(problem, profiled.planned_graph, starts_from_model=job.starts_from_model)
        caps = {
            name: min(offer_choice.most_units(name, in_zone), (most_units or {}).get(name, math.inf))
            for name in problem.device_types
        }
        problems.append(with_enough_units(problem, caps))
    return problems


def problem_of_cheapest_zone(
    problems: Sequence[SchedulingProblem], planning_time: PlanningTime | None = None
) -> SchedulingProblem:
    """Return the problem of the zone with the cheapest plan.

    The proofs of the zones share the planning time with one more, that of the plan itself.

    Raises:
        InfeasiblePlanError: A zone has no plan.
    """
    if len(problems) == 1:
        return problems[0]
    planning_time = planning_time or PlanningTime()
    costs_usd = [
        find_optimum(problem, seconds=planning_time.share(len(problems) + 1 - index)).cost_usd
        for index, problem in enumerate(problems)
    ]
    return problems[costs_usd.index(min(costs_usd))]


def with_enough_units(problem: SchedulingProblem, caps: Mapping[str, float]) -> SchedulingProblem:
    """Return the problem with the least of `_MAX_UNITS` for each device type that some plan keeps, or the most.

    No device type has more than its cap, where it has one. Where that leaves a type with fewer, stages may have two:
    elsewhere more units of one type cost no more.
    """
    for most in _MAX_UNITS:
        units = {
            name: replace(
                unit,
                max_units=int(
                    min(-(-most // unit.machine_units) * unit.machine_units, caps.get(name, math.inf))
                ),
            )
            for name, unit in problem.device_types.items()
        }
        problem = replace(problem, device_types=units)
        if may_have_plan(problem):
            break
    is_limited = any(unit.max_units == caps.get(name) for name, unit in problem.device_types.items())
    may_mix = problem.step_model is StepModel.TRAINER and not problem.drains and len(problem.device_types) > 1
    return replace(problem, mixes_device_types=is_limited and may_mix)


def _units(
    profiled: ProfiledModel,
    job: PlannedJob,
    offers: Sequence[InstanceOffer],
    device_types: Sequence[str],
    *,
    wire_dtype: str,
) -> dict[str, UnitType]:
    """Return the device types that are sold in a zone as units of a planning problem."""
    graph, prices = profiled.planned_graph, offer_choice.unit_prices(offers)
    by_family = offer_choice.by_family(offers)
    units = {}
    for name in device_types:
        if name not in prices:
            continue
        device_type = get_device_type(name)
        carriers = [offer for family in device_type.instance_families for offer in by_family[family]]
        sizes = offer_choice.instance_sizes(name, carriers)
        units[name] = unit_type(
            graph,
            profiled.profiles[name],
            device_type,
            batch_size=job.batch_size,
            instances=sizes,
            on_demand_instances=offer_choice.on_demand_sizes(name, carriers),
            interruptions_per_hour=offer_choice.interruptions_per_unit(name, carriers),
            price_usd_per_hour=prices[name],
            max_units=_MAX_UNITS[0],
            reserved=offer_choice.reserved_of(name, carriers),
            # Where machines are counted there is one size; stages share this machine.
            machine_units=sizes[0].units
            if carriers[0].count is not None and carriers[0].cloud not in (AWS, HERE)
            else 1,
            step_model=StepModel.TRAINER,
            wire_dtype=wire_dtype,
            decoded_share=job.decoded_share,
            reserved_bytes=reserved_bytes(
                device_type,
                graph,
                batch_size=job.batch_size,
                num_samples=job.num_samples,
                units_per_host=min(size.units for size in sizes),
            ),
        )
    return units
