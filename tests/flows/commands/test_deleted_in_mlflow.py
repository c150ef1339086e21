"""What a person has deleted in MLflow: each command answers, or says in one line what is missing."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from mlflow import MlflowClient

from flows.cli import main
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.records import mlflow_store, model_registry
from tasks.records.mlflow_names import CHAMPION_ALIAS, EXPERIMENT, REGISTERED_MODEL
from tasks.records.run_record import note_metrics, refused_records, waiting_records
from tasks.running import run_lifecycle
from tests.tasks.registry import FITTED, OLD

pytestmark = pytest.mark.slow


def client_of(workspace):
    return MlflowClient(workspace.tracking_uri, workspace.tracking_uri)


def delete_experiment(workspace):
    client = client_of(workspace)
    client.delete_experiment(client.get_experiment_by_name(EXPERIMENT).experiment_id)


def delete_runs(workspace):
    client = client_of(workspace)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    for run in client.search_runs([experiment.experiment_id]):
        client.delete_run(run.info.run_id)


def delete_model(workspace):
    client_of(workspace).delete_registered_model(REGISTERED_MODEL)


def delete_champion(workspace):
    version = model_registry.version_called(workspace, CHAMPION_ALIAS).version
    client_of(workspace).delete_model_version(REGISTERED_MODEL, version)


def leave_alias_alone(workspace):
    delete_champion(workspace)
    with closing(sqlite3.connect(workspace.tracking_path)) as database, database:
        database.execute(
            "INSERT OR REPLACE INTO registered_model_aliases (name, alias, version) VALUES (?, ?, 77)",
            (REGISTERED_MODEL, CHAMPION_ALIAS),
        )


def delete_alias(workspace):
    client_of(workspace).delete_registered_model_alias(REGISTERED_MODEL, CHAMPION_ALIAS)


def delete_artifacts(workspace):
    shutil.rmtree(workspace.artifacts_directory)


def delete_database(workspace):
    workspace.tracking_path.unlink()


@pytest.fixture
def workspace(models):
    """A workspace whose second version follows the first as champion."""
    for version in (OLD, FITTED):
        model_registry.call_version(models.workspace, version, CHAMPION_ALIAS)
    return models.workspace


DELETIONS = {
    delete_experiment: "the experiment",
    delete_runs: "the runs",
    delete_model: "the registered model",
    delete_champion: "the champion's version",
    leave_alias_alone: "the version of an alias",
    delete_alias: "the alias",
    delete_artifacts: "the artifacts",
    delete_database: "the database",
}

COMMANDS = (
    ["status"],
    ["runs"],
    ["champion"],
    ["rollback"],
    ["cost"],
    ["cost", "latest"],
    ["explain", "latest"],
    ["logs"],
    ["predict", "rows.tsv", "-o", "out.csv"],
    ["tidy"],
)


@pytest.mark.parametrize("delete", DELETIONS, ids=DELETIONS.values())
def test_each_command_answers_or_says_in_one_line_what_is_missing(
    workspace, delete, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HETERPS_HOME", str(workspace.root))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.tsv").write_text("1\t2\n")
    delete(workspace)

    for arguments in COMMANDS:
        status = main(arguments)
        error = capsys.readouterr().err

        assert (status, error.count("\n")) in ((0, 0), (2, 1), (6, 1)), (arguments, error)


# Another process has the database open by its file, as this one has.
@pytest.mark.parametrize("delete", list(DELETIONS)[:-1], ids=list(DELETIONS.values())[:-1])
def test_a_night_can_be_recorded_and_registered_afterwards(workspace, delete):
    folder = model_registry.verified_folder(
        workspace, model_registry.version_called(workspace, CHAMPION_ALIAS)
    )
    kept = workspace.root / "exported"
    shutil.copytree(folder, kept)
    delete(workspace)

    run = run_lifecycle.open_run(workspace, run_id="night-9", run_name="night-9", tags={})
    version = model_registry.register_model(workspace, run, kept, model="lr", data="clicks", day="2026-11-29")
    model_registry.call_version(workspace, version, CHAMPION_ALIAS)

    assert model_registry.version_called(Workspace(root=workspace.root), CHAMPION_ALIAS).run_id == "night-9"


def test_a_run_that_is_deleted_while_it_trains_goes_on_unrecorded(workspace, caplog):
    run = run_lifecycle.open_run(workspace, run_id="night-9", run_name="night-9", tags={})
    client_of(workspace).delete_run(run.mlflow_run_id)

    note_metrics(workspace, run, {"quality/auc": 0.75})
    run_lifecycle.close_run(workspace, run, status="FINISHED", reason="completed")

    assert "MLflow records nothing more of what was deleted there" in caplog.text
    assert (waiting_records(workspace), refused_records(workspace)) == ([], [])


def test_what_must_be_there_and_was_deleted_is_reported_in_one_line(workspace):
    reported = r"was deleted \(.*0123abc.*\); restore it with mlflow runs restore"

    with (
        pytest.raises(ConfigurationError, match=reported),
        mlflow_store.answering_client(workspace) as client,
    ):
        client.get_run("0123abc")
