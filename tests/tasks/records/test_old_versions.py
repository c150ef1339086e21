"""Old versions go with their files, and none that serves, is gone back to, or is gone on from; a real registry."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest

from flows.cli import main
from infra.workspace import Workspace
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records import mlflow_store, model_registry
from tasks.records.champion import apply_decision, champion_before, champion_of, roll_back
from tasks.records.mlflow_names import Tag
from tasks.records.old_versions import tidy_copies, tidy_versions
from tasks.running import run_lifecycle
from tests.heterps_core.serving.builders import LOGISTIC_MODEL, fit_logistic, raw_columns, write_logistic
from tests.tasks.registry import prepare_clicks
from tests.tracking_server import TrackingServer

pytestmark = pytest.mark.slow

NOW = datetime.now(UTC)
MONTH_AGO = NOW - timedelta(days=30)
NUM_VERSIONS = 8
FIRST_DAYS_AGO = 79
"""Of version 1; one comes every ten days, so that 6, 7 and 8 are younger than a month."""

PATHS_IN_RECORDS = [
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    dataset = prepare_clicks(folder)
    return write_logistic(folder / "model", dataset, fit_logistic(dataset))


def register(workspace, exported, number, *, model=LOGISTIC_MODEL):
    """Register a version of the day it is registered on, as a run that has finished."""
    run = run_lifecycle.open_run(workspace, run_id=f"run-{number}", run_name=f"run-{number}", tags={})
    day = f"{NOW - timedelta(days=days_ago(number)):%Y-%m-%d}"
    version = model_registry.register_model(workspace, run, exported, model=model, data="clicks", day=day)
    run_lifecycle.close_run(workspace, run, status="FINISHED", reason="completed")
    return version


def days_ago(number):
    return FIRST_DAYS_AGO - 10 * (number - 1)


def backdate(database: Path):
    """Let every version be as old as it would be, in MLflow's own table."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for number in range(1, NUM_VERSIONS + 1):
            at_ms = int((NOW - timedelta(days=days_ago(number))).timestamp() * 1_000)
            connection.execute(
                "UPDATE model_versions SET creation_time = ? WHERE version = ?", (at_ms, number)
            )


@pytest.fixture(scope="module")
def registered(exported, tmp_path_factory) -> Path:
    """A workspace with eight versions, none of which is champion yet."""
    workspace = Workspace(root=tmp_path_factory.mktemp("registered") / "home").create()
    for number in range(1, NUM_VERSIONS + 1):
        register(workspace, exported, number)
    backdate(workspace.tracking_path)
    return workspace.root


@pytest.fixture
def workspace(registered, tmp_path) -> Workspace:
    """An own copy; the records name absolute paths, which are led to it."""
    copy = tmp_path / "home"
    shutil.copytree(registered, copy)
    with closing(sqlite3.connect(copy / "mlflow.db")) as connection, connection:
        for table, column in PATHS_IN_RECORDS:
            connection.execute(
                f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (str(registered), str(copy))
            )
    return Workspace(root=copy)


def crown(workspace, *versions):
    """Make versions champion one after the other, each when it was registered."""
    for version in versions:
        before = model_registry.version_called(workspace, "champion")
        decision = PromotionDecision(
            version=version,
            run_id=f"run-{version}",
            champion_version=None if before is None else before.version,
            is_promoted=True,
            why=f"version {version} is wanted by a test",
            gates=(),
            decided_at=NOW.isoformat(),
            confidence=0.95,
            num_rows=1,
            num_clicks=1,
            challenger=None,
            champion=None,
            auc_difference=None,
            log_loss_difference=None,
        )
        apply_decision(workspace, decision)
        since = NOW - timedelta(days=days_ago(int(version)))
        model_registry.tag_version(
            workspace, version, {"heterps.champion_since": since.isoformat(timespec="seconds")}
        )


def names(workspace):
    return sorted(registered.version for registered in model_registry.registered_versions(workspace))


def folders_on_disk(workspace):
    """The runs whose folder of a model is there, by the disk alone."""
    return {path.parents[1].name for path in workspace.artifacts_directory.glob("*/*/artifacts/model")}


def runs_of_versions(workspace):
    return {registered.mlflow_run_id for registered in model_registry.registered_versions(workspace)}


def whys(tidied):
    return tidied.kept


def test_versions_that_nobody_needs_go_with_their_files_and_only_those(workspace):
    crown(workspace, "1", "2", "4", "7")
    before = sum(path.stat().st_size for path in workspace.artifacts_directory.rglob("*") if path.is_file())

    tidied = tidy_versions(workspace, registered_before=MONTH_AGO)

    # 4 was champion until 19 days ago, when 7 followed; 2 is what a second roll-back would lead to.
    assert list(tidied.removed) == ["1", "3", "5"]
    assert names(workspace) == ["2", "4", "6", "7", "8"]
    assert folders_on_disk(workspace) == runs_of_versions(workspace)
    after = sum(path.stat().st_size for path in workspace.artifacts_directory.rglob("*") if path.is_file())
    assert before - after == sum(tidied.removed.values()) > 0
    assert whys(tidied)["7"] == "is called champion"
    assert whys(tidied)["8"] == "is called challenger"
    assert whys(tidied)["6"].startswith("was registered after ")
    assert tidied.problems == []


def test_a_trial_says_the_same_and_deletes_nothing(workspace):
    crown(workspace, "1", "2", "4", "7")
    before = set(workspace.artifacts_directory.rglob("*"))

    trial = tidy_versions(workspace, registered_before=MONTH_AGO, is_trial=True)

    assert names(workspace) == [str(number) for number in range(1, NUM_VERSIONS + 1)]
    assert set(workspace.artifacts_directory.rglob("*")) == before
    assert tidy_versions(workspace, registered_before=MONTH_AGO) == trial
    assert tidy_versions(workspace, registered_before=MONTH_AGO).removed == {}


def test_the_champion_is_loaded_and_a_roll_back_works_after_a_tidy(workspace, exported):
    crown(workspace, "1", "2", "3")
    frame = pd.DataFrame(raw_columns(exported.parent / "clicks.tsv", slice(-20, None)))
    mlflow.set_tracking_uri(workspace.tracking_uri)
    expected = mlflow.pyfunc.load_model("models:/ctr@champion").predict(frame)

    tidy_versions(workspace, registered_before=MONTH_AGO)

    np.testing.assert_array_equal(mlflow.pyfunc.load_model("models:/ctr@champion").predict(frame), expected)
    assert champion_of(workspace).version == "3"
    assert roll_back(workspace).to.version == "2"
    assert champion_of(workspace).version == "2"
    # What was rolled back just now is still there to go forward to.
    tidy_versions(workspace, registered_before=MONTH_AGO)
    assert roll_back(workspace, to="3").to.version == "3"


def test_every_day_of_the_kept_ones_goes_on_from_whom_it_did(workspace):
    crown(workspace, "1", "2", "3", "5", "8")
    roll_back(workspace, to="3")
    crown(workspace, "7")
    days = [date.fromisoformat(f"{NOW - timedelta(days=age):%Y-%m-%d}") for age in range(0, 42, 3)]
    before = {day: champion_before(workspace, day).version for day in days}

    tidy_versions(workspace, registered_before=MONTH_AGO)

    assert {day: champion_before(workspace, day).version for day in days} == before
    assert len(set(before.values())) > 1
    assert "4" not in names(workspace)


def test_what_has_an_alias_or_is_begun_with_or_is_the_newest_of_a_model_stays(workspace, exported):
    register(workspace, exported, 9, model="another")
    model_registry.call_version(workspace, "1", "shadow")
    live = run_lifecycle.open_run(workspace, run_id="live", run_name="live", tags={Tag.START: "2"})
    with closing(sqlite3.connect(workspace.tracking_path)) as connection, connection:
        connection.execute("UPDATE model_versions SET creation_time = 0 WHERE version = 9")
        connection.execute("UPDATE registered_model_aliases SET version = 8 WHERE alias = 'challenger'")

    tidied = tidy_versions(workspace, registered_before=MONTH_AGO)

    assert whys(tidied)["1"] == "is called shadow"
    assert whys(tidied)["2"] == "a run that is under way began with it"
    assert whys(tidied)["9"] == "is the newest of another by its schema"
    assert list(tidied.removed) == ["3", "4", "5"]
    run_lifecycle.close_run(workspace, live, status="FAILED", reason="test")
    assert list(tidy_versions(workspace, registered_before=MONTH_AGO).removed) == ["2"]


def test_files_that_a_kept_version_has_too_stay(workspace, exported):
    """A run that was resumed after it had registered its model has two versions in one folder."""
    with closing(sqlite3.connect(workspace.tracking_path)) as connection, connection:
        ((run_id, source),) = connection.execute(
            "SELECT run_id, source FROM model_versions WHERE version = 8"
        ).fetchall()
        connection.execute(
            "UPDATE model_versions SET run_id = ?, source = ? WHERE version = 3", (run_id, source)
        )

    tidied = tidy_versions(workspace, registered_before=MONTH_AGO)

    assert tidied.removed["3"] == 0
    challenger = model_registry.find_version(workspace, "8")
    assert model_registry.verified_folder(workspace, challenger).is_dir()


def test_a_copy_of_a_workspace_never_deletes_the_files_of_the_first(workspace, tmp_path):
    copy = Workspace(root=tmp_path / "copy")
    shutil.copytree(workspace.root, copy.root)
    before = folders_on_disk(workspace)

    tidied = tidy_versions(copy, registered_before=MONTH_AGO)

    assert tidied.removed == {}
    assert whys(tidied)["1"].startswith("its files are not in this workspace: ")
    assert folders_on_disk(workspace) == before


def test_a_workspace_that_was_never_used_stays_as_it_is(tmp_path):
    empty = Workspace(root=tmp_path / "nothing")

    assert list(tidy_versions(empty, registered_before=MONTH_AGO).removed) == []
    assert list(tidy_copies(empty, versions=()).removed) == []
    assert not empty.root.exists()


def test_the_command_says_what_it_removed_and_why_each_version_stays(workspace, capsys, monkeypatch):
    crown(workspace, "1", "2", "4", "7")
    monkeypatch.setenv("HETERPS_HOME", str(workspace.root))

    monkeypatch.setattr("sys.argv", ["heterps", "tidy"])
    assert main() == 0

    lines = capsys.readouterr().out.splitlines()
    of_versions = lines[lines.index(next(line for line in lines if line.startswith("versions of ctr"))) :]
    assert of_versions[0].startswith("versions of ctr: removed 3 (1, 3, 5), 0.")
    assert "  kept 1 (7): is called champion" in of_versions
    assert any(line.startswith("  kept 2 (2, 4): heterps rollback leads to it") for line in of_versions)


@pytest.mark.weekly
def test_on_a_server_versions_files_and_what_was_fetched_of_them_go(exported, tmp_path, monkeypatch):
    server = TrackingServer(tmp_path)
    try:
        monkeypatch.setenv("HETERPS_TRACKING_URI", server.url)
        workspace = Workspace(root=tmp_path / "home").create()
        for number in (1, 2):
            register(workspace, exported, number)
        fetched = [
            model_registry.verified_folder(workspace, model_registry.find_version(workspace, version))
            for version in ("1", "2")
        ]
        backdate(tmp_path / "store.db")
        kept_run = model_registry.find_version(workspace, "2").mlflow_run_id

        tidied = tidy_versions(workspace, registered_before=MONTH_AGO)
        copies = tidy_copies(workspace, versions=tidied.kept)

        assert list(tidied.removed) == ["1"]
        assert [name.partition("-")[0] for name in copies.removed] == ["1"]
        assert [*tidied.removed.values()] == [*copies.removed.values()] != [0]
        on_server = (tmp_path / "artifacts").glob("*/*/artifacts/model/MLmodel")
        assert [path.parents[2].name for path in on_server] == [kept_run]
        assert [folder.exists() for folder in fetched] == [False, True]
        assert names(workspace) == ["2"]
        assert mlflow_store.runs_of(mlflow_store.client_of(workspace), "run-1")
    finally:
        server.stop()
