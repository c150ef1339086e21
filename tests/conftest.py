"""Rules that hold for every test."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.small_disk import SmallDisk, mounted

# Tests run side by side, and a thread of torch that waits for another one keeps the core that the other needs.
# Before torch is loaded, which reads it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")


FAST_TIER = "not slow"
FAST_TEST_S = 10.0
EXPECTED_SKIPS = (
    "needs a CUDA device",
    "needs CUDA devices",
    "docker has no compose",
    "no docker",
    "no huge pages here",
    "no systemd-analyze",
    "root may write everywhere",
    "a second account needs root",
    "a month has begun since the first night",
    "criteo/",
    "the published traces are not at hand",
    "the recorded",
)
"""Hardware and data that a machine of continuous integration has not."""

UNEXPECTED_SKIPS: list[str] = []


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In the fast tier, let a test fail that takes longer than that allows and is not marked slow.

    What tests share is not counted. Where more wants to run than there are cores, the time allowed grows with it.
    """
    report = yield
    limit_s = FAST_TEST_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    in_fast_tier = item.config.option.markexpr == FAST_TIER and not item.get_closest_marker("slow")
    if in_fast_tier and report.when == "call" and report.passed and report.duration > limit_s:
        report.outcome = "failed"
        report.longrepr = (
            f"a test without the mark slow must end within {limit_s:.0f} s, but took {report.duration:.0f} s; "
            f"make it faster, or mark it @pytest.mark.slow, which only make test-all runs"
        )
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note skips for reasons that are not on the list."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(reason.startswith(known) for known in EXPECTED_SKIPS):
            UNEXPECTED_SKIPS.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where the machine is known to have what the tests need, a skip that is not on the list is a failure."""
    if (
        os.environ.get("HETERPS_REFUSE_SKIPS")
        and UNEXPECTED_SKIPS
        and not hasattr(session.config, "workerinput")
    ):
        print("\nskipped for a reason that tests/conftest.py does not expect:", *UNEXPECTED_SKIPS, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
def prefect_server() -> Iterator[Path]:
    """A Prefect server for all tests of a process, by Prefect's own harness; the value is its database."""
    # Here and not above: most tests do without Prefect, which takes seconds to import.
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL
    from prefect.testing import utilities

    with utilities.prefect_test_harness(server_startup_timeout=90):
        yield Path(str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value()).partition("///")[2])
