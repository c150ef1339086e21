"""Rules that hold for every test."""

from __future__ import annotations

import gc
import gzip
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path

import pytest

from infra.workspace import Workspace
from tasks.records import mlflow_store
from tests.paths import PROJECT
from tests.small_disk import SmallDisk, mounted

# Tests run side by side, and a thread of torch that waits for another one keeps the core that the other needs.
# Before torch is loaded, which reads it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MEMORY_FOLDER = Path("/dev/shm")
SCRATCH_BYTES = 6e9
"""The files of all tiers, with room to spare."""

# Hundreds of databases are made here, and a disk is waited for at each step of each.
has_room = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > SCRATCH_BYTES
if has_room and "TMPDIR" not in os.environ:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY_FOLDER)

FAST_TIER = "not slow"
FAST_TEST_S = 3.0
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
    "no aarch64-linux-gnu-g++",
    "no qemu-aarch64-static",
    "needs PostgreSQL",
    "the recorded",
)
"""Hardware and data that a machine of continuous integration has not."""

LONGEST_FILES = (
    "tests/flows/test_lost_machines.py",
    "tests/flows/test_serving.py",
    "tests/flows/test_whole_runs.py",
    "tests/flows/test_nights.py",
    "tests/flows/test_documents.py",
    "tests/heterps_core/training/test_nodes.py",
    "tests/heterps_core/training/test_swept_training.py",
    "tests/flows/test_faults_of_a_run.py",
    "tests/flows/test_judged_nights.py",
    "tests/flows/test_full_disk.py",
    "tests/heterps_core/training/tuning/test_search.py",
    "tests/heterps_core/training/test_faults.py",
)
"""Of all tiers, the longest first."""

UNEXPECTED_SKIPS: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the cyclic garbage collector, which visits the same million objects again and again.

    These objects live until the session ends, so no later collection visits them either. It takes 40 % of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests into tiers, and long files first, so that the processes that share the files end together.

    Tests with a Prefect server are slow, and so are weekly ones. A test named after a set is refused: sets print in
    another order in each process, and processes that share the tests must find the same names.
    """
    for item in items:
        if "prefect_server" in getattr(item, "fixturenames", ()) or item.get_closest_marker("weekly"):
            item.add_marker(pytest.mark.slow)
        callspec = getattr(item, "callspec", None)
        for value in callspec.params.values() if callspec else ():
            if isinstance(value, set | frozenset) and str(value) in item.name:
                raise pytest.UsageError(
                    f"{item.nodeid} is named after the set {value}, which prints otherwise in another process. "
                    "Give a list or a tuple, or name the case by ids=."
                )
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    longest = {PROJECT / path: len(LONGEST_FILES) - rank for rank, path in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: (-longest.get(item.path, 0), -num_slow[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In the fast tier, let a test fail that takes longer than that allows and is not marked slow.

    What tests share is not counted. The limit grows with the load of a machine that has too few cores for it.
    """
    report = yield
    limit_s = FAST_TEST_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    in_fast_tier = item.config.option.markexpr == FAST_TIER and not item.get_closest_marker("slow")
    if in_fast_tier and report.when == "call" and report.passed and report.duration > limit_s:
        report.outcome = "failed"
        report.longrepr = (
            f"a test without the mark slow must end within {limit_s:.0f} s, but took {report.duration:.0f} s; "
            f"make it faster, or mark it @pytest.mark.slow, which make test leaves out"
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
    gc.unfreeze()
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


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """A folder on a disk, for a test whose files would count as memory where `tmp_path` is."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="heterps-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _copied_stores(shared_folder: Path) -> Iterator[None]:
    """MLflow makes its tables in half a second; workspaces of this process get copies of tables that it made once."""
    made = Workspace(root=shared_folder / "store").create()
    make_store = mlflow_store._make_store

    def copy_store(workspace: Workspace) -> None:
        if workspace.has_own_tracking and not workspace.tracking_path.exists():
            make_store(made)
            shutil.copyfile(made.tracking_path, workspace.tracking_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_store, "_make_store", copy_store)
        yield


@pytest.fixture(scope="session")
def clicks_of_runs(shared_folder: Path) -> str:
    """The file of 2,000 clicks on which whole runs train, whose layers are measured once for all of them."""
    from heterps_core.data.synthetic.click_stream import write_click_stream

    draft, path = shared_folder / f"clicks-{os.getpid()}.tsv", shared_folder / "clicks.tsv"
    write_click_stream(draft, num_rows=2_000, seed=5)
    with suppress(FileExistsError):
        path.hardlink_to(draft)
    return str(path)


@pytest.fixture(scope="session")
def days_of_runs(shared_folder: Path) -> Path:
    """Seven days of 4,000 clicks, all of one week, whose nights share the profile of their layers; one is damaged."""
    from heterps_core.data.synthetic.click_stream import write_click_days

    draft, folder = shared_folder / f"days-{os.getpid()}", shared_folder / "days"
    write_click_days(draft, first_day=date(2026, 11, 2), num_days=7, rows_per_day=4_000, seed=1, drift=0.05)
    damaged = draft / "day=2026-11-07" / "clicks.tsv.gz"
    damaged.write_bytes(gzip.compress(gzip.decompress(damaged.read_bytes())[:100_000] + b"\nnonsense\n"))
    with suppress(OSError):
        draft.rename(folder)
    return folder


@pytest.fixture(scope="module")
def workspace_of_runs(shared_folder: Path) -> Iterator[Callable[[Path], Workspace]]:
    """Makes workspaces that share the measured layers and a law of the exchange of rows."""
    from heterps_core.profiling import profile_cache
    from tests.heterps_core.profiling.builders import keep_replica_path

    profiles = shared_folder / "profiles"
    profiles.mkdir(exist_ok=True)
    keep_replica_path(profiles)

    def make(home: Path) -> Workspace:
        home.mkdir(exist_ok=True)
        (home / profiles.name).symlink_to(profiles)
        return Workspace(root=home).create()

    with pytest.MonkeyPatch.context() as patch:
        # Once is enough, whether other processes had the cores then or not.
        patch.setattr(profile_cache, "_is_busy", lambda: True)
        yield make


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[Path]:
    """A Prefect server for all tests of a process, by Prefect's own harness; the value is its database."""
    # Here and not above: most tests do without Prefect, which takes seconds to import.
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL
    from prefect.testing import utilities

    with utilities.prefect_test_harness(server_startup_timeout=400):
        yield Path(str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value()).partition("///")[2])


@pytest.fixture
def quick_locks(monkeypatch):
    """MLflow waits 20 s for a lock; the wait is not tested."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def shorten(connection, cursor, statement, parameters, context, many):
        return statement.replace("busy_timeout = 20000", "busy_timeout = 200"), parameters

    event.listen(Engine, "before_cursor_execute", shorten, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shorten)
