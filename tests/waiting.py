"""Waiting for what another process or thread does, never without an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(
    condition: Callable[[], Any],
    *,
    timeout_s: float = 120.0,
    what: str = "the condition",
    poll_s: float = 0.02,
) -> Any:
    """Return what a condition finds as soon as it finds anything.

    Raises:
        AssertionError: It has found nothing within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not come within {timeout_s:.0f} s"
        time.sleep(poll_s)
    return found
