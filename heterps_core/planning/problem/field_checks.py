"""Checks of single fields of a problem file: what is wrong is said with the field's path, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from heterps_core.errors import MalformedProblemError

SMALLEST_POSITIVE = 1e-18
LARGEST_NUMBER = 1e18
"""Numbers outside these limits would overflow products of five of them; no real quantity comes near."""


def object_without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; a hook of `json.loads` that refuses a name that stands twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise MalformedProblemError(twice[0], "stands twice in the same object")
    return members


def as_object(path: str, value: object) -> dict[str, Any]:
    """Return the value where it is a JSON object."""
    if not isinstance(value, dict):
        raise MalformedProblemError(path, f"must be a JSON object, got {shown(value)}")
    return value


def member(fields: Mapping[str, Any], path: str, name: str) -> Any:
    """Return the field of this name."""
    if name not in fields:
        raise MalformedProblemError(f"{path}.{name}" if path else name, "is missing")
    return fields[name]


def shown(value: object) -> str:
    """Return a value as it is quoted in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_text(path: str, value: object) -> None:
    """Check that a value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise MalformedProblemError(path, f"must be a text that is not empty, got {shown(value)}")


def check_flag(path: str, value: object) -> None:
    """Check that a field is a boolean.

    Raises:
        MalformedProblemError: It is not.
    """
    if not isinstance(value, bool):
        raise MalformedProblemError(path, f"must be true or false, got {shown(value)}")


def check_number(path: str, value: object) -> float:
    """Check that a value is a finite number within the limits, and return it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedProblemError(path, f"must be a number, got {shown(value)}")
    # Compared before any conversion: an integer may be too large for a float.
    if isinstance(value, float) and not math.isfinite(value):
        raise MalformedProblemError(path, f"must be a finite number, got {value}")
    if abs(value) > LARGEST_NUMBER:
        raise MalformedProblemError(path, f"must be at most {LARGEST_NUMBER:g}, got {shown(value)}")
    return float(value)


def check_not_negative(path: str, value: object) -> None:
    """Check that a value is 0 or a positive number."""
    number = check_number(path, value)
    if number < 0:
        raise MalformedProblemError(path, f"must not be negative, got {shown(value)}")
    if 0 < number < SMALLEST_POSITIVE:
        raise MalformedProblemError(path, f"must be 0 or at least {SMALLEST_POSITIVE:g}, got {shown(value)}")


def check_positive(path: str, value: object) -> None:
    """Check that a value is a positive number."""
    check_not_negative(path, value)
    if value == 0:
        raise MalformedProblemError(path, "must be positive, got 0")


def check_fraction(path: str, value: object) -> None:
    """Check that a value lies in [0, 1]."""
    number = check_number(path, value)
    if not 0 <= number <= 1:
        raise MalformedProblemError(path, f"must lie in [0, 1], got {shown(value)}")


def check_count(path: str, value: object, *, at_most: int) -> None:
    """Check that a value is a whole number in 1..at_most."""
    number = check_number(path, value)
    if number != int(number):
        raise MalformedProblemError(path, f"must be a whole number, got {shown(value)}")
    if not 1 <= number <= at_most:
        raise MalformedProblemError(path, f"must lie in 1..{at_most}, got {shown(value)}")
