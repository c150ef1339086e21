"""A provider that nothing in the product knows: processes of this machine that cost money, in a region of its own.

Run as a program it is `train-ctr` with one more line in the registry, which is all that a further provider takes.
"""

import sys
from dataclasses import replace
from pathlib import Path

from infra.prices.live_prices import LivePrices
from infra.providers import PROVIDERS
from infra.providers.local import LocalProvider
from tests.infra.builders import offer

PLACE = "pretend-north"
LISTED_USD_PER_HOUR, USD_PER_HOUR = 1.8, 3.6
"""A day ago, and now."""

OFFER = replace(offer(region=PLACE, price_usd_per_hour=LISTED_USD_PER_HOUR), cloud="pretend")


class PretendFile:
    """Its price list."""

    path = Path(__file__)

    def offers(self):
        yield OFFER


class PretendPrices(LivePrices):
    """Answers that everything has become more expensive."""

    cloud = "pretend"
    on_demand_source = "the pretend price list of now"
    spot_source = "none"

    @classmethod
    def with_own_clients(cls):
        return cls()

    @staticmethod
    def regions_named(patterns):
        assert set(patterns) == {PLACE}
        return [PLACE]

    def on_demand(self, region, *, instance_type=None):
        return {OFFER.instance_type.name: USD_PER_HOUR}

    def spot(self, region, instance_types, *, since):
        return {}

    def sizes(self, region, families):
        return {OFFER.instance_type.name: OFFER.instance_type}


class PretendProvider(LocalProvider):
    """Looks after the machines of one region, and rents them for money."""

    name = "pretend"
    is_dry_run = False
    machines_text = "rented machines"
    has_regions = True
    region = PLACE
    minimum_billed_s = 30.0
    price_file = PretendFile()
    live_prices = PretendPrices

    @classmethod
    def for_workspace(cls, workspace, *, region):
        return cls(workspace.leases_directory.with_name("pretend") / region)

    def looks_after(self, entry):
        return super().looks_after(entry) and entry.region == self.state_directory.name


if __name__ == "__main__":
    PROVIDERS[PretendProvider.name] = PretendProvider

    from flows.command_line import main
    from flows.parameters import TrainParameters

    sys.exit(main("flows.train_ctr", TrainParameters))
