"""Where a launch turns when it fails: the order of attempts, as plain logic.

Trying the same dry pool again and again costs a night. Within one attempt a group may be launched as any of its
alternatives; after it comes the next zone; after the zones the same plan on-demand, where nothing is lost again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from heterps_core.device_types import get_device_type
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.planning.provisioning.offer_choice import instances_by_zone, offers_in_zone
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage

MAX_ZONES = 3
"""Zones that are tried with spot, and again on-demand."""


def launch_attempts(stages: Sequence[Stage], offers: Iterable[InstanceOffer]) -> tuple[ProvisioningPlan, ...]:
    """Return the purchases to try for a plan, in order: its zones by price, then the same zones on-demand.

    Raises:
        UnknownNameError: A stage names a device type that is in no table.
        ProvisioningError: No zone has all that the plan needs.
    """
    offers = tuple(offers)
    by_zone = instances_by_zone(stages, offers)[:MAX_ZONES]
    names = [name for stage in stages for name in stage.replicas_by_type]
    if not any(get_device_type(name).market is Market.SPOT for name in names):
        return by_zone
    return (*by_zone, *_on_demand_in(by_zone, stages, offers))


def _on_demand_in(
    plans: Sequence[ProvisioningPlan], stages: Sequence[Stage], offers: Sequence[InstanceOffer]
) -> tuple[ProvisioningPlan, ...]:
    """Return what is bought on-demand in the zones of some plans, without those that do not sell all of it."""

    def steady_name(name: str) -> str:
        return get_device_type(name).in_market(Market.ON_DEMAND).name

    steady, planned = [], []
    for stage in stages:
        names: dict[str, str] = {}
        counts = Counter[str]()
        for name, number in stage.replicas_by_type.items():
            names.setdefault(steady_name(name), name)
            counts[steady_name(name)] += number
        planned.append(names)
        steady.append(stage.on(counts))
    on_demand = [offer for offer in offers if offer.market is Market.ON_DEMAND]
    found = []
    for plan in plans:
        zone = plan.groups[0].offer.zone
        try:
            [bought, *_] = instances_by_zone(steady, offers_in_zone(on_demand, zone))
        except ProvisioningError:
            continue
        # The job knows its stages by the names that they were planned with.
        groups = tuple(
            replace(group, device_type=planned[group.stage][group.device_type]) for group in bought.groups
        )
        found.append(replace(bought, groups=groups))
    return tuple(found)
