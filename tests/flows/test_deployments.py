import importlib
import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.states import Scheduled
from prefect.testing.utilities import prefect_test_harness

from flows.deployments import CRASH_AUTOMATION, deployments, install_crash_automation, skip_missed_runs
from flows.sweep_orphans import sweep_orphans
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks import tracking


@pytest.fixture(scope="module", autouse=True)
def server():
    with prefect_test_harness(server_startup_timeout=60):
        yield


def test_deployments_are_named_as_their_flows_and_run_one_at_a_time():
    training, sweeper, comparison, prices, profiling, backfill = deployments()

    assert (training.flow_name, training.name) == ("train-ctr", "train-ctr")
    assert (sweeper.flow_name, sweeper.name) == ("sweep-orphans", "sweep-orphans")
    assert (comparison.flow_name, comparison.name) == ("compare-schedulers", "compare-schedulers")
    assert (prices.flow_name, prices.name, prices.schedules) == ("refresh-prices", "refresh-prices", [])
    assert (profiling.flow_name, profiling.name, profiling.schedules) == (
        "profile-devices",
        "profile-devices",
        [],
    )
    assert (backfill.flow_name, backfill.name, backfill.schedules) == ("backfill-ctr", "backfill-ctr", [])
    assert backfill.concurrency_limit == 1
    assert prices.concurrency_limit == profiling.concurrency_limit == 1
    assert training.concurrency_limit == sweeper.concurrency_limit == comparison.concurrency_limit == 1
    assert training.concurrency_options.collision_strategy.value == "CANCEL_NEW"
    [nightly] = training.schedules
    assert (nightly.schedule.cron, nightly.schedule.timezone) == ("30 4 * * *", "UTC")


def test_a_worker_is_offered_the_same_deployments_as_make_serve_runs():
    offered = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text())["deployments"]

    assert {each["name"] for each in offered} == {each.name for each in deployments()}
    for each in offered:
        path, _, function = each["entrypoint"].partition(":")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert getattr(module, function).name == each["name"]


def test_the_crash_automation_is_installed_once():
    install_crash_automation()
    install_crash_automation()

    with get_client(sync_client=True) as client:
        [automation] = client.read_automations_by_name(CRASH_AUTOMATION)
    assert automation.trigger.within == timedelta(seconds=90)


def test_missed_nightly_runs_are_skipped_and_asked_for_runs_are_kept():
    training, *_ = deployments()
    deployment_id = training.apply()
    past = Scheduled(scheduled_time=datetime.now(UTC) - timedelta(hours=1))
    with get_client(sync_client=True) as client:
        asked_for = client.create_flow_run_from_deployment(deployment_id, state=past)
        # What the server's scheduler would have inserted for the last two nights.
        nights = {
            "start_time": str(datetime.now(UTC) - timedelta(days=2)),
            "end_time": str(datetime.now(UTC)),
        }
        client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment_id}, json=nights)

        assert skip_missed_runs() == 2
        assert skip_missed_runs() == 0
        kept = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=["train-ctr"]))
        )

    now = datetime.now(UTC)
    assert [run.id for run in kept if run.expected_start_time < now] == [asked_for.id]


def test_a_sweep_closes_the_record_of_a_dead_run_and_a_second_finds_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    workspace = Workspace(root=tmp_path).create()
    dead = tracking.open_run(workspace, run_id="run-1", run_name="run-1", tags={})
    client = tracking._client(workspace)
    client.set_tag(dead.mlflow_run_id, tracking.PROCESS_TAG, "1 1.00")

    with caplog.at_level(logging.INFO):
        assert sweep_orphans() == 1
        assert sweep_orphans() == 0

    run = client.get_run(dead.mlflow_run_id)
    assert (run.info.status, run.data.tags["heterps.end_reason"]) == (
        "KILLED",
        "the process of the flow is gone",
    )


def test_the_nightly_run_has_the_parameters_that_the_environment_sets(monkeypatch):
    nightly = {"data": "/comes/later", "ready_by": "06:00"}
    monkeypatch.setenv("HETERPS_NIGHTLY", json.dumps(nightly))

    assert deployments()[0].parameters == nightly


@pytest.mark.parametrize(
    ("nightly", "message"),
    [
        ({"dat": "/clicks"}, "'dat' is not a known parameter of train-ctr in HETERPS_NIGHTLY"),
        ({"ready_by": "six"}, "ready_by must be a time of day"),
    ],
)
def test_a_wrong_parameter_of_the_night_is_told_before_anything_is_served(nightly, message, monkeypatch):
    monkeypatch.setenv("HETERPS_NIGHTLY", json.dumps(nightly))

    with pytest.raises(ConfigurationError, match=message):
        deployments()
