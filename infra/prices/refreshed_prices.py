"""The dated files that `refresh-prices` writes into the workspace: one for each refresh, the newest counts.

Each row has its own time and source, because a refresh that could not fetch everything keeps the older
rows as they are. A file is written whole or not at all, and never changed.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from infra.prices.price_catalogue import csv_rows

NAME_PATTERN = "prices_*.csv.gz"
NAME_FORMAT = "prices_%Y-%m-%dT%H%M%S.%fZ.csv.gz"
"""Sorts by time; UTC."""

KEPT_FILES = 100

_TYPE_COLUMNS = tuple(InstanceType.__dataclass_fields__)
_OFFER_COLUMNS = tuple(name for name in InstanceOffer.__dataclass_fields__ if name != "instance_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshedPrices:
    """Prices of one refresh; see `PriceFile`."""

    path: Path

    def offers(self) -> Iterator[InstanceOffer]:
        """Yield the offers; see `PriceFile.offers`."""
        for line, row in csv_rows(self.path):
            try:
                yield _offer_of(row)
            except (KeyError, ValueError, TypeError, ConfigurationError) as problem:
                raise ConfigurationError(
                    f"{self.path}, line {line}: a row of refresh-prices must be as it was written, got "
                    f"{type(problem).__name__}: {problem}; remove the file to use the one before it"
                ) from problem


def newest_refreshed(folder: Path) -> RefreshedPrices | None:
    """Return the newest file of a folder, or None where there is none."""
    paths = sorted(folder.glob(NAME_PATTERN))
    return RefreshedPrices(path=paths[-1]) if paths else None


def write_refreshed(folder: Path, offers: Iterable[InstanceOffer], *, at: datetime) -> RefreshedPrices:
    """Write offers into a new file named by its time, and remove the oldest beyond `KEPT_FILES`.

    Args:
        folder: Made where it is missing.
        offers: With the time and source of each price.
        at: With a time zone of UTC.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_TYPE_COLUMNS, *_OFFER_COLUMNS], lineterminator="\n")
    writer.writeheader()
    for offer in offers:
        document = offer.to_json()
        writer.writerow({**document.pop("instance_type"), **document})
    path = folder / at.strftime(NAME_FORMAT)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
        draft.replace(path)
        for old in sorted(folder.glob(NAME_PATTERN))[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigurationError(f"prices must be written to {folder}, which failed: {problem}") from problem
    return RefreshedPrices(path=path)


def _offer_of(row: Mapping[str, str]) -> InstanceOffer:
    return InstanceOffer(
        instance_type=InstanceType(
            name=row["name"],
            vcpus=int(row["vcpus"]),
            memory_bytes=int(row["memory_bytes"]),
            accelerator_name=row["accelerator_name"] or None,
            accelerator_count=int(row["accelerator_count"]),
            accelerator_memory_bytes_each=int(row["accelerator_memory_bytes_each"]),
            network_bandwidth_bytes_per_s=float(row["network_bandwidth_bytes_per_s"]),
        ),
        region=row["region"],
        zone=row["zone"] or None,
        market=Market(row["market"]),
        price_usd_per_hour=float(row["price_usd_per_hour"]),
        price_as_of=row["price_as_of"],
        price_source=row["price_source"],
        cloud=row["cloud"],
        interruptions_per_hour=float(row["interruptions_per_hour"]),
        interruptions_source=row["interruptions_source"],
    )
