"""`heterps offers`: what can be bought for each device type, where, for how much, and how old each price is."""

from __future__ import annotations

import argparse
import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from heterps_core.device_types import DEVICE_TYPES, get_device_type
from heterps_core.errors import UnknownNameError
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.text_table import Table
from infra.prices.interruptions import with_interruptions
from infra.prices.price_age import age_text
from infra.prices.price_catalogue import PriceCatalogue
from infra.workspace import Workspace

HELP = """\
Show what can be bought for device types, the cheapest unit first: of AWS from the bundled prices and those of
refresh-prices, or of another cloud from a catalogue in SkyPilot's format.

The name of a catalogue says its cloud and date (gcp_vms_2026-05-20.csv.gz), or --cloud and --as-of do.
Interruptions of spot are counted or assumed; --json says which.

examples:
  heterps offers
  heterps offers --device-types cpu-c7i gpu-t4-spot
  heterps offers --catalogue gcp_vms_2026-05-20.csv.gz --region us-central1
  heterps offers --catalogue azure/vms.csv --cloud azure --as-of 2026-05-20 --limit 40 --json

exit status: 0; 2 where a file, a region or a name is not known; 5 where nothing is sold.
"""

DEFAULT_LIMIT = 3

OfferRow: TypeAlias = tuple[str, int, InstanceOffer]
"""Device type, units, offer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="prices in SkyPilot's format")
    parser.add_argument("--cloud", metavar="NAME", help="of the catalogue, where its name does not say it")
    parser.add_argument("--as-of", metavar="DATE", help="of the catalogue, where its name does not say it")
    parser.add_argument("--region", metavar="NAME", help="only this region")
    parser.add_argument("--device-types", nargs="+", metavar="NAME", help="only these; with -spot for spot")
    parser.add_argument(
        "--limit",
        type=int,
        default=DEFAULT_LIMIT,
        metavar="N",
        help="lines for each device type (default: 3)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Print the offers.

    Raises:
        ConfigurationError: A file cannot be read, or does not say cloud and date.
        UnknownNameError: The region or a device type is not known.
    """
    from tasks.prices import named_price_file, price_files

    files = (
        price_files(Workspace.locate())
        if options.catalogue is None
        else (named_price_file(options.catalogue, cloud=options.cloud, as_of=options.as_of),)
    )
    catalogue = PriceCatalogue(files)
    offers = catalogue.all_offers()
    if options.region is not None:
        regions = sorted({offer.region for offer in offers})
        if options.region not in regions:
            raise UnknownNameError("region with prices", options.region, regions)
        offers = [offer for offer in offers if offer.region == options.region]
    names = options.device_types or [
        DEVICE_TYPES[name].in_market(market).name for name in DEVICE_TYPES for market in Market
    ]
    rows = unit_rows(names, with_interruptions(offers))
    print(
        json.dumps([_as_json(row) for row in rows], indent=1)
        if options.json
        else _as_text(rows, options.limit)
    )


def unit_rows(device_types: list[str], offers: list[InstanceOffer]) -> list[OfferRow]:
    """Return device type, units and offer for all that is sold of some device types, the cheapest unit first.

    Raises:
        UnknownNameError: A device type is in no table.
    """
    rows = [
        (hardware.name, units, offer)
        for hardware in map(get_device_type, device_types)
        for offer in offers
        if (units := hardware.units_in(offer)) > 0
    ]
    order = {name: index for index, name in enumerate(device_types)}
    return sorted(rows, key=lambda row: (order[row[0]], row[2].price_usd_per_hour / row[1], row[2].place))


def _as_text(rows: list[OfferRow], limit: int) -> str:
    now = datetime.now(UTC)
    columns = {
        "device type": "",
        "instance": "",
        "units": "d",
        "where": "",
        "USD/hour": ".4f",
        "USD/unit-hour": ".4f",
        "interruptions/h": ".3g",
        "price of": "s",
    }
    shown = [
        [
            name,
            offer.instance_type.name,
            units,
            f"{offer.cloud} {offer.place}",
            offer.price_usd_per_hour,
            offer.price_usd_per_hour / units,
            offer.interruptions_per_hour if offer.market is Market.SPOT else None,
            offer.price_as_of[:10],
        ]
        for name, units, offer in _first_of_each(rows, limit)
    ]
    if not rows:
        return "nothing is sold for these device types"
    sources = sorted({offer.price_source for _, _, offer in rows})
    return "\n".join(
        [
            *Table(columns=columns, rows=shown).lines(),
            *(
                [f"  {left:,} more: --limit, --region or --device-types"]
                if (left := len(rows) - len(shown))
                else []
            ),
            f"  {age_text((offer for _, _, offer in rows), now=now)}: {'; '.join(sources)}",
        ]
    )


def _first_of_each(rows: list[OfferRow], limit: int) -> list[OfferRow]:
    by_type = itertools.groupby(rows, key=lambda row: row[0])
    return [row for _, same in by_type for row in itertools.islice(same, limit)]


def _as_json(row: OfferRow) -> dict[str, object]:
    name, units, offer = row
    return {"device_type": name, "units": units, **offer.to_json()}
