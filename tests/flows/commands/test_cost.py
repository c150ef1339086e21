import json
from datetime import UTC, datetime, timedelta

import pytest

from flows.cli import main
from infra.ledger.ledger import EndReason, Ledger
from tests.infra.builders import offer, plan


@pytest.fixture
def two_runs(workspace):
    """ "older" had two launches of 100 s at 0.36 USD/hour, "newer" one on AWS of an hour at 3.60."""
    ledger, now = Ledger(workspace.ledger_path), datetime.now(UTC)
    for launch_id, provider, price, seconds in [
        ("older", "local", 0.36, 100),
        ("older.2", "local", 0.36, 100),
        ("newer", "aws", 3.6, 3_600),
    ]:
        (request,) = plan(offer(price_usd_per_hour=price)).node_requests()
        ledger.intend(launch_id, provider, request, at=now)
        ledger.launched(launch_id, request.node_id, provider_instance_id=f"i-{launch_id}", at=now)
        ended_at = now + timedelta(seconds=seconds)
        ledger.ended(launch_id, request.node_id, reason=EndReason.RUN_ENDED, at=ended_at)


def heterps(capsys, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["heterps", *arguments])
    status = main()
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.usefixtures("two_runs")
def test_every_run_has_a_line_and_the_month_a_sum(capsys, monkeypatch):
    status, out, _ = heterps(capsys, monkeypatch, "cost")

    assert status == 0
    # By hand: 200 s of 0.36 USD/hour; an hour of 3.60, an address, and 40 GB of disk at 0.08 USD a month of 730 h.
    assert ["older", "local", "2", "200", "0.020000", "0.000000"] in [
        line.split() for line in out.splitlines()
    ]
    assert f"{3.6 + 40 * 0.08 / 730 + 0.005:.6f}" in out
    assert "at list prices; nothing is charged" in out


@pytest.mark.usefixtures("two_runs")
def test_a_run_has_a_bill_for_each_launch(capsys, monkeypatch):
    status, out, _ = heterps(capsys, monkeypatch, "cost", "older", "--json")

    assert status == 0
    assert [(bill["run_id"], bill["total_usd"]) for bill in json.loads(out)] == [
        ("older", pytest.approx(0.01)),
        ("older.2", pytest.approx(0.01)),
    ]


@pytest.mark.usefixtures("two_runs")
def test_what_failed_launches_cost_has_a_name_of_its_own(capsys, monkeypatch):
    document = json.loads(heterps(capsys, monkeypatch, "cost", "--json")[1])
    [bill] = json.loads(heterps(capsys, monkeypatch, "cost", "newer", "--json")[1])

    # `cost/waste_usd` of a run's record has start-up and waiting too.
    assert {run["failed_launches_usd"] for run in document["runs"]} == {0.0}
    assert bill["failed_launches_usd"] == 0.0
    assert not any("waste_usd" in part for part in (bill, *document["runs"]))


@pytest.mark.usefixtures("two_runs")
def test_an_unknown_run_is_reported_with_the_newest_ones(capsys, monkeypatch):
    status, _, err = heterps(capsys, monkeypatch, "cost", "oldr")

    assert status == 2
    assert "'oldr' is not a known run with machines; known are: newer, older. Did you mean 'older'?" in err


@pytest.mark.usefixtures("workspace")
def test_before_the_first_run_there_is_nothing_to_pay(capsys, monkeypatch):
    assert heterps(capsys, monkeypatch, "cost")[:2] == (0, "no run has had machines yet\n")
