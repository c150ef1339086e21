"""Nights whose tables remember ids: the second one goes on with them, and both tell what came and went."""

import json
from dataclasses import replace
from datetime import date

import pytest
from mlflow import MlflowClient

from flows.train_ctr import train_ctr
from heterps_core.data.features import DynamicIds
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_days
from heterps_core.serving.exported_model import ClickPredictor
from infra.workspace import HOME_VARIABLE, Workspace
from tasks.records.champion import champion_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

SETTINGS = {
    "provider": "local",
    "scheduler": "exact",
    "budget_evaluations": 64,
    "batch_size": 128,
    "device_types": ["cpu-c7i"],
    "planned_rows_per_slot": 1_000_000,
    "baseline": False,
}


def figures_of(workspace, day):
    client = MlflowClient(workspace.tracking_uri)
    experiment = client.get_experiment_by_name("train-ctr")
    (run,) = client.search_runs([experiment.experiment_id], filter_string=f"tags.`heterps.day` = '{day}'")
    return run.data.metrics


@pytest.mark.weekly
def test_a_second_night_goes_on_with_the_ids_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    workspace = Workspace(root=tmp_path / "home").create()
    days = tmp_path / "days"
    write_click_days(days, first_day=date(2026, 11, 1), num_days=3, rows_per_day=3_000, seed=1, drift=0.05)
    schema = replace(CRITEO_SCHEMA, dynamic_ids=DynamicIds(time_to_live_days=1))
    schema_file = tmp_path / "clicks.schema.json"
    schema_file.write_text(json.dumps(schema.to_json()))

    train_ctr(data=str(days), schema_file=str(schema_file), day="2026-11-01", **SETTINGS)
    train_ctr(data=str(days), schema_file=str(schema_file), day="2026-11-02", **SETTINGS)

    first, second = (figures_of(workspace, f"2026-11-0{number}") for number in (1, 2))
    assert first["ids/evicted"] == 0
    assert first["ids/admitted"] == first["ids/with_row"] > 1_000
    # What the first day alone had is forgotten, and what both have kept its row.
    assert second["ids/evicted"] > 1_000
    assert 0 < second["ids/admitted"] < second["ids/with_row"]
    assert second["ids/count"] <= 0.75 * second["ids/rows"]
    champion = champion_of(workspace)
    assert champion is not None
    assert sum(ClickPredictor(champion.folder).features.slot_rows) == second["ids/rows"]
