"""Asks AWS for the prices of today and keeps them, dated, in the workspace.

Runs on request (`prefect deployment run refresh-prices`) and before machines are rented. Needs credentials that may
read prices; without them the bundled prices stay in use, and say how old they are.
"""

from __future__ import annotations

import sys

from prefect import flow

from flows.service.schedule import REFRESH_PRICES
from heterps_core.errors import ConfigurationError
from infra.prices.aws_prices import check_regions
from infra.workspace import Workspace
from tasks.prices import DEFAULT_HISTORY_DAYS, refresh_prices_of
from tasks.provisioning import REGION
from tasks.running.story import tell

DEFAULT_REGIONS = [REGION]
LONGEST_HISTORY_DAYS = 90
"""EC2 keeps spot prices for as long."""


def check_parameters(*, regions: list[str], history_days: int) -> None:
    """Check the parameters before AWS is asked.

    Raises:
        UnknownNameError: AWS has no such region.
        ConfigurationError: There is no region, or the history is too long.
    """
    if not regions:
        raise ConfigurationError("regions must name at least one region, for instance us-east-1")
    check_regions(regions)
    if not 1 <= history_days <= LONGEST_HISTORY_DAYS:
        raise ConfigurationError(
            f"history_days must be 1 to {LONGEST_HISTORY_DAYS}, as EC2 keeps spot prices, got {history_days}"
        )


@flow(name=REFRESH_PRICES)
def refresh_prices(regions: list[str] = DEFAULT_REGIONS, history_days: int = DEFAULT_HISTORY_DAYS) -> str:
    """Fetch on-demand prices, spot prices and sizes of all device types into the workspace.

    Args:
        regions: Regions of AWS.
        history_days: Days of spot prices that are looked at for interruptions.

    Returns:
        The file that was written.
    """
    check_parameters(regions=regions, history_days=history_days)
    written = refresh_prices_of(Workspace.locate().create(), regions=regions, history_days=history_days)
    for problem in written.refresh.problems:
        tell("kept", problem)
    tell("prices", written.summary)
    return str(written.path)


if __name__ == "__main__":
    from flows.command_line import main

    sys.exit(main(refresh_prices, program="python -m flows.refresh_prices", check=check_parameters))
