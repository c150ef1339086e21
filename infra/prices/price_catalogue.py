"""Dated price files, the bundled one and those that `refresh-prices` writes, and the offers that they hold.

Prices are data with a date and a source, never a live guess: the file that a plan was priced with stays
with the run, so that a bill can be checked years later.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_type_hints

from heterps_core.errors import ConfigurationError, ProvisioningError, UnknownNameError
from heterps_core.hardware import AWS, InstanceOffer, InstanceType, Market
from heterps_core.units import SECONDS_PER_HOUR

_REFRESH_COMMAND = "heterps refresh-prices"

_OLD_AFTER = timedelta(days=7)
"""Older prices are warned of: on-demand prices change a few times a year, spot prices within days."""

_HOURS_PER_DAY = 24

logger = logging.getLogger(__name__)


_NAME_PATTERN = "prices_*.csv.gz"
_NAME_FORMAT = "prices_%Y-%m-%dT%H%M%S.%fZ.csv.gz"
"""Sorts by time; UTC."""

KEPT_FILES = 100

_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    Market: Market,
    str | None: lambda text: text or None,
}


def _columns(kind: type[Any]) -> dict[str, Callable[[str], Any]]:
    """Return the reader of each field of a dataclass that holds one value."""
    hints = get_type_hints(kind)
    return {name: _READERS[hints[name]] for name in kind.__dataclass_fields__ if hints[name] in _READERS}


_TYPE_COLUMNS, _OFFER_COLUMNS = _columns(InstanceType), _columns(InstanceOffer)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceFile:
    """A CSV file of prices with a header, gzipped or not, each row with its own time and source."""

    path: Path

    def offers(self) -> Iterator[InstanceOffer]:
        """Yield its offers, in the file's order.

        Raises:
            ConfigurationError: The file cannot be read, or a row is not as `refresh-prices` writes it.
        """
        try:
            content = self.path.read_bytes()
            text = (gzip.decompress(content) if self.path.suffix == ".gz" else content).decode()
        except (OSError, EOFError, UnicodeDecodeError) as problem:
            raise ConfigurationError(f"the price file {self.path} cannot be read: {problem}") from problem
        reader = csv.DictReader(io.StringIO(text))
        for row in reader:
            try:
                offer = InstanceOffer(
                    instance_type=InstanceType(
                        **{name: read(row[name]) for name, read in _TYPE_COLUMNS.items()}
                    ),
                    **{name: read(row[name]) for name, read in _OFFER_COLUMNS.items()},
                )
            except (KeyError, ValueError, TypeError, ConfigurationError) as problem:
                raise ConfigurationError(
                    f"{self.path}, line {reader.line_num}: a row of prices must be as refresh-prices writes it, got "
                    f"{type(problem).__name__}: {problem}; remove the file to use the one before it"
                ) from problem
            yield offer


BUNDLED_SNAPSHOT = PriceFile(path=Path(__file__).parent / "snapshots" / "aws_ec2_us-east-1_2026-07-20.csv.gz")


def newest_refreshed(folder: Path) -> PriceFile | None:
    """Return the newest file of a folder, or None where there is none."""
    paths = sorted(folder.glob(_NAME_PATTERN))
    return PriceFile(path=paths[-1]) if paths else None


def write_refreshed(folder: Path, offers: Iterable[InstanceOffer], *, at: datetime) -> PriceFile:
    """Write offers into a new file named by its time, and remove the oldest beyond `KEPT_FILES`.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    text = io.StringIO()
    columns = [*_TYPE_COLUMNS, *_OFFER_COLUMNS]
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for offer in offers:
        document = offer.to_json()
        writer.writerow({**document.pop("instance_type"), **document})
    path = folder / at.strftime(_NAME_FORMAT)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
        draft.replace(path)
        for old in sorted(folder.glob(_NAME_PATTERN))[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigurationError(f"prices must be written to {folder}, which failed: {problem}") from problem
    return PriceFile(path=path)


class PriceCatalogue:
    """Offers of one or more price files, found by cloud, region, market and instance type.

    Rows without a price or without a size are left out: an offer that cannot be counted in units or in
    USD is none. Where two files price the same thing, the later one in the list wins.
    """

    def __init__(self, files: Iterable[PriceFile] = (BUNDLED_SNAPSHOT,)) -> None:
        self.files = tuple(files)
        self._offers = {
            (offer.cloud, offer.region, offer.zone, offer.market, offer.instance_type.name): offer
            for file in self.files
            for offer in file.offers()
        }

    @property
    def cloud(self) -> str:
        """The cloud of the first file, of which the others may tell newer prices."""
        return next((offer.cloud for offer in self._offers.values()), AWS)

    def regions(self) -> tuple[str, ...]:
        """Return the regions of the cloud with a price, sorted."""
        return tuple(sorted({offer.region for offer in self._offers.values() if offer.cloud == self.cloud}))

    def offers(self, *, region: str, market: Market = Market.ON_DEMAND) -> tuple[InstanceOffer, ...]:
        """Return the offers of a region and market, and those of machines in no region, sorted by name and zone.

        Raises:
            UnknownNameError: No file has a price in the region.
            ProvisioningError: The region is known, but not with prices of this market.
        """
        regions = self.regions()
        if "" not in regions and region not in regions:
            raise UnknownNameError("region with prices", region, regions, way_out=refresh_way_out(region))
        places = [(self.cloud, each, market) for each in ("", region)]
        in_place = [o for o in self._offers.values() if (o.cloud, o.region, o.market) in places]
        found = sorted(in_place, key=lambda offer: (offer.instance_type.name, offer.zone or ""))
        if not found:
            raise ProvisioningError(
                f"no price file has {market} prices for {region}: "
                f"{', '.join(file.path.name for file in self.files)}; choose the other market, or get them "
                f"with {_REFRESH_COMMAND} --regions {region}"
            )
        return tuple(found)


def refresh_way_out(region: str) -> str:
    """Return the command that fetches the prices of a region, or of those that match a pattern, as a sentence."""
    return f"Get the prices of others with {_REFRESH_COMMAND} --regions {shlex.quote(region)}."


def age_text(offers: Iterable[InstanceOffer], *, now: datetime) -> str:
    """Return how old the prices of offers are, for instance "prices 3 hours to 124 days old"."""
    ages = [offer.price_age(now) for offer in offers]
    newest, oldest = _in_words(min(ages)), _in_words(max(ages))
    return f"prices {oldest} old" if newest == oldest else f"prices {newest} to {oldest} old"


def warn_of_old_prices(offers: Sequence[InstanceOffer], *, now: datetime) -> None:
    """Log a warning with the fix where a price is older than `_OLD_AFTER`."""
    oldest = max(offers, key=lambda offer: offer.price_age(now))
    age = oldest.price_age(now)
    if age > _OLD_AFTER:
        logger.warning(
            "the price of %s is %s old and may have changed (%s); get new ones with: %s",
            oldest.instance_type.name,
            _in_words(age),
            oldest.price_source,
            _REFRESH_COMMAND,
        )


def _in_words(age: timedelta) -> str:
    hours = age.total_seconds() / SECONDS_PER_HOUR
    if hours < 1:
        return "less than an hour"
    if hours < 2 * _HOURS_PER_DAY:
        return f"{hours:.0f} hours"
    return f"{hours / _HOURS_PER_DAY:.0f} days"
