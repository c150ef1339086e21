import importlib
import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.states import Pending, Scheduled
from prefect.testing.utilities import prefect_test_harness

from flows.deployments import (
    HEARTBEAT_AUTOMATION,
    START_AUTOMATION,
    deployments,
    install_crash_automations,
    skip_missed_runs,
    start_again,
)
from flows.sweep_orphans import sweep_orphans
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks import mlflow_store, run_lifecycle
from tasks.mlflow_names import PROCESS_TAG


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


@pytest.mark.parametrize(("name", "seconds"), [(HEARTBEAT_AUTOMATION, 90), (START_AUTOMATION, 600)])
def test_automations_that_call_dead_runs_crashed_are_installed_once(name, seconds):
    install_crash_automations()
    install_crash_automations()

    with get_client(sync_client=True) as client:
        [automation] = client.read_automations_by_name(name)
    assert automation.trigger.within == timedelta(seconds=seconds)


def test_a_run_that_was_about_to_start_begins_again_and_keeps_nobody_out():
    """A process that is killed between taking a run and starting it leaves it pending, and its place taken."""
    training, *_ = deployments()
    deployment_id = training.apply()
    with get_client(sync_client=True) as client:
        taken = client.create_flow_run_from_deployment(deployment_id)
        client.set_flow_run_state(taken.id, Pending())
        other = client.create_flow_run_from_deployment(deployment_id)

        assert start_again() == 1
        assert start_again() == 0

        assert client.read_flow_run(taken.id).state.is_scheduled()
        # The place is free again.
        assert client.set_flow_run_state(other.id, Pending()).status.value == "ACCEPT"
        for run in (taken, other):
            client.delete_flow_run(run.id)


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
    dead = run_lifecycle.open_run(workspace, run_id="run-1", run_name="run-1", tags={})
    client = mlflow_store.client_of(workspace)
    client.set_tag(dead.mlflow_run_id, PROCESS_TAG, "1 1.00")

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
