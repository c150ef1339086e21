"""From a plan in units to instances in USD: offers, the instances to buy, and the caps that refuse them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.hardware import InstanceOffer, Market, get_device_type
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage
from heterps_core.provisioning.offer_choice import choose_instances
from heterps_core.units import SECONDS_PER_HOUR
from infra.caps import Caps, check_caps
from infra.catalogue.price_catalogue import BUNDLED_SNAPSHOT, PriceCatalogue
from infra.providers.local import rehearsal_replicas

REGION = "us-east-1"
"""Of the bundled prices."""

LOCAL_PROVIDER = "local"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provisioning:
    """What the plan would buy, and what this run launches."""

    cloud_plan: ProvisioningPlan
    """Instances for the whole plan."""

    launch_plan: ProvisioningPlan
    """The same, or its rehearsal with as many replicas as this machine has cores."""

    launch_stages: tuple[Stage, ...]
    """The plan's stages with the replicas of `launch_plan`."""

    predicted_cost_usd: float
    """The plan's, with all that it is charged for: what the caps are held against."""

    is_rehearsal: bool

    @property
    def summary(self) -> str:
        """What is bought and launched, in one line."""
        bought = " + ".join(
            f"{group.count} x {group.offer.instance_type.name}" for group in self.cloud_plan.groups
        )
        price = f"{bought} would cost" if self.is_rehearsal else f"{bought} cost"
        launched = sum(stage.num_replicas for stage in self.launch_stages)
        rehearsed = f"; rehearsed by {launched} processes on this machine" if self.is_rehearsal else ""
        return f"{price} {self.cloud_plan.price_usd_per_hour:.4f} USD/hour{rehearsed}"


@task(name="find offers", cache_policy=NO_CACHE)
def find_offers(device_types: Sequence[str]) -> tuple[InstanceOffer, ...]:
    """Return the on-demand offers that carry the device types, from the bundled price file.

    Raises:
        UnknownNameError: A device type is in no table.
    """
    families = {family for name in device_types for family in get_device_type(name).instance_families}
    return PriceCatalogue().offers(region=REGION, market=Market.ON_DEMAND, families=families)


@task(name="provision", cache_policy=NO_CACHE)
def provision(
    plan: SchedulingPlan,
    offers: Sequence[InstanceOffer],
    *,
    provider: str,
    caps: Caps,
) -> Provisioning:
    """Choose the instances of a plan, and refuse them where they exceed a cap.

    The caps are held against the plan itself also where only its rehearsal is launched, so that a
    rehearsal answers whether the real run would be allowed.

    Raises:
        BudgetExceededError: By how much a cap is exceeded; nothing was launched.
        ProvisioningError: No offer carries what the plan asks for.
    """
    cloud_plan = choose_instances(plan.stages, offers)
    check_caps(
        price_usd_per_hour=cloud_plan.price_usd_per_hour,
        predicted_cost_usd=plan.cost_usd,
        caps=caps,
    )
    is_rehearsal = provider == LOCAL_PROVIDER
    stages = rehearsal_stages(plan.stages, num_cores=num_cores()) if is_rehearsal else plan.stages
    launch_plan = choose_instances(stages, offers) if is_rehearsal else cloud_plan
    _warn_of_old_prices(launch_plan)
    return Provisioning(
        cloud_plan=cloud_plan,
        launch_plan=launch_plan,
        launch_stages=stages,
        predicted_cost_usd=plan.cost_usd,
        is_rehearsal=is_rehearsal,
    )


def rehearsal_stages(stages: Sequence[Stage], *, num_cores: int) -> tuple[Stage, ...]:
    """Return the same stages with replicas in proportion, as many as the cores allow.

    Example:
        >>> rehearsal_stages([Stage(0, 0, "cpu-c7i", 9), Stage(1, 3, "gpu-t4", 1)], num_cores=3)
        (Stage(first_layer=0, last_layer=0, device_type='cpu-c7i', num_replicas=2), \
Stage(first_layer=1, last_layer=3, device_type='gpu-t4', num_replicas=1))
    """
    replicas = rehearsal_replicas([stage.num_replicas for stage in stages], num_cores=num_cores)
    return tuple(replace(stage, num_replicas=count) for stage, count in zip(stages, replicas, strict=True))


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _warn_of_old_prices(plan: ProvisioningPlan) -> None:
    now = datetime.now(UTC)
    age = max(group.offer.price_age(now) for group in plan.groups)
    logger.info("prices are %d days old: %s", age.days, BUNDLED_SNAPSHOT.source)


def usd_for(price_usd_per_hour: float, seconds: float) -> float:
    """Return what machines at a price cost in some seconds."""
    return price_usd_per_hour * seconds / SECONDS_PER_HOUR
