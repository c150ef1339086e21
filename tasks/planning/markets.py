"""In which markets a run may buy: those that were asked for, without spot once it has been lost too often."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from heterps_core.device_types import in_markets
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from infra.providers import get_provider
from infra.workspace import Workspace
from tasks.running.interruptions import num_spot_losses

logger = logging.getLogger(__name__)

MAX_SPOT_LOSSES = 2
"""With so many interruptions in a run the rest of it is bought on-demand."""


def check_markets(*, provider: str, region: str) -> None:
    """Check what is to be bought where, before any work.

    Raises:
        ConfigurationError: Machines are rented that another region sells.
    """
    rented_from = get_provider(provider)
    if rented_from.charges_money and region != rented_from.region:
        raise ConfigurationError(
            f"the provider {provider} rents in {rented_from.region}, got the region {region}; plan with its prices "
            f"by a provider that charges nothing, or leave it out"
        )


def device_types_to_buy(
    workspace: Workspace, device_types: Sequence[str], markets: Sequence[str], *, run_id: str
) -> list[str]:
    """Return the device types in the markets that a run may still buy in.

    Raises:
        UnknownNameError: A device type is in no table.
    """
    losses = num_spot_losses(workspace, run_id)
    asked = [Market(market) for market in markets]
    allowed = asked if losses < MAX_SPOT_LOSSES else [Market.ON_DEMAND]
    if losses and set(allowed) != set(asked):
        logger.warning("run %s has lost %d spot instances: the rest is bought on-demand", run_id, losses)
    return in_markets(device_types, allowed)
