"""A night with rows that point to a table of events, as a person runs it: check, train, predict."""

import json

import deltalake
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from flows.cli import main
from flows.train_ctr import train_ctr
from infra.workspace import HOME_VARIABLE
from tests.heterps_core.data.history.event_rows import draw_events, draw_rows, schema_of, write

SETTINGS = {
    "provider": "local",
    "scheduler": "exact",
    "budget_evaluations": 64,
    "batch_size": 128,
    "model": "din",
    "device_types": ["cpu-c7i"],
    "baseline": False,
}
EVENTS = draw_events(4_000, seed=3)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Rows, and a schema with events in a table of two versions."""
    monkeypatch.chdir(tmp_path)
    rows = write(draw_rows(3_000, seed=3), tmp_path / "rows.parquet")
    for part in (EVENTS[:2_000], EVENTS[2_000:]):
        deltalake.write_deltalake(str(tmp_path / "events"), part, mode="append")
    schema = tmp_path / "views.schema.json"
    schema.write_text(json.dumps(schema_of(f"delta://{tmp_path}/events").to_json()))
    return str(rows), str(schema)


def test_check_data_says_that_the_events_cannot_be_used(source, tmp_path, capsys):
    rows, schema = source
    assert main(["check-data", rows, "--schema", schema]) == 0

    nowhere = schema_of(tmp_path / "nowhere").to_json()
    (tmp_path / "views.schema.json").write_text(json.dumps(nowhere))

    assert main(["check-data", rows, "--schema", schema]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_night_trains_records_its_events_and_predicts_by_the_newest(
    source, tmp_path, monkeypatch, workspace_of_runs, prefect_server
):
    rows, schema = source
    workspace = workspace_of_runs(tmp_path / "home")
    monkeypatch.setenv(HOME_VARIABLE, str(workspace.root))

    train_ctr(data=rows, schema_file=schema, **SETTINGS)

    client = MlflowClient(workspace.tracking_uri)
    experiment = client.get_experiment_by_name("train-ctr")
    (run,) = client.search_runs([experiment.experiment_id], filter_string="tags.`heterps.provider` = 'local'")
    (found,) = run.inputs.dataset_inputs
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "history")]
    recorded = json.loads(found.dataset.source)
    assert (found.dataset.source_type, recorded["snapshot"], recorded["num_files"]) == ("delta", "1", 2)
    assert main(["predict", rows, "-o", "out.parquet", "--version", "1"]) == 0
    assert pq.read_table("out.parquet").num_rows == 3_000
