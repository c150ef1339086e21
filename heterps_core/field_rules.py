"""Rules of single fields of JSON documents: what is wrong is said with the field's path, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from heterps_core.errors import MalformedDocumentError

_SMALLEST_POSITIVE = 1e-18
LARGEST_NUMBER = 1e18
"""Numbers outside these limits would overflow products of five of them; no real quantity comes near."""

Rule = Callable[[str, Any], Any]
"""Takes the path and the value of a field, and returns the value."""


def within_limits(value: float) -> float:
    """Return the nearest number that may stand where a positive one is asked for."""
    return min(max(value, _SMALLEST_POSITIVE), LARGEST_NUMBER)


def shown(value: object) -> str:
    """Return a value as it is quoted in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_text(path: str, value: Any) -> Any:
    """Check that a value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise MalformedDocumentError(path, f"must be a text that is not empty, got {shown(value)}")
    return value


def _check_number(path: str, value: object) -> float:
    """Check that a value is a finite number within the limits, and return it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedDocumentError(path, f"must be a number, got {shown(value)}")
    # Compared before any conversion: an integer may be too large for a float.
    if isinstance(value, float) and not math.isfinite(value):
        raise MalformedDocumentError(path, f"must be a finite number, got {value}")
    if abs(value) > LARGEST_NUMBER:
        raise MalformedDocumentError(path, f"must be at most {LARGEST_NUMBER:g}, got {shown(value)}")
    return float(value)


def _check_not_negative(path: str, value: Any) -> Any:
    """Check that a value is 0 or a positive number."""
    number = _check_number(path, value)
    if number < 0:
        raise MalformedDocumentError(path, f"must not be negative, got {shown(value)}")
    if 0 < number < _SMALLEST_POSITIVE:
        raise MalformedDocumentError(
            path, f"must be 0 or at least {_SMALLEST_POSITIVE:g}, got {shown(value)}"
        )
    return value


def _check_positive(path: str, value: Any) -> Any:
    """Check that a value is a positive number."""
    _check_not_negative(path, value)
    if value == 0:
        raise MalformedDocumentError(path, "must be positive, got 0")
    return value


def _check_fraction(path: str, value: Any) -> Any:
    """Check that a value lies in [0, 1]."""
    if not 0 <= _check_number(path, value) <= 1:
        raise MalformedDocumentError(path, f"must lie in [0, 1], got {shown(value)}")
    return value


def count(at_most: int = int(LARGEST_NUMBER)) -> Rule:
    """Return the rule that a value is a whole number in 1..at_most."""

    def check(path: str, value: Any) -> Any:
        number = _check_number(path, value)
        if number != int(number):
            raise MalformedDocumentError(path, f"must be a whole number, got {shown(value)}")
        if not 1 <= number <= at_most:
            raise MalformedDocumentError(path, f"must lie in 1..{at_most}, got {shown(value)}")
        return value

    return check


def sized(least: int, most: int, items: str, way_out: str = "") -> Rule:
    """Return the rule that a list or an object holds least..most items, which are called so."""

    def check(path: str, value: Any) -> Any:
        if not least <= len(value) <= most:
            rule = f"must hold {least} to {most} {items}, got {len(value)}"
            raise MalformedDocumentError(path, rule + way_out)
        return value

    return check


Text = Annotated[str, _check_text]
Count = Annotated[int, count()]
Positive = Annotated[float, _check_positive]
NotNegative = Annotated[float, _check_not_negative]
Fraction = Annotated[float, _check_fraction]
