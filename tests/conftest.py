"""Rules that hold for every test."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test named after a set: sets print in another order in each process, and processes that share
    the tests must find the same names."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        for value in callspec.params.values() if callspec else ():
            if isinstance(value, set | frozenset) and str(value) in item.name:
                raise pytest.UsageError(
                    f"{item.nodeid} is named after the set {value}, which prints otherwise in another process. "
                    "Give a list or a tuple, or name the case by ids=."
                )
