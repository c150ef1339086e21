"""A night on this very machine: planned for its cores, trained by as many workers, at the price of the inventory."""

import json
from statistics import fmean

import pytest

from flows.command_line import run_here
from flows.parameters import TrainParameters
from heterps_core.errors import BudgetExceededError
from heterps_core.machine import num_cores
from infra.inventory import inventory_path, inventory_text
from infra.ledger.ledger import EntryState, Ledger
from infra.providers import get_provider
from infra.workspace import HOME_VARIABLE
from tasks.clusters import bills_of_run
from tasks.reports.bills import bill_text

SETTINGS = {"provider": "here", "batch_size": 128, "scheduler": "exact", "baseline": False}


@pytest.fixture
def workspace(tmp_path, workspace_of_runs, monkeypatch, prefect_server):
    workspace = workspace_of_runs(tmp_path / "home")
    monkeypatch.setenv(HOME_VARIABLE, str(workspace.root))
    return workspace


def trained(clicks, **settings):
    return run_here("flows.train_ctr", TrainParameters(data=clicks, **SETTINGS, **settings))


def test_a_night_here_is_planned_for_nothing_where_the_inventory_has_no_price(
    workspace, clicks_of_runs, capsys
):
    run_id = trained(clicks_of_runs, plan_only=True)

    assert "cost 0.0000 USD/hour" in capsys.readouterr().out
    assert Ledger(workspace.ledger_path).entries(run_id=run_id) == ()


def test_a_night_here_trains_what_was_planned_at_the_price_of_the_inventory_and_is_held_against_the_caps(
    workspace, clicks_of_runs, capsys
):
    [machine] = get_provider("here").found_machines(workspace)
    text = inventory_text([machine]).replace("price_usd_per_hour = 0.0", "price_usd_per_hour = 3600")
    inventory_path(workspace).write_text(text)

    with pytest.raises(BudgetExceededError, match="must stay within 100 USD per hour, but takes 3600"):
        trained(clicks_of_runs, max_usd_per_hour=100.0)
    run_id = trained(clicks_of_runs)

    said = capsys.readouterr().out
    assert "dry run" not in said
    assert "minutes and cost 0.00" in said
    entries = Ledger(workspace.ledger_path).entries(run_id=run_id)
    assert {(each.provider, each.device_type, each.state) for each in entries} == {
        ("here", "cpu-here", EntryState.ENDED)
    }
    stages = json.loads((workspace.run_folder(run_id) / "job.json").read_text())["document"]["stages"]
    assert {stage["device_type"] for stage in stages} == {"cpu-here"}
    assert sum(stage["num_replicas"] for stage in stages) <= num_cores()
    [bill] = bills_of_run(workspace, "here", run_id)
    # One USD a second, which its stages share.
    assert sum(entry.price_usd_per_hour for entry in entries) == pytest.approx(3600)
    assert bill.total_usd == pytest.approx(
        fmean((entry.ended_at - entry.launched_at).total_seconds() for entry in entries)
    )
    assert not bill.is_dry_run
    assert f"provider here, charged: {bill.total_usd:.6f} USD" in bill_text(bill)
