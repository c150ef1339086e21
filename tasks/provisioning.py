"""From a plan in units to instances in USD: offers, the instances to buy, and the caps that refuse them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from heterps_core.device_types import DEVICE_TYPES, get_device_type
from heterps_core.errors import ConfigurationError, InfeasiblePlanError, ProvisioningError
from heterps_core.hardware import ARCHITECTURES, InstanceOffer, Market, hardware_name
from heterps_core.machine import num_cores
from heterps_core.planning.cost_model.evaluation import PlanEvaluation
from heterps_core.planning.provisioning.failover import launch_attempts
from heterps_core.planning.provisioning.offer_choice import choose_instances, instance_sizes, unit_prices
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage, dry_run_stages
from heterps_core.units import SECONDS_PER_HOUR, ratio
from infra.billing.caps import Caps, Spent
from infra.inventory import HERE
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT, PriceCatalogue, age_text, warn_of_old_prices
from infra.prices.service_charges import RATES, Rates
from infra.prices.spot_charges import with_interruptions
from infra.providers import Provider, get_provider
from infra.providers.base import REGION
from tasks.planning.extra_costs import STARTUP_SECONDS, TEARDOWN_SECONDS, planned_bucket_usd
from tasks.planning.table_disks import NO_DISKS, ReplicaDisk, offers_with_disks, with_table_disk
from tasks.steps import step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provisioning:
    """The purchase of a plan, and the launch of this run."""

    cloud_plan: ProvisioningPlan
    """Instances for the whole plan."""

    launch_plan: ProvisioningPlan
    """The same, or its dry run with as many replicas as this machine has cores."""

    launch_stages: tuple[Stage, ...]
    """The plan's stages with the replicas of `launch_plan`."""

    predicted_cost_usd: float
    """Cost of the plan with disks and addresses, which is compared with the caps."""

    is_dry_run: bool
    machines_text: str = Provider.machines_text
    """Where it is trained, for reports."""

    runs_here: bool = True
    """Its nodes are processes of this machine."""

    bucket_usd: float = 0.0
    """Cost of the run's bucket and of traffic out of its region; counts against the caps from the start."""

    price_files: tuple[Path, ...] = (BUNDLED_SNAPSHOT.path,)
    """Where the prices were read from."""

    fallback_plans: tuple[ProvisioningPlan, ...] = ()
    """Tried in order if `launch_plan` is not available; within the caps."""

    @property
    def plans(self) -> tuple[ProvisioningPlan, ...]:
        """The plan to launch and its fallbacks, in the order in which they are tried."""
        return (self.launch_plan, *self.fallback_plans)

    @property
    def region(self) -> str:
        """Where its machines are."""
        return self.cloud_plan.groups[0].offer.region

    @property
    def price_age(self) -> str:
        """How old the prices of the plan are now; those of an inventory have no age."""
        offers = [group.offer for group in self.cloud_plan.groups]
        dated = [offer for offer in offers if offer.count is None]
        return age_text(dated, now=datetime.now(UTC)) if dated else f"price of {offers[0].price_source}"

    @property
    def summary(self) -> str:
        """What is bought and launched, in one line."""
        bucket = f", and {self.bucket_usd:.2g} USD for its bucket" if self.bucket_usd else ""
        price = f"{self.cloud_plan.machines} {'would cost' if self.is_dry_run else 'cost'}"
        launched = sum(stage.num_replicas for stage in self.launch_stages)
        trained_here = (
            f"; trained in a dry run by {launched} process{'es' * (launched > 1)} on this machine"
            if self.is_dry_run
            else ""
        )
        return (
            f"{price} {self.cloud_plan.price_usd_per_hour:.4f} USD/hour ({self.price_age}{self._spot_text})"
            f"{self._volume_text}{bucket}{trained_here}"
        )

    @property
    def _volume_text(self) -> str:
        disks = Counter(request.table_disk for request in self.cloud_plan.node_requests())
        texts = [f"{disk} on {count} of the machines" for disk, count in disks.items() if disk is not None]
        return f", and {self.cloud_plan.disk_usd_per_hour:.4f} for {' and '.join(texts)}" if texts else ""

    @property
    def _spot_text(self) -> str:
        plan = self.cloud_plan
        if plan.interruptions_per_hour == 0:
            return ""
        steady = plan.rendezvous_usd_per_hour
        kept = f", {steady:.4f} of it for the one machine on-demand" if steady > 0 else ""
        return f"{kept}, {plan.interruptions_per_hour:.2g} interruptions an hour expected"


def sold_types(device_types: Sequence[str], offers: Sequence[InstanceOffer]) -> list[str]:
    """Return the device types that have an offer."""
    prices = unit_prices(offers)
    return [name for name in device_types if name in prices]


def check_offers(
    device_types: Sequence[str], *, catalogue: PriceCatalogue, region: str, is_each_sold: bool = True
) -> None:
    """Check that each device type is sold in its market of a region, before anything is measured for it.

    Args:
        is_each_sold: Otherwise it is enough that the region has prices of the markets.

    Raises:
        UnknownNameError: There are no prices for the region, or there is no such device type.
        ConfigurationError: There are no prices for a market, or a device type is not sold.
    """
    try:
        offers = find_offers.fn(device_types, catalogue=catalogue, region=region)
        for name in device_types if is_each_sold else ():
            instance_sizes(name, offers)
    except ProvisioningError as error:
        # Nothing was asked of a provider yet: it is the parameters that cannot be used.
        raise ConfigurationError(str(error)) from error


def not_rentable(provider: Provider, *, is_one_of_several: bool = False) -> dict[str, str]:
    """Return the device types that no machine image of a provider boots, and how to make or name one.

    Without an answer images of x86_64 are assumed. An account without any image is not set up yet: all types are
    rentable in its plans, and its launch is refused. A region without any has none where it is one of several.
    """
    try:
        missing = provider.missing_images()
    except ProvisioningError as problem:
        logger.warning("only %s machines are planned with: %s", ARCHITECTURES[0], problem)
        missing = dict.fromkeys(ARCHITECTURES[1:], str(problem))
    if missing.keys() == set(ARCHITECTURES) and not is_one_of_several:
        return {}
    return {
        name: missing[each.architecture]
        for name, each in DEVICE_TYPES.items()
        if each.architecture in missing
    }


def check_rentable(device_types: Sequence[str], *, provider: Provider) -> None:
    """Check that an image boots the machines of device types, before anything is measured for them.

    Raises:
        ConfigurationError: No image boots one; with the commands that make or copy an image.
    """
    others = [name for name in device_types if get_device_type(name).architecture != ARCHITECTURES[0]]
    refused = not_rentable(provider) if others else {}
    for name in map(hardware_name, others):
        if name in refused:
            raise ConfigurationError(f"{name} cannot be rented: {refused[name]}, or leave {name} out")


@step("find offers")
def find_offers(
    device_types: Sequence[str], *, catalogue: PriceCatalogue | None = None, region: str = REGION
) -> tuple[InstanceOffer, ...]:
    """Return the offers that carry the device types, in the markets in which these are bought.

    Equally fast families are among them, and where something is on spot, on-demand offers too: one machine of each
    plan is bought on-demand.

    Args:
        device_types: Names; those that end with -spot are bought there.
        catalogue: The cloud of its first file counts; None for the bundled prices.

    Raises:
        UnknownNameError: A device type is in no table, or there are no prices for the region.
        ProvisioningError: There are no prices for a market.
    """
    catalogue = catalogue or PriceCatalogue()
    hardware = [get_device_type(name) for name in device_types]
    families = {family for each in hardware for family in each.families}
    markets = dict.fromkeys([Market.ON_DEMAND, *(each.market for each in hardware)])
    offers = [
        offer
        for market in markets
        for offer in catalogue.offers(region=region, market=market)
        if offer.instance_type.family in families and not offer.instance_type.is_metal
    ]
    return tuple(with_interruptions(offers))


@step("provision")
def provision(
    plan: SchedulingPlan,
    offers: Sequence[InstanceOffer],
    *,
    provider: str,
    caps: Caps,
    spent_this_month_usd: float = 0.0,
    price_files: Sequence[Path] = (BUNDLED_SNAPSHOT.path,),
    state_bytes: float = 0.0,
    disks: Mapping[int, ReplicaDisk] = NO_DISKS,
    fixed_usd: float = 0.0,
    free_hours: float = 0.0,
    rates: Rates = RATES,
) -> Provisioning:
    """Choose the instances of a plan, and refuse them where they exceed a cap.

    The caps are held against the plan itself also where only its dry run is launched, so that a
    dry run answers whether the real run would be allowed. On rented machines they count what the bucket will be
    asked too, by `state_bytes` of the model with its optimizers' state. Instances have room for the
    rows of tables that replicas keep on `disks`, by stage.

    Args:
        fixed_usd: Part of the plan's cost that does not grow with its hours.
        free_hours: Hours of a plan at no price (reserved machines alone), charged for disks and addresses.
        rates: Prices of services in the region.

    Raises:
        BudgetExceededError: By how much a cap is exceeded; nothing was launched.
        ProvisioningError: No offer carries what the plan asks for.
    """
    offers = offers_with_disks(offers, disks.values())
    attempts = [
        _shared(with_table_disk(each, disks, rates=rates)) for each in launch_attempts(plan.stages, offers)
    ]
    cloud_plan = attempts[0]
    hours = ratio(plan.cost_usd - fixed_usd, plan.price_usd_per_hour, otherwise=free_hours)
    rented_from = get_provider(provider)
    unplanned_usd_per_hour = rented_from.billed_usd_per_hour(cloud_plan) - plan.price_usd_per_hour
    predicted_cost_usd = plan.cost_usd + unplanned_usd_per_hour * hours
    if rented_from.has_inventory:
        # An hour of theirs counts a little more in plans; see `OWN_HOUR_USD`.
        predicted_cost_usd = cloud_plan.price_usd_per_hour * hours
    bucket_usd = 0.0
    if rented_from.charges_services:
        bucket_usd = planned_bucket_usd(
            state_bytes=state_bytes,
            hours=hours,
            leaves_region=not rented_from.is_beside_store(),
            rates=rates,
        )
    billed, spent = rented_from.billed_usd_per_hour, Spent(month_usd=spent_this_month_usd)
    cloud_plan, *fallbacks = _within_caps(attempts, caps, billed, spent, predicted_cost_usd, bucket_usd)
    warn_of_old_prices([group.offer for group in cloud_plan.groups], now=datetime.now(UTC))
    is_dry_run = rented_from.is_dry_run
    stages = dry_run_stages(plan.stages, num_cores=num_cores()) if is_dry_run else plan.stages
    return Provisioning(
        cloud_plan=cloud_plan,
        launch_plan=choose_instances(stages, offers) if is_dry_run else cloud_plan,
        launch_stages=stages,
        predicted_cost_usd=predicted_cost_usd,
        is_dry_run=is_dry_run,
        machines_text=rented_from.machines_text,
        runs_here=rented_from.runs_here,
        price_files=tuple(price_files),
        fallback_plans=() if is_dry_run else tuple(fallbacks),
        bucket_usd=bucket_usd,
    )


def _shared(plan: ProvisioningPlan) -> ProvisioningPlan:
    """Return a plan whose stages share the price of this machine, if they stand on it."""
    if plan.groups[0].offer.cloud != HERE:
        return plan
    usd_per_hour = plan.groups[0].offer.price_usd_per_hour / len(plan.groups)
    offers = (replace(group.offer, price_usd_per_hour=usd_per_hour) for group in plan.groups)
    groups = (replace(group, offer=offer) for group, offer in zip(plan.groups, offers, strict=True))
    return replace(plan, groups=tuple(groups))


def check_lifetime(evaluation: PlanEvaluation, *, provider: str) -> None:
    """Check that a night is over before its nodes end themselves.

    A dry run trains for minutes, however long the night takes that it stands for.

    Raises:
        InfeasiblePlanError: It would be paid for until then and not come to its end; with the fix.
    """
    overhead_s = STARTUP_SECONDS + TEARDOWN_SECONDS + evaluation.start_seconds
    seconds = evaluation.run_seconds + overhead_s
    rented_from = get_provider(provider)
    lifetime_s = rented_from.lifetime_s
    if rented_from.is_dry_run or seconds <= lifetime_s:
        return
    floor = evaluation.throughput_samples_per_s * evaluation.run_seconds / (lifetime_s - overhead_s)
    raise InfeasiblePlanError(
        "lifetime of its machines",
        f"nodes end themselves after {lifetime_s / SECONDS_PER_HOUR:.1f} hours, but the plan takes "
        f"{seconds / SECONDS_PER_HOUR:.1f} hours with {overhead_s:.0f} s to start and end; nothing was launched. Set "
        f"throughput_floor_samples_per_s to {math.ceil(floor):,} or more, or ready_by to an earlier time, or train "
        f"on fewer samples or epochs",
    )


def _within_caps(
    plans: Sequence[ProvisioningPlan],
    caps: Caps,
    billed_usd_per_hour: Callable[[ProvisioningPlan], float],
    spent: Spent,
    predicted_cost_usd: float,
    bucket_usd: float,
) -> list[ProvisioningPlan]:
    """Return purchases without those beyond a cap, and without alternatives that would bring them beyond it.

    Args:
        plans: In the order in which they are tried.
        predicted_cost_usd: Of the first, without its bucket.

    Raises:
        BudgetExceededError: The first is beyond a cap, by how much.
    """
    first, *others = plans
    caps.check(
        price_usd_per_hour=billed_usd_per_hour(first),
        predicted_cost_usd=predicted_cost_usd + bucket_usd,
        spent=spent,
    )
    hours = ratio(predicted_cost_usd, billed_usd_per_hour(first), otherwise=0.0)
    limits = [caps.max_usd_per_hour]
    if caps.max_usd_per_run is not None:
        limits.append(ratio(caps.max_usd_per_run - bucket_usd, hours, otherwise=math.inf))
    if caps.max_usd_per_month is not None:
        left_usd = caps.max_usd_per_month - spent.month_usd - bucket_usd
        limits.append(ratio(left_usd, hours, otherwise=math.inf))
    limit = min((each for each in limits if each is not None), default=None)
    if limit is None:
        return [first, *others]
    allowed = [first, *(plan for plan in others if billed_usd_per_hour(plan) <= limit)]
    return [
        plan.within_price(limit - (billed_usd_per_hour(plan) - plan.price_usd_per_hour)) for plan in allowed
    ]


def usd_for(price_usd_per_hour: float, seconds: float) -> float:
    """Return the cost of machines at a price in some seconds."""
    return price_usd_per_hour * seconds / SECONDS_PER_HOUR
