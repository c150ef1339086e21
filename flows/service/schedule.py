"""What runs by itself and when: names of the deployments, the nightly hour and its time zone.

Apart from the flows, so that the supervisor can print it without loading Prefect.
"""

from __future__ import annotations

import difflib
import json
import os
import zoneinfo
from collections.abc import Mapping
from typing import Any

from heterps_core.errors import ConfigurationError

TRAIN_CTR = "train-ctr"
"""Name of the flow and of its deployment; one word for both, so that no slash has to be typed."""

SWEEP_ORPHANS = "sweep-orphans"

# On request only: what is compared, priced or back-filled is asked for, and profiling spends money.
COMPARE_SCHEDULERS = "compare-schedulers"
BACKFILL_CTR = "backfill-ctr"
REFRESH_PRICES = "refresh-prices"
PROFILE_DEVICES = "profile-devices"

DEPLOYMENTS = (TRAIN_CTR, SWEEP_ORPHANS, COMPARE_SCHEDULERS, REFRESH_PRICES, PROFILE_DEVICES, BACKFILL_CTR)

NIGHTLY_TIME = "04:30"
NIGHTLY_CRON = "30 4 * * *"
"""No time zone skips or repeats 04:30 when daylight saving begins or ends; 02:30 would be lost or doubled."""

SWEEP_INTERVAL_S = 300.0
"""Leases are longer than this, so that an orphan is found at the first sweep after its lease."""

NIGHTLY_VARIABLE = "HETERPS_NIGHTLY"
"""Environment variable with parameters of the nightly training, as JSON."""

TIMEZONE_VARIABLE = "HETERPS_TIMEZONE"
DEFAULT_TIMEZONE = "UTC"


def nightly_parameters(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the parameters of train-ctr that the served deployment has instead of their defaults.

    Raises:
        ConfigurationError: HETERPS_NIGHTLY is no JSON object.
    """
    text = environment.get(NIGHTLY_VARIABLE, "").strip()
    try:
        parameters = json.loads(text) if text else {}
    except ValueError:
        parameters = None
    if not isinstance(parameters, dict):
        raise ConfigurationError(
            f'{NIGHTLY_VARIABLE} must be parameters of train-ctr as JSON, such as {{"data": "/clicks", '
            f'"ready_by": "06:00"}}, got {text!r}'
        )
    return parameters


def nightly_timezone(environment: Mapping[str, str] = os.environ) -> str:
    """Return the time zone of the nightly schedule.

    Raises:
        ConfigurationError: HETERPS_TIMEZONE names no zone of the IANA database.
    """
    name = environment.get(TIMEZONE_VARIABLE, "").strip() or DEFAULT_TIMEZONE
    known = zoneinfo.available_timezones()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(sorted(near))}?" if near else ""
        raise ConfigurationError(
            f"{TIMEZONE_VARIABLE} must be a name such as Europe/Berlin or UTC, got {name!r}.{hint}"
        )
    return name
