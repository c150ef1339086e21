"""Reads dated price snapshots and answers with typed offers.

Prices are data with a date and a source, never a live guess: the file that a plan was priced with stays
with the run, so that a bill can be checked years later. A snapshot is a CSV file as in snapshots/.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from heterps_core.errors import ConfigurationError, ProvisioningError, UnknownNameError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from heterps_core.units import BYTES_PER_MIB, BYTES_PER_S_PER_MBIT_PER_S

SNAPSHOT_FOLDER = Path(__file__).parent / "snapshots"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A price file with its time and origin."""

    path: Path
    as_of: str
    """ISO 8601 time at which the prices were true."""

    source: str


BUNDLED_SNAPSHOT = Snapshot(
    path=SNAPSHOT_FOLDER / "aws_ec2_us-east-1_2026-07-20.csv.gz",
    as_of="2026-07-20T13:44:30+00:00",
    source="aws/karpenter-provider-aws 1d92708 (AWS price list, Linux, on-demand)",
)


class PriceCatalogue:
    """Offers of one or more snapshots, found by region, market and instance type.

    Rows without a price or without a size are left out: an offer that cannot be counted in units or in
    USD is none. Where two snapshots price the same thing, the later one in the list wins.
    """

    def __init__(self, snapshots: Iterable[Snapshot] = (BUNDLED_SNAPSHOT,)) -> None:
        self.snapshots = tuple(snapshots)
        self._offers: dict[tuple[str, Market, str], InstanceOffer] = {}
        for snapshot in self.snapshots:
            for offer in read_snapshot(snapshot):
                self._offers[offer.region, offer.market, offer.instance_type.name] = offer

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions with a price, sorted."""
        return tuple(sorted({region for region, _, _ in self._offers}))

    def offers(
        self, *, region: str, market: Market = Market.ON_DEMAND, families: Iterable[str] | None = None
    ) -> tuple[InstanceOffer, ...]:
        """Return the offers of a region and market, sorted by name.

        Args:
            region: For instance "us-east-1".
            market: On-demand or spot.
            families: Only these instance families, for instance "c7i"; None for all.

        Raises:
            UnknownNameError: No snapshot has a price in the region, or an instance of a family.
            ProvisioningError: The region is known, but not with prices of this market.
        """
        self._check_region(region)
        found = [o for (r, m, _), o in sorted(self._offers.items()) if (r, m) == (region, market)]
        if not found:
            raise ProvisioningError(
                f"no snapshot has {market} prices for {region}: "
                f"{', '.join(snapshot.path.name for snapshot in self.snapshots)}; "
                f"choose the other market, or load a snapshot that has them"
            )
        if families is None:
            return tuple(found)
        known = {offer.instance_type.family for offer in found}
        wanted = set(families)
        for family in sorted(wanted - known):
            raise UnknownNameError("instance family", family, _near(family, known))
        return tuple(offer for offer in found if offer.instance_type.family in wanted)

    def offer(self, instance_type: str, *, region: str, market: Market = Market.ON_DEMAND) -> InstanceOffer:
        """Return the offer of one instance type.

        Raises:
            UnknownNameError: The region or the instance type is in no snapshot.
            ProvisioningError: The region is known, but not with prices of this market.
        """
        offers = {offer.instance_type.name: offer for offer in self.offers(region=region, market=market)}
        if instance_type not in offers:
            raise UnknownNameError("instance type", instance_type, _near(instance_type, offers))
        return offers[instance_type]

    def _check_region(self, region: str) -> None:
        if region not in self.regions:
            raise UnknownNameError("region with prices", region, self.regions)


def read_snapshot(snapshot: Snapshot) -> Iterator[InstanceOffer]:
    """Yield the on-demand offers of a snapshot, in the file's order.

    Raises:
        ConfigurationError: The file is missing, is no gzip, or a row has a number that is none.
    """
    try:
        text = gzip.decompress(snapshot.path.read_bytes()).decode()
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"the price snapshot {snapshot.path} cannot be read: {problem}") from problem
    for line, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        try:
            if row["ondemand_usd_per_hour"] and row["vcpus"]:
                yield _offer_of(row, snapshot)
        except (KeyError, ValueError, TypeError) as problem:
            raise ConfigurationError(
                f"{snapshot.path}, line {line}: expected the columns and numbers of the bundled snapshot, "
                f"got {type(problem).__name__}: {problem}"
            ) from problem


def _offer_of(row: Mapping[str, str], snapshot: Snapshot) -> InstanceOffer:
    # A fraction of a card (gpu_count 0) is no unit that a replica could have for itself.
    num_gpus = int(row["gpu_count"] or 0)
    instance_type = InstanceType(
        name=row["instance_type"],
        vcpus=int(row["vcpus"]),
        memory_bytes=int(row["memory_mib"]) * BYTES_PER_MIB,
        accelerator_name=row["gpu_name"] or row["accelerator_name"] or None,
        accelerator_count=num_gpus or int(row["accelerator_count"] or 0),
        accelerator_memory_bytes_each=int(row["gpu_memory_mib_each"] or 0) * BYTES_PER_MIB,
        network_bandwidth_bytes_per_s=float(row["network_bandwidth_mbps"] or 0) * BYTES_PER_S_PER_MBIT_PER_S,
    )
    return InstanceOffer(
        instance_type=instance_type,
        region=row["region"],
        zone=None,
        market=Market.ON_DEMAND,
        price_usd_per_hour=float(row["ondemand_usd_per_hour"]),
        price_as_of=snapshot.as_of,
        price_source=snapshot.source,
    )


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names worth showing: a thousand instance types would bury the answer."""
    names = sorted(known)
    return difflib.get_close_matches(name, names, n=10, cutoff=0.5) or names[:10]
