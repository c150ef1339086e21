"""The ranges of a run's numbers, so that a wrong one is told at once and under the name that the user gave it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from heterps_core.errors import ConfigurationError

LARGEST_SEED = 2**32 - 1
"""NumPy's and Optuna's generators take no larger one."""

LEAST: Mapping[str, float] = {
    "throughput_floor_samples_per_s": 0,
    "planned_samples": 1,
    "planned_rows_per_slot": 2,
    "epochs": 1,
    "batch_size": 4,
    "budget_evaluations": 1,
    "seed": 0,
    "seeds": 1,
    "nights": 1,
    "max_seconds_per_search": 1,
}
"""A batch below 4 cannot be profiled at half its size in two micro-batches."""

POSITIVE = ("max_usd_per_hour", "max_usd_per_run", "max_usd_per_month")


def check_numbers(numbers: Mapping[str, float | None]) -> None:
    """Check parameters by name; None stands for a default, and names without a range are not looked at.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    for name, number in numbers.items():
        if number is None:
            continue
        if name in LEAST and not (math.isfinite(number) and number >= LEAST[name]):
            raise ConfigurationError(f"{name} must be a number of at least {LEAST[name]}, got {number}")
        if name in POSITIVE and not (math.isfinite(number) and number > 0):
            raise ConfigurationError(
                f"{name} must be a positive number of USD, got {number}; leave it out for no cap"
            )
        if name == "seed" and number > LARGEST_SEED:
            raise ConfigurationError(f"seed must be at most {LARGEST_SEED}, got {number}")
