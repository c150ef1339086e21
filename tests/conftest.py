"""Rules that hold for every test."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.small_disk import SmallDisk, mounted

# Tests run side by side, and a thread of torch that waits for another one keeps the core that the other needs.
# Before torch is loaded, which reads it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """An empty file system of a few hundred kilobytes; the test is skipped where it cannot be mounted."""
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted(tmp_path / "disk"))
        except OSError as problem:
            pytest.skip(f"a small file system cannot be mounted here: {problem}")
        yield disk


@pytest.fixture(scope="session")
def prefect_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first Prefect server leaves its empty tables; making them takes half of a server's start."""
    return tmp_path_factory.mktemp("prefect") / "tables.db"


@pytest.fixture(scope="module")
def prefect_server(prefect_tables: Path) -> Iterator[Path]:
    """A Prefect server of a file's own, by Prefect's own harness; the value is its database."""
    # Here and not above: most tests do without Prefect, which takes seconds to import.
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL
    from prefect.testing import utilities

    def folder_with_tables() -> str:
        folder = tempfile.mkdtemp()
        if prefect_tables.exists():
            shutil.copy(prefect_tables, Path(folder) / "prefect-test.db")
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", folder_with_tables)
        with utilities.prefect_test_harness(server_startup_timeout=90):
            database = Path(str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value()).partition("///")[2])
            if not prefect_tables.exists():
                with (
                    closing(sqlite3.connect(database)) as made,
                    closing(sqlite3.connect(prefect_tables)) as kept,
                ):
                    made.backup(kept)
            yield database
