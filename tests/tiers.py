"""The tiers of parametrised tests: some cases run in continuous integration, the others weekly."""

from collections.abc import Iterable
from typing import Any

import pytest


def weekly_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test; all after the first `count` are weekly."""
    return [
        case if number < count else pytest.param(case, marks=pytest.mark.weekly)
        for number, case in enumerate(cases)
    ]
