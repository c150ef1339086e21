"""What becomes of nights and their models: gates, baseline, a back-filled day, the month's cap; all of it real."""

import json
from datetime import UTC, datetime

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import load_text

from flows.backfill_ctr import backfill_ctr
from flows.train_ctr import train_ctr
from heterps_core.errors import BudgetExceededError
from infra.ledger.ledger import Ledger
from infra.workspace import HOME_VARIABLE
from tasks.judging import baseline
from tasks.records.champion import champion_of
from tasks.records.model_registry import registered_versions
from tasks.records.past_runs import past_trainings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

SETTINGS = {
    "provider": "local",
    "scheduler": "exact",
    "budget_evaluations": 64,
    "batch_size": 128,
    "device_types": ["cpu-c7i", "gpu-t4"],
}
GATES = {
    "min_auc_gain": 0.5,
    "max_log_loss_increase": 0.25,
    "max_calibration_increase": 0.75,
    "max_cost_ratio": 3.5,
    "min_positives": 31,
    "promotion_confidence": 0.8,
}


@pytest.fixture(scope="module")
def days(days_of_runs):
    return str(days_of_runs)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, workspace_of_runs):
    home = tmp_path_factory.mktemp("nights") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(home))
        yield workspace_of_runs(home)


@pytest.fixture(scope="module")
def night_without_baseline(workspace, days):
    """A first night whose logistic regression finds no memory."""

    def full(*arguments):
        raise MemoryError("cannot allocate 20 GB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "_design_matrix", full)
        return train_ctr(data=days, day="2026-11-03", **SETTINGS)


@pytest.fixture(scope="module")
def champions_night(workspace, days, night_without_baseline):
    """The next day, with a logistic regression; its model becomes the first champion."""
    return train_ctr(data=days, day="2026-11-04", **SETTINGS)


def record_of(workspace, run_id):
    """Return MLflow's record of a run."""
    [found] = [past for past in past_trainings(workspace, most=20) if past.run_id == run_id]
    return found


def artifact(workspace, run_id, name):
    """Return the text of a file that MLflow keeps with a run."""
    run = MlflowClient(workspace.tracking_uri).get_run(record_of(workspace, run_id).tracked.mlflow_run_id)
    return load_text(f"{run.info.artifact_uri}/{name}")


def decision_of(workspace, run_id):
    """Return the recorded decision on the model of a run, and the bound of each gate by its name."""
    decision = json.loads(artifact(workspace, run_id, "promotion.json"))
    return decision, {gate["name"]: gate["bound"] for gate in decision["gates"]}


def spent_usd(workspace):
    """Return list price times time of all machines of the ledger, by hand."""
    return sum(
        entry.price_usd_per_hour * (entry.ended_at - entry.launched_at).total_seconds() / 3_600
        for entry in Ledger(workspace.ledger_path).entries()
    )


def test_a_failure_of_the_baseline_loses_no_model_and_is_reported(workspace, night_without_baseline):
    assert record_of(workspace, night_without_baseline).status == "FINISHED"
    [registered] = registered_versions(workspace)
    assert registered.run_id == night_without_baseline
    decision, _ = decision_of(workspace, night_without_baseline)
    why = "there is none: it failed with MemoryError: cannot allocate 20 GB"
    assert not decision["is_promoted"]
    assert decision["why"].startswith("there is still no champion, as of version 1 the AUC less the logistic")
    assert why in decision["why"]
    assert "it failed with MemoryError: cannot allocate 20 GB" in artifact(
        workspace, night_without_baseline, "report.txt"
    )


def test_the_next_night_goes_on_from_it_and_its_model_is_held_against_the_baseline(
    workspace, night_without_baseline, champions_night
):
    job = json.loads((workspace.run_folder(champions_night) / "job.json").read_text())["document"]
    assert job["start_model"]["run_id"] == night_without_baseline
    assert champion_of(workspace).run_id == champions_night
    decision, _ = decision_of(workspace, champions_night)
    metrics = record_of(workspace, champions_night).metrics
    [gate] = [each for each in decision["gates"] if each["name"].startswith("AUC less the logistic")]
    difference = metrics["quality/auc"] - metrics["quality/baseline_auc"]
    assert gate["is_met"]
    assert float(gate["remark"].split()[1].rstrip(",")) == pytest.approx(difference, abs=1e-4)
    assert gate["remark"] in decision["why"]


def test_the_cap_of_a_month_counts_the_nights_before_and_other_gates_than_the_default_decide(
    workspace, days, champions_night
):
    night = {"data": days, "day": "2026-11-05", "baseline": False, **SETTINGS}
    planned = record_of(workspace, train_ctr(**night, plan_only=True)).metrics["cost/cloud_usd"]
    entries = Ledger(workspace.ledger_path).entries()
    if {entry.launched_at.month for entry in entries} != {datetime.now(UTC).month}:
        pytest.skip("a month has begun since the first night")
    spent = spent_usd(workspace)
    assert spent > 0

    with pytest.raises(BudgetExceededError, match=r"USD per month.*nothing was launched"):
        train_ctr(**night, max_usd_per_month=planned + spent / 2)

    assert Ledger(workspace.ledger_path).entries() == entries
    run_id = train_ctr(**night, max_usd_per_month=planned + 2 * spent, **GATES)
    assert record_of(workspace, run_id).status == "FINISHED"
    decision, bounds = decision_of(workspace, run_id)
    assert not decision["is_promoted"]
    assert decision["champion_version"] == champion_of(workspace).version
    assert bounds["AUC difference, lower end"] == 0.5
    assert bounds["log-loss difference, upper end"] == 0.25
    champions_error = abs(decision["champion"]["calibration_ratio"] - 1)
    assert bounds["calibration error"] == pytest.approx(champions_error + 0.75)
    assert bounds["cost over the champion's"] == 3.5
    assert bounds["clicks, or rows without one"] == 31
    assert decision["confidence"] == 0.8
    assert champion_of(workspace).run_id == champions_night


def test_a_day_that_is_back_filled_later_is_judged_and_the_champion_stays(workspace, days, champions_night):
    [run_id] = backfill_ctr(first_day="2026-11-02", last_day="2026-11-02", data=days, settings=SETTINGS)

    decision, bounds = decision_of(workspace, run_id)
    assert "version 2" in decision["why"]
    assert "stays champion" in decision["why"]
    assert decision["champion_version"] is None
    assert decision["challenger"]["auc"] == pytest.approx(
        record_of(workspace, run_id).metrics["quality/auc"], abs=1e-6
    )
    assert "AUC less the logistic regression's, upper end" in bounds
    assert champion_of(workspace).run_id == champions_night
