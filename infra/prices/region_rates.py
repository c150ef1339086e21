"""Regions by name or pattern, and their prices of disks, requests and traffic, as the last refresh found them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path

from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.json_file import read_json, replace_json
from infra.prices.service_charges import RATES, Rates, ServiceRate

BETWEEN_REGIONS = "traffic between regions"
_FILE = "service_rates.json"
_OF_THE_STORE = (
    "requests that write or list",
    "requests that read",
    "stored data",
    "traffic out of the region",
)


def names_matching(
    patterns: Sequence[str], known: Sequence[str], *, family: str, way_out: str = ""
) -> list[str]:
    """Return the known names that names or patterns of a shell stand for.

    Raises:
        UnknownNameError: One stands for none.

    Example:
        >>> names_matching(["us-east-1", "eu-*"], ["eu-north-1", "eu-west-1", "us-east-1"], family="region")
        ['us-east-1', 'eu-north-1', 'eu-west-1']
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        if not (names := fnmatch.filter(known, pattern)):
            raise UnknownNameError(family, pattern, known, way_out=way_out)
        found |= dict.fromkeys(names)
    return list(found)


def traffic_to(region: str) -> str:
    """Return the name of the rate of 1e9 bytes from a region to another one."""
    return f"traffic to {region}"


def write_rates(folder: Path, found: Mapping[str, Rates]) -> None:
    """Keep the rates of some regions in place of their earlier ones; those of others stay.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    try:
        replace_json(folder / _FILE, {**_kept(folder), **found})
    except OSError as problem:
        raise ConfigurationError(f"prices must be written to {folder}, which failed: {problem}") from problem


def rates_between(folder: Path, region: str, home: str | None) -> Rates:
    """Return the rates of a run with machines in a region; its store is at home, by default in the same region.

    A rate that no refresh has found is that of us-east-1. A byte between the regions costs the higher rate of the
    two directions.
    """
    home = home or region
    there, at_home = _kept(folder).get(region, {}), _kept(folder).get(home, {})
    ways = [there.get(traffic_to(home)), at_home.get(traffic_to(region))]
    of_store = {name: at_home.get(name, RATES[name]) for name in _OF_THE_STORE}
    between = max(filter(None, ways), key=lambda way: way.usd_per_unit, default=RATES[BETWEEN_REGIONS])
    return {**RATES, **there, **of_store, BETWEEN_REGIONS: between}


def _kept(folder: Path) -> dict[str, dict[str, ServiceRate]]:
    path = folder / _FILE
    kept = read_json(path, what="service rates") if path.exists() else {}
    return {
        region: {name: ServiceRate(*rate) for name, rate in rates.items()} for region, rates in kept.items()
    }
