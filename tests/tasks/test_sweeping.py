"""What a night that was killed cost stands in its record, whoever closes it."""

from datetime import UTC, datetime, timedelta

import pytest
from mlflow import MlflowClient

from infra.ledger.ledger import EndReason, Ledger
from infra.workspace import Workspace
from tasks.records import mlflow_store
from tasks.records.mlflow_names import Tag
from tasks.running.run_lifecycle import clean_up_run, open_run
from tasks.sweeping import close_dead_records
from tests.infra.builders import offer, plan


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """One store for all tests here, as MLflow takes seconds to write its tables."""
    return Workspace(root=tmp_path_factory.mktemp("home")).create()


@pytest.fixture
def night(workspace):
    """Opens the record of a night whose process is gone; returns its id in MLflow."""

    def open_dead(run_id):
        run = open_run(workspace, run_id=run_id, run_name=run_id, tags={})
        mlflow_store.client_of(workspace).set_tag(run.mlflow_run_id, Tag.PROCESS, "1 1.00")
        return run.mlflow_run_id

    return open_dead


def launched(workspace, launch_id, *, provider="local"):
    """Write a machine of 3.6 USD/hour down that began an hour ago; returns what ends it."""
    ledger, began_at = Ledger(workspace.ledger_path), datetime.now(UTC) - timedelta(hours=1)
    (request,) = plan(offer(price_usd_per_hour=3.6)).node_requests()
    ledger.intend(launch_id, provider, request, at=began_at)
    ledger.launched(launch_id, request.node_id, provider_instance_id=f"i-{launch_id}", at=began_at)

    def end(*, after_s):
        ended_at = began_at + timedelta(seconds=after_s)
        ledger.ended(launch_id, request.node_id, reason=EndReason.OWNER_DEAD, at=ended_at)

    return end


def record_of(workspace, mlflow_run_id):
    return MlflowClient(tracking_uri=workspace.tracking_uri).get_run(mlflow_run_id)


# By hand: 3.6 USD/hour are 0.001 USD a second, of two launches for 100 s and 23.4567 s.
BILLED_USD, IN_FOUR_DIGITS = 0.1234567, 0.1235


def test_the_sweep_records_what_a_killed_night_cost(workspace, night):
    record = night("killed")
    launched(workspace, "killed")(after_s=100)
    launched(workspace, "killed.2")(after_s=23.4567)

    assert close_dead_records.fn(workspace, []) == ["killed"]

    run = record_of(workspace, record)
    assert run.info.status == "KILLED"
    assert run.data.metrics["cost/billed_usd"] == pytest.approx(BILLED_USD)
    assert run.data.metrics["night/usd"] == IN_FOUR_DIGITS


def test_the_hook_of_a_failed_flow_records_the_same(workspace, night):
    flow_run_id = "067e5f3c-0000-7000-8000-1234567890ab"
    run_id = "20261121-0430-567890ab"
    workspace.run_folder(run_id).mkdir(parents=True)
    record = night(run_id)
    launched(workspace, run_id)(after_s=100)
    launched(workspace, f"{run_id}.2")(after_s=23.4567)

    clean_up_run(workspace, flow_run_id, resume_run_id=None, status="FAILED", reason="worker died")

    run = record_of(workspace, record)
    assert run.info.status == "FAILED"
    assert run.data.metrics["cost/billed_usd"] == pytest.approx(BILLED_USD)
    assert run.data.metrics["night/usd"] == IN_FOUR_DIGITS


def test_a_record_stays_open_while_the_night_has_rented_machines_and_then_has_its_whole_cost(
    workspace, night
):
    record = night("rented")
    end = launched(workspace, "rented", provider="aws")

    assert close_dead_records.fn(workspace, []) == []
    assert record_of(workspace, record).info.status == "RUNNING"

    end(after_s=3_600)
    assert close_dead_records.fn(workspace, []) == ["rented"]
    # By hand: an hour, with an address and 40 GB of disk at 0.08 USD a month of 730 h.
    assert record_of(workspace, record).data.metrics["cost/billed_usd"] == pytest.approx(
        3.6 + 0.005 + 40 * 0.08 / 730
    )


def test_what_a_night_of_another_workspace_cost_is_not_known_here(workspace, night):
    record = night("elsewhere")

    assert close_dead_records.fn(workspace, []) == ["elsewhere"]
    assert not {"cost/billed_usd", "night/usd"} & record_of(workspace, record).data.metrics.keys()


def test_a_night_that_was_killed_before_its_launch_cost_nothing(workspace, night):
    record = night("planned")
    workspace.run_folder("planned").mkdir(parents=True)

    assert close_dead_records.fn(workspace, []) == ["planned"]
    assert record_of(workspace, record).data.metrics["cost/billed_usd"] == 0.0
