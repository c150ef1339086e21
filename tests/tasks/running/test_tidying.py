"""What runs leave is deleted when nobody needs it, here and in a bucket; a run that lives keeps every file."""

import contextlib
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from heterps_core.data.history.event_store import STORE_NAME
from heterps_core.data.preparation import prepare_dataset
from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.run_directory import RunDirectory
from infra.ledger.ledger import EndReason, Ledger
from infra.workspace import Workspace
from tasks.records.mlflow_store import _make_store, client_of
from tasks.running import run_lifecycle
from tasks.running.live_fleet import only_fleet
from tasks.running.tidying import drop_what_resuming_needs, tidy_events, tidy_runs
from tests.heterps_core.data.history.event_rows import (
    draw_events,
    draw_rows,
    histories,
    joined,
    schema_of,
    write,
)
from tests.infra.builders import offer, plan
from tests.s3_server import bucket_location

pytestmark = pytest.mark.slow

NOW = datetime.now(UTC)
MONTH_AGO = NOW - timedelta(days=30)

FILES = {
    "parameters.json": 50,
    "explanation.json": 60,
    "storage.json": 70,
    "job.json": 80,
    "reserve": 300,
    "checkpoints/00000200/manifest.json": 10,
    "checkpoints/00000200/__0_0.distcp": 4_000,
    "start_model/model.safetensors": 2_000,
    "data/rows-00000.parquet": 1_000,
    "nodes/0/workers.log": 90,
}
"""Bytes of each file of a run."""

STAYS = {"explanation.json", "storage.json"}
NUM_BYTES_REMOVED = sum(size for name, size in FILES.items() if name not in STAYS)


@pytest.fixture(scope="module")
def empty_records(tmp_path_factory):
    """MLflow's database without a run; its tables take a second to make."""
    workspace = Workspace(root=tmp_path_factory.mktemp("records")).create()
    _make_store(workspace)
    return workspace.tracking_path


@pytest.fixture
def workspace(empty_records, tmp_path, monkeypatch):
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)
    workspace = Workspace(root=tmp_path / "home").create()
    shutil.copy(empty_records, workspace.tracking_path)
    return workspace


def write_run(run: RunDirectory) -> RunDirectory:
    for name, size in FILES.items():
        run.write_bytes(name, bytes(size))
    return run


def add_run(workspace, run_id, *, days_ago=None, status="FAILED"):
    """A run with all files, and a record that ended days ago, or has not where that is None."""
    tracked = run_lifecycle.open_run(workspace, run_id=run_id, run_name=run_id, tags={})
    if days_ago is not None:
        ended_at = NOW - timedelta(days=days_ago)
        client_of(workspace).set_terminated(
            tracked.mlflow_run_id, status, end_time=int(ended_at.timestamp() * 1_000)
        )
    write_run(RunDirectory(str(workspace.run_folder(run_id))))


def add_machine(workspace, run_id, *, provider="local", ended_days_ago=None):
    """A machine in the ledger that was launched 50 days ago, and has ended or not."""
    ledger, launched_at = Ledger(workspace.ledger_path), NOW - timedelta(days=50)
    (request,) = plan(offer()).node_requests()
    ledger.intend(run_id, provider, request, at=launched_at)
    ledger.launched(run_id, request.node_id, provider_instance_id=f"i-{run_id}", at=launched_at)
    if ended_days_ago is not None:
        ended_at = NOW - timedelta(days=ended_days_ago)
        ledger.ended(run_id, request.node_id, reason=EndReason.RUN_ENDED, at=ended_at)


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def whys(tidied):
    return tidied.kept


@contextlib.contextmanager
def a_place(kind, tmp_path, monkeypatch):
    if kind == "bucket":
        with bucket_location(monkeypatch) as location:
            yield location
    else:
        yield str(tmp_path / "run")


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_finished_run_drops_what_only_resuming_needs(kind, tmp_path, monkeypatch):
    with a_place(kind, tmp_path, monkeypatch) as location:
        run = write_run(RunDirectory(location))

        drop_what_resuming_needs(run)
        drop_what_resuming_needs(run)

        expected = {"parameters.json", "explanation.json", "storage.json", "job.json", "nodes/0/workers.log"}
        assert {key for key in run.stamps("") if not key.endswith("/")} == expected


def test_what_cannot_be_dropped_is_a_warning_and_no_error(tmp_path, caplog):
    run = RunDirectory(str(tmp_path))
    # A file where a folder is expected is refused by the operating system.
    run.write_bytes("checkpoints", b"")

    drop_what_resuming_needs(run)

    assert f"files for resuming stay in {tmp_path}" in caplog.text


def test_runs_that_ended_long_ago_go_and_others_keep_every_file(workspace):
    add_run(workspace, "old-failed", days_ago=31, status="FAILED")
    add_run(workspace, "old-finished", days_ago=400, status="FINISHED")
    add_run(workspace, "recent", days_ago=29)
    add_run(workspace, "live")

    tidied = tidy_runs(workspace, ended_before=MONTH_AGO)

    assert list(tidied.removed.items()) == [
        ("old-failed", NUM_BYTES_REMOVED),
        ("old-finished", NUM_BYTES_REMOVED),
    ]
    assert files_of(workspace.run_folder("old-failed")) == STAYS
    assert files_of(workspace.run_folder("recent")) == set(FILES)
    assert files_of(workspace.run_folder("live")) == set(FILES)
    assert whys(tidied)["live"] == "is under way, by its record"
    assert whys(tidied)["recent"].startswith("ended after ")
    assert tidied.problems == []

    again = tidy_runs(workspace, ended_before=MONTH_AGO)
    assert again.removed == {}
    assert set(whys(again)) == {"recent", "live"}


def test_a_trial_says_the_same_and_deletes_nothing(workspace):
    add_run(workspace, "old", days_ago=31)
    add_run(workspace, "recent", days_ago=1)

    trial = tidy_runs(workspace, ended_before=MONTH_AGO, is_trial=True)

    assert files_of(workspace.run_folder("old")) == set(FILES)
    assert tidy_runs(workspace, ended_before=MONTH_AGO) == trial


def test_a_run_without_files_that_others_read_leaves_no_folder(workspace):
    add_run(workspace, "old", days_ago=31)
    for name in STAYS:
        (workspace.run_folder("old") / name).unlink()

    tidy_runs(workspace, ended_before=MONTH_AGO)

    assert not workspace.run_folder("old").exists()


def test_a_run_keeps_its_files_while_the_ledger_has_a_machine_of_it(workspace):
    add_run(workspace, "machine-left", days_ago=40)
    add_machine(workspace, "machine-left.2")
    add_run(workspace, "machine-ended", days_ago=40)
    add_machine(workspace, "machine-ended", ended_days_ago=40)

    tidied = tidy_runs(workspace, ended_before=MONTH_AGO)

    assert list(tidied.removed) == ["machine-ended"]
    assert "ledger does not know to be over" in whys(tidied)["machine-left"]
    assert files_of(workspace.run_folder("machine-left")) == set(FILES)


def test_a_run_that_holds_the_lock_of_the_fleet_keeps_its_files_and_is_not_kept_out(workspace):
    """Such as one that is resumed, in the moment before its record says so."""
    add_run(workspace, "resumed", days_ago=40)
    add_run(workspace, "other", days_ago=40)

    with only_fleet(workspace, "resumed"):
        tidied = tidy_runs(workspace, ended_before=MONTH_AGO)

    assert list(tidied.removed) == ["other"]
    assert files_of(workspace.run_folder("resumed")) == set(FILES)


def test_a_run_keeps_its_files_by_what_ended_last_of_its_record_and_its_machines(workspace):
    for run_id, days_ago, machine_days_ago in [("record", 29, 31), ("machine", 31, 29), ("both", 31, 31)]:
        add_run(workspace, run_id, days_ago=days_ago)
        add_machine(workspace, run_id, ended_days_ago=machine_days_ago)

    assert list(tidy_runs(workspace, ended_before=MONTH_AGO).removed) == ["both"]


def test_where_the_record_was_lost_the_ledger_says_when_a_run_ended(workspace):
    for run_id, days_ago in [("old", 31), ("recent", 29)]:
        write_run(RunDirectory(str(workspace.run_folder(run_id))))
        add_machine(workspace, run_id, ended_days_ago=days_ago)
    write_run(RunDirectory(str(workspace.run_folder("by-hand"))))
    write_run(RunDirectory(str(workspace.runs_directory / "Ann's copy")))

    tidied = tidy_runs(workspace, ended_before=MONTH_AGO)

    assert list(tidied.removed) == ["old"]
    assert whys(tidied)["by-hand"] == "is known neither to the record of runs nor to the ledger"
    assert whys(tidied)["Ann's copy"] == "has a name that no run has"


def test_nothing_is_deleted_where_the_record_does_not_answer(workspace, monkeypatch):
    add_run(workspace, "old", days_ago=31)
    monkeypatch.setenv("HETERPS_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(ConfigurationError, match="must answer, but does not"):
        tidy_runs(workspace, ended_before=MONTH_AGO)

    assert files_of(workspace.run_folder("old")) == set(FILES)


def test_a_run_that_cannot_be_deleted_is_reported_and_the_others_go(workspace, tmp_path):
    add_run(workspace, "a-stuck", days_ago=31)
    add_run(workspace, "b-old", days_ago=31)
    stuck = workspace.run_folder("a-stuck")
    # A name that Arrow cannot read as text.
    (stuck / "checkpoints").rename(stuck / "checkpoints-\udcff")

    tidied = tidy_runs(workspace, ended_before=MONTH_AGO)

    assert list(tidied.removed) == ["b-old"]
    (problem,) = tidied.problems
    assert problem.startswith("run a-stuck: ")


def test_a_run_of_rented_machines_goes_from_the_bucket_too(workspace, monkeypatch):
    with bucket_location(monkeypatch) as location:
        monkeypatch.setenv("HETERPS_RUN_STORE", location)
        store, _, options = location.partition("?")
        add_run(workspace, "rented", days_ago=31)
        add_machine(workspace, "rented", provider="aws", ended_days_ago=31)
        add_run(workspace, "rented-lately", days_ago=2)
        add_machine(workspace, "rented-lately", provider="aws", ended_days_ago=2)
        for run_id in ("rented", "rented-lately", "of-another-workspace"):
            write_run(RunDirectory(f"{store}/{run_id}?{options}"))

        trial = tidy_runs(workspace, ended_before=MONTH_AGO, is_trial=True)
        before = keys_in_bucket()
        tidied = tidy_runs(workspace, ended_before=MONTH_AGO)

        assert tidied == trial
        assert list(tidied.removed.items()) == [("rented", NUM_BYTES_REMOVED + sum(FILES.values()))]
        assert {key for key in before if key.startswith("nightly/rented/")}
        after = {key for key in keys_in_bucket() if not key.endswith("/")}
        assert after == {
            f"nightly/{run_id}/{name}"
            for run_id in ("rented-lately", "of-another-workspace")
            for name in FILES
        }
        assert files_of(workspace.run_folder("rented")) == STAYS


def keys_in_bucket() -> set[str]:
    return {entry["Key"] for entry in boto3.client("s3").list_objects_v2(Bucket="runs").get("Contents", [])}


def test_a_run_store_that_is_not_named_or_cannot_be_is_reported_and_the_rest_is_done(workspace, monkeypatch):
    add_run(workspace, "rented", days_ago=31)
    add_machine(workspace, "rented", provider="aws", ended_days_ago=31)

    unnamed = tidy_runs(workspace, ended_before=MONTH_AGO, is_trial=True)
    monkeypatch.setenv("HETERPS_RUN_STORE", "my-bucket")
    wrong = tidy_runs(workspace, ended_before=MONTH_AGO)

    assert (
        "1 runs on rented machines are in a run store, which HETERPS_RUN_STORE must name"
        in unnamed.problems[0]
    )
    assert wrong.problems[0].startswith("the run store could not be listed: ")
    assert "got 'my-bucket'" in wrong.problems[0]
    assert list(wrong.removed) == ["rented"]
    assert files_of(workspace.run_folder("rented")) == STAYS


def test_a_workspace_that_was_never_used_stays_as_it_is(tmp_path):
    empty = Workspace(root=tmp_path / "nothing")

    assert tidy_runs(empty, ended_before=MONTH_AGO).removed == {}
    assert not empty.root.exists()


def test_sorted_events_go_when_nothing_has_used_them_and_a_prepared_night_keeps_its_own(workspace, tmp_path):
    events, rows = draw_events(300, seed=1), draw_rows(50, seed=1)
    write(events, tmp_path / "events" / "1.parquet")
    out = {"buckets_per_slot": 11, "out_dir": workspace.data_directory / "events-0123456789-2026-11-01"}
    source = write(rows, tmp_path / "rows.parquet")
    prepared = prepare_dataset(source, schema=schema_of(tmp_path / "events"), **out)
    [store] = workspace.data_directory.glob("events-??????????")
    num_bytes = sum(path.stat().st_size for path in store.iterdir())

    assert tidy_events(workspace, used_before=MONTH_AGO).removed == {}
    for folder in (store, out["out_dir"]):
        os.utime(folder / STORE_NAME, (0, 0))
    for is_trial in (True, False):
        assert [*store.iterdir()]
        found = tidy_events(workspace, used_before=MONTH_AGO, is_trial=is_trial)
        assert found.removed == {store.name: num_bytes}

    assert not [*store.iterdir()]
    assert joined(prepared) == histories(rows, events)
    other = {**out, "out_dir": workspace.data_directory / "other"}
    again = prepare_dataset(source, schema=schema_of(tmp_path / "events"), **other)
    assert joined(again) == histories(rows, events)
