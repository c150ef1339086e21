"""`import heterps`: what the commands do, with results for a notebook."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime

import pytest

import heterps
from flows.cli import main
from infra.workspace import Workspace
from tasks.records.mlflow_names import TrackedRun
from tasks.records.past_runs import PastRun
from tests.paths import TESTS

pytestmark = pytest.mark.slow

PROBLEM = TESTS / "golden" / "problems" / "five_layers_1.json"


def test_a_plan_is_that_of_the_command_and_shown_as_the_command_shows_it(tmp_path, capsys):
    planned = heterps.plan(PROBLEM, scheduler="cpu-only")

    assert (
        main(["plan", str(PROBLEM), "--scheduler", "cpu-only", "--output", str(tmp_path / "plan.json")]) == 0
    )
    of_command = json.loads((tmp_path / "plan.json").read_text())
    assert planned.result.plan.cost_usd == of_command["cost_usd"]
    assert planned.result.plan.to_json()["stages"] == of_command["stages"]
    table = capsys.readouterr().out.partition("\nsearch ")[0]
    assert str(planned).startswith(table)
    assert "&lt;- slowest" in planned._repr_html_()
    with pytest.raises(FrozenInstanceError):
        planned.problem = None


def test_a_wrong_name_is_an_error_of_heterps():
    with pytest.raises(heterps.HeterpsError, match="'exakt' is not a known scheduler"):
        heterps.plan(PROBLEM, scheduler="exakt")
    with pytest.raises(heterps.HeterpsError, match="'epoch' is not a known parameter"):
        heterps.train(epoch=2)


def test_a_run_is_shown_by_what_is_recorded_of_it_and_what_is_not_is_left_out():
    record = PastRun(
        tracked=TrackedRun(mlflow_run_id="a", experiment_id="1", run_id="20261101-0430-1a2b3c4d"),
        name="night",
        status="FINISHED",
        started_at=datetime(2026, 11, 1, tzinfo=UTC),
        tags={"heterps.model": "ctrdnn"},
        parameters={"model": "ctrdnn", "device_types": "cpu-c7i", "replicas": "1"},
        metrics={"cost/billed_usd": 0.00041, "quality/auc": 0.79456},
    )
    page = heterps.Run(record, report="AUC < 1")._repr_html_()

    assert "<th>plan</th><td>1 x cpu-c7i</td>" in page
    assert "<th>USD</th><td>0.0004</td>" in page
    assert "<th>AUC</th><td>0.7946</td>" in page
    assert "samples/s" not in page
    assert "AUC &lt; 1" in page


def test_a_day_that_is_done_returns_its_run_however_many_have_trained_since(monkeypatch, tmp_path):
    from tasks.running import run_lifecycle

    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    workspace = Workspace.locate().create()
    for run_id in ("20261101-0430-000000aa", "20261102-0430-000000bb"):
        tracked = run_lifecycle.open_run(workspace, run_id=run_id, run_name=run_id, tags={})
        run_lifecycle.close_run(workspace, tracked, status="FINISHED", reason="completed")
    monkeypatch.setattr("flows.command_line.run_here", lambda *_: "20261101-0430-000000aa")

    assert heterps.train().record.run_id == "20261101-0430-000000aa"


def test_importing_it_loads_nothing_heavy():
    program = "import sys, heterps; print(*{'mlflow', 'prefect', 'scipy', 'torch'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "\n"
