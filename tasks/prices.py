"""Prices for a run: their files and age, and a refresh of all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import InstanceOffer
from infra.inventory import OwnPrices, inventory_path, reserved_offers
from infra.prices.live_prices import LivePrices, Refresh, refresh
from infra.prices.price_catalogue import PriceCatalogue, newest_refreshed, write_refreshed
from infra.prices.region_rates import write_rates
from infra.providers import Provider, get_provider, provider_of
from infra.workspace import Workspace
from tasks.provisioning import find_offers
from tasks.steps import REPEATABLE, step

_REFRESH_AFTER = timedelta(hours=1)
"""Before a plan that rents machines, older prices are asked for again; caps and bill are by its prices."""

RENTED_AS = "local"
"""The provider whose prices stand for those of rented machines."""

logger = logging.getLogger(__name__)


def catalogue_of(workspace: Workspace, provider: str) -> PriceCatalogue:
    """Return the prices that plans for a provider use: its own file, and newer ones of the last refresh.

    Those of machines that are not rented stand in the inventory, and their device types are known afterwards.
    """
    chosen = get_provider(provider)
    if chosen.has_inventory:
        return PriceCatalogue((OwnPrices(path=inventory_path(workspace), kinds=chosen.kinds(workspace)),))
    listed, newest = chosen.price_file, newest_refreshed(workspace.price_folder)
    return PriceCatalogue((listed,) if newest is None else (listed, newest))


def offers_now(
    workspace: Workspace, provider: str, device_types: Sequence[str], *, regions: Sequence[str]
) -> tuple[dict[str, tuple[InstanceOffer, ...]], list[Path]]:
    """Return the offers of each region that carry device types, and the files of their prices.

    Old prices are refreshed before machines are rented, and zones are left out in which none can be launched.
    """
    _refresh_before_renting(workspace, provider, regions=regions)
    catalogue = catalogue_of(workspace, provider)
    offers = {}
    for region in regions:
        found = find_offers(device_types, catalogue=catalogue, region=region)
        own = get_provider(provider).has_inventory
        reserved = () if own else reserved_offers(workspace, catalogue, region=region)
        offers[region] = (*_in_reach(found, provider_of(workspace, provider, region=region)), *reserved)
    return offers, [file.path for file in catalogue.files if file.path.exists()]


def _in_reach(offers: tuple[InstanceOffer, ...], provider: Provider) -> tuple[InstanceOffer, ...]:
    """Return offers without those of zones in which no machine can be launched."""
    try:
        zones = provider.zones() if any(offer.zone for offer in offers) else None
    except ProvisioningError as problem:
        logger.warning("all zones are planned with: %s", problem)
        return offers
    return tuple(offer for offer in offers if zones is None or offer.zone in (None, *zones))


def device_types_of(workspace: Workspace, provider: str) -> list[str]:
    """Return the names of all device types that a provider may have."""
    chosen = get_provider(provider)
    if not chosen.has_inventory:
        return [*DEVICE_TYPES]
    return [each.name for kind in chosen.kinds(workspace) for each in kind.device_types()]


@step("refresh prices", **REPEATABLE)
def refresh_prices_of(
    workspace: Workspace, prices: type[LivePrices], *, regions: Sequence[str]
) -> tuple[Refresh, Path]:
    """Ask a cloud for the prices of all device types in some regions; return them and the file that has them now.

    Raises:
        ProvisioningError: No price is available; nothing was written.
    """
    now = datetime.now(UTC)
    newest = newest_refreshed(workspace.price_folder)
    families = {family for each in DEVICE_TYPES.values() for family in each.families}
    result = refresh(
        prices.with_own_clients(),
        () if newest is None else tuple(newest.offers()),
        regions=regions,
        families=families,
        now=now,
    )
    for problem in result.problems:
        logger.warning("some prices stay as old as they are: %s", problem)
    if result.num_new == 0:
        why = "; ".join(result.problems) or f"{prices.cloud} names none for {', '.join(regions)}"
        raise ProvisioningError(f"not one price could be refreshed, and those at hand stay in use: {why}")
    write_rates(workspace.price_folder, result.rates)
    return result, write_refreshed(workspace.price_folder, result.offers, at=now).path


def _refresh_before_renting(workspace: Workspace, provider: str, *, regions: Sequence[str]) -> None:
    """Refresh the prices of regions that are older than `_REFRESH_AFTER`; a failure is logged and ignored.

    Where the provider has no prices to ask for, nothing is done.
    """
    prices = get_provider(provider).live_prices
    if prices is None:
        return
    newest, now = newest_refreshed(workspace.price_folder), datetime.now(UTC)
    ages = dict.fromkeys(regions, _REFRESH_AFTER)
    for offer in () if newest is None else newest.offers():
        if offer.region in ages:
            ages[offer.region] = min(ages[offer.region], offer.price_age(now))
    regions = [region for region, age in ages.items() if age >= _REFRESH_AFTER]
    if not regions:
        return
    try:
        refresh_prices_of(workspace, prices, regions=regions)
    except ProvisioningError as problem:
        logger.warning("%s", problem)
