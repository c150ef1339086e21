"""The dated files that `refresh-prices` writes into the workspace: one for each refresh, the newest counts.

Each row has its own time and source, because a refresh that could not fetch everything keeps the older
rows as they are. A file is written whole or not at all, and never changed.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_type_hints

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer, InstanceType, Market
from infra.prices.price_catalogue import csv_rows

NAME_PATTERN = "prices_*.csv.gz"
NAME_FORMAT = "prices_%Y-%m-%dT%H%M%S.%fZ.csv.gz"
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
    """Return what reads each field of a dataclass that is one value."""
    hints = get_type_hints(kind)
    return {name: _READERS[hints[name]] for name in kind.__dataclass_fields__ if hints[name] in _READERS}


_TYPE_COLUMNS, _OFFER_COLUMNS = _columns(InstanceType), _columns(InstanceOffer)


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
        instance_type=InstanceType(**{name: read(row[name]) for name, read in _TYPE_COLUMNS.items()}),
        **{name: read(row[name]) for name, read in _OFFER_COLUMNS.items()},
    )
