"""Asks AWS for the prices of today and keeps them, dated, in the workspace.

Runs on request (`heterps refresh-prices`) and before machines are rented. Needs credentials that may
read prices; without them the bundled prices stay in use, and say how old they are.
"""

from __future__ import annotations

import sys

from flows.parameters import PriceParameters

if __name__ == "__main__":
    # Before Prefect is loaded, so that --help and a wrong value are answered at once.
    from flows.command_line import main

    sys.exit(main("flows.refresh_prices", PriceParameters))

from prefect import flow

from flows.parameter_model import takes
from flows.service.schedule import REFRESH_PRICES
from infra.providers.aws.prices import AwsPrices
from infra.workspace import Workspace
from tasks.prices import refresh_prices_of
from tasks.running.progress import log_step


@flow(name=REFRESH_PRICES, validate_parameters=False)
@takes(PriceParameters)
def refresh_prices(asked: PriceParameters) -> str:
    """Fetch on-demand prices, spot prices and sizes of all device types into the workspace.

    Returns:
        The file that was written.
    """
    workspace = Workspace.locate().create()
    regions = AwsPrices.regions_named(asked.regions)
    refreshed, path = refresh_prices_of(workspace, AwsPrices, regions=regions)
    for problem in refreshed.problems:
        log_step("kept", problem)
    kept = f", {refreshed.num_kept:,} kept with their age" if refreshed.num_kept else ""
    log_step("prices", f"{refreshed.num_new:,} new prices{kept}; {path}")
    return str(path)
