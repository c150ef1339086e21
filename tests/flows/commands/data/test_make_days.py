import json
from datetime import date

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from sklearn.metrics import roc_auc_score

from flows.cli import main
from flows.train_ctr import train_ctr
from heterps_core.data.reading.days import partitions_of
from infra.workspace import Workspace
from tests.heterps_core.data.rich_clicks import RICH_SCHEMA, write_rich_rows


def test_days_are_written_and_what_they_can_reach_is_reported(tmp_path, capsys):
    status = main(
        f"make-days {tmp_path} --first-day 2026-11-30 --num-days 2 --rows-per-day 500 --seed 3".split()
    )

    assert status == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "day"
    assert first.split()[:2] == ["2026-11-30", "500"]
    assert 0.7 < float(second.split()[2]) < 0.9
    assert [str(day) for day in partitions_of(tmp_path)] == ["2026-11-30", "2026-12-01"]


def test_a_wrong_day_is_reported_in_one_line(tmp_path, capsys):
    assert main(f"make-days {tmp_path} --first-day 30.11.2026".split()) == 2

    assert "a day must be a date such as 2026-11-21, got '30.11.2026'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.weekly
def test_days_with_all_kinds_of_columns_are_trained_by_their_schema(tmp_path, monkeypatch, prefect_server):
    """All kinds of columns, from nothing to a judged model."""
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    folder = tmp_path / "rich"
    (folder / "_schema.json").parent.mkdir()
    (folder / "_schema.json").write_text(json.dumps(RICH_SCHEMA.to_json()))
    for day in (date(2026, 11, 1), date(2026, 11, 2)):
        path = folder / f"day={day}" / "clicks.parquet"
        write_rich_rows(path, num_rows=3_000, seed=0, number=day.toordinal())
    rows = pq.read_table(folder / "day=2026-11-02" / "clicks.parquet").to_pydict()
    probabilities = np.load(folder / "day=2026-11-02" / "_clicks.parquet.probabilities.npy")
    best_auc = roc_auc_score(rows["click"], probabilities, sample_weight=rows["weight"])
    assert best_auc > 0.75

    run_id = train_ctr(
        data=str(folder),
        schema_file=str(folder / "_schema.json"),
        provider="local",
        device_types=["cpu-c7i"],
        scheduler="exact",
        epochs=4,
        baseline=False,
    )

    client = MlflowClient(Workspace(root=tmp_path / "home").tracking_uri)
    experiment = client.get_experiment_by_name("train-ctr")
    (run,) = client.search_runs([experiment.experiment_id], "tags.`heterps.kind` = 'training'")
    assert run.data.tags["heterps.run_id"] == run_id
    metrics = run.data.metrics
    assert metrics["quality/best_reachable_auc"] == pytest.approx(best_auc, abs=1e-6)
    assert 0.6 < metrics["quality/auc"] < best_auc
    assert metrics["quality/buy/auc"] > 0.6


def test_listens_are_checked_by_the_schema_beside_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    folder = tmp_path / "listens"
    wanted = f"make-days {folder} --listens --first-day 2026-11-30 --num-days 2 --rows-per-day 500"

    assert main(wanted.split()) == 0
    assert main(f"check-data {folder} --schema {folder}.schema.toml".split()) == 0

    assert "500 rows of" in capsys.readouterr().out
