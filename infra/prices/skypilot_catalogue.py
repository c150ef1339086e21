"""Reads price catalogues in SkyPilot's format: the prices of other clouds, for planning.

One CSV file a cloud, whose columns come in any order. Google sells most cards apart from their hosts, and so do its
rows: the price of an accelerator stands alone, and both are added here. A price of 0 and an empty one are
no prices. There is no figure for the network in these files, so offers have 0, which stands for unknown.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.units import BYTES_PER_GIB, BYTES_PER_MIB
from infra.prices.interruptions import with_interruptions
from infra.prices.price_catalogue import offer_key
from infra.prices.price_file import csv_rows, date_in_name

COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Price", "Region")

HOSTS_OF_CARDS: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("L4", 1): tuple(f"g2-standard-{vcpus}" for vcpus in (4, 8, 12, 16, 32)),
    **{("L4", count): (f"g2-standard-{12 * count}",) for count in (2, 4, 8)},
    **{("A100", count): (f"a2-highgpu-{count}g",) for count in (1, 2, 4, 8)},
    ("A100", 16): ("a2-megagpu-16g",),
    **{("A100-80GB", count): (f"a2-ultragpu-{count}g",) for count in (1, 2, 4, 8)},
    **{("H100", count): (f"a3-highgpu-{count}g",) for count in (1, 2, 4, 8)},
    ("H100-MEGA", 8): ("a3-megagpu-8g",),
    ("H200", 8): ("a3-ultragpu-8g",),
    **{("T4", count): (f"n1-standard-{4 * count}",) for count in (1, 2, 4)},
    **{("V100", count): (f"n1-standard-{8 * count}",) for count in (1, 2, 4, 8)},
}
"""Google's hosts of so many cards (Compute Engine documentation, GPU machine types). T4 and V100 go with any N1 of
some size; the one here has 4 and 8 vCPUs a card, as the hosts of other clouds have."""

CARD_HOSTS = ("a2-", "a3-", "a4-", "g2-")
"""Google sells these with their cards only, whose price is not in their rows."""

KNOWN_CLOUDS = ("gcp", "azure", "lambda", "vast", "aws")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotCatalogue:
    """Prices of one cloud in SkyPilot's format; see `PriceFile`."""

    path: Path
    cloud: str
    as_of: str
    """ISO 8601 date or time at which the prices were true."""

    @classmethod
    def at(cls, path: Path, *, cloud: str | None = None, as_of: str | None = None) -> SkyPilotCatalogue:
        """Return the catalogue at a path, with cloud and date from its name where they are not given.

        Raises:
            ConfigurationError: The path says neither the cloud (gcp_vms_2026-05-20.csv.gz, or gcp/vms.csv) nor the
                date.
        """
        words = [*re.split(r"[_.-]", path.name), path.parent.name]
        cloud = cloud or next((word for word in words if word in KNOWN_CLOUDS), None)
        as_of = as_of or date_in_name(path)
        if cloud is None or as_of is None:
            raise ConfigurationError(
                f"a price must say whose it is and of when, and the name {path.name} does not say the "
                f"{'cloud' if cloud is None else 'date'}; name the file like gcp_vms_2026-05-20.csv.gz"
            )
        return cls(path=path, cloud=cloud, as_of=as_of)

    @property
    def source(self) -> str:
        """Who published the prices."""
        return f"{self.path.name} (SkyPilot catalogue format, {self.cloud})"

    def offers(self) -> Iterator[InstanceOffer]:
        """Yield on-demand and spot offers; of two prices for the same thing the lower one.

        Raises:
            ConfigurationError: The file cannot be read, lacks a column, or a row has a number that is none.
        """
        cheapest: dict[object, InstanceOffer] = {}
        for offer in self._all_offers():
            known = cheapest.get(offer_key(offer))
            if known is None or offer.price_usd_per_hour < known.price_usd_per_hour:
                cheapest[offer_key(offer)] = offer
        yield from with_interruptions(cheapest.values())

    def _all_offers(self) -> Iterator[InstanceOffer]:
        rows = [self._checked(line, row) for line, row in csv_rows(self.path)]
        hosts: dict[tuple[str, str | None], dict[str, _Row]] = defaultdict(dict)
        for row in rows:
            hosts[row.place][row.name] = row
        for row in rows:
            if row.name and not (self.cloud == "gcp" and row.name.startswith(CARD_HOSTS)):
                yield from self._offers_of(row)
            elif not row.name:
                names = HOSTS_OF_CARDS.get((row.card, int(row.num_cards)), ())
                for host in (hosts[row.place][name] for name in names if name in hosts[row.place]):
                    yield from self._offers_of(host.with_cards(row))

    def _offers_of(self, row: _Row) -> Iterator[InstanceOffer]:
        region, zone = row.place
        for market, price in row.prices.items():
            yield InstanceOffer(
                instance_type=row.instance_type(),
                region=region,
                zone=zone,
                market=market,
                price_usd_per_hour=price,
                price_as_of=self.as_of,
                price_source=self.source,
                cloud=self.cloud,
            )

    def _checked(self, line: int, row: Mapping[str, str]) -> _Row:
        try:
            return _Row.of(row)
        except (KeyError, ValueError, TypeError) as problem:
            raise ConfigurationError(
                f"{self.path}, line {line}: expected the columns {', '.join(COLUMNS)} of SkyPilot's format with "
                f"their numbers, got {type(problem).__name__}: {problem}"
            ) from problem


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    name: str
    """Empty where a row is the price of cards alone."""

    place: tuple[str, str | None]
    vcpus: int
    memory_bytes: int
    card: str
    num_cards: float
    card_memory_bytes: int
    prices: Mapping[Market, float]
    """Without markets that have no price."""

    @classmethod
    def of(cls, row: Mapping[str, str]) -> _Row:
        num_cards = float(row["AcceleratorCount"] or 0)
        return cls(
            name=row["InstanceType"],
            # Vast writes places as free text, some without a town: ", CA, NA".
            place=(row["Region"].strip(" ,"), row.get("AvailabilityZone") or None),
            vcpus=int(float(row["vCPUs"] or 0)),
            memory_bytes=round(float(row["MemoryGiB"] or 0) * BYTES_PER_GIB),
            card=row["AcceleratorName"],
            num_cards=num_cards,
            card_memory_bytes=_card_memory_bytes(row.get("GpuInfo") or "", num_cards),
            prices=dict(_prices(row)),
        )

    def with_cards(self, cards: _Row) -> _Row:
        """Return a host with cards, in the markets that sell both."""
        both = self.prices.keys() & cards.prices.keys()
        name = (
            self.name
            if self.name.startswith(CARD_HOSTS)
            else f"{self.name}+{cards.num_cards:.0f}x{cards.card}"
        )
        return _Row(
            name=name,
            place=self.place,
            vcpus=self.vcpus,
            memory_bytes=self.memory_bytes,
            card=cards.card,
            num_cards=cards.num_cards,
            card_memory_bytes=cards.card_memory_bytes,
            prices={market: self.prices[market] + cards.prices[market] for market in both},
        )

    def instance_type(self) -> InstanceType:
        return InstanceType(
            name=self.name,
            vcpus=self.vcpus,
            memory_bytes=self.memory_bytes,
            accelerator_name=self.card.lower() or None,
            # A fraction of a card is no unit that a replica could have for itself.
            accelerator_count=math.floor(self.num_cards),
            accelerator_memory_bytes_each=self.card_memory_bytes,
            network_bandwidth_bytes_per_s=0.0,
        )


def _prices(row: Mapping[str, str]) -> Iterable[tuple[Market, float]]:
    for market, text in ((Market.ON_DEMAND, row["Price"]), (Market.SPOT, row.get("SpotPrice"))):
        price = float(text or 0)
        if price > 0:
            yield market, price


def _card_memory_bytes(text: str, num_cards: float) -> int:
    """Return the memory of one card from a Python dictionary as text; 0 where it says nothing."""
    if not text.startswith("{"):
        return 0
    try:
        info = ast.literal_eval(text)
        total_mib = info.get("TotalGpuMemoryInMiB")
        if total_mib:
            return int(total_mib / max(num_cards, 1) * BYTES_PER_MIB)
        return int(info["Gpus"][0]["MemoryInfo"]["SizeInMiB"] * BYTES_PER_MIB)
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError, AttributeError):
        return 0
