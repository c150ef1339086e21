import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.states import Pending, Running, Scheduled

from flows.service.deployments import deployments
from flows.service.recovery import (
    HEARTBEAT_AUTOMATION,
    START_AUTOMATION,
    install_crash_automations,
    recover,
)
from flows.service.schedule import DEPLOYMENTS


@pytest.fixture
def engine(tmp_path):
    """Start a process that looks like that of a flow run, and return it once it runs."""
    package = tmp_path / "prefect"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("import sys; print('runs', flush=True); sys.stdin.read()")
    started = []

    def start(flow_run_id):
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect.engine"],
            env={**os.environ, "PYTHONPATH": str(tmp_path), "PREFECT__FLOW_RUN_ID": str(flow_run_id)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tmp_path,
        )
        started.append(process)
        assert process.stdout.readline() == b"runs\n"
        return process

    yield start
    for process in started:
        process.communicate()


def test_every_deployment_is_looked_after():
    assert {each.name for each in deployments()} == set(DEPLOYMENTS)


@pytest.mark.parametrize(("name", "seconds"), [(HEARTBEAT_AUTOMATION, 90), (START_AUTOMATION, 600)])
@pytest.mark.usefixtures("prefect_server")
def test_automations_that_call_dead_runs_crashed_are_installed_once(name, seconds):
    install_crash_automations()
    install_crash_automations()

    with get_client(sync_client=True) as client:
        [automation] = client.read_automations_by_name(name)
    assert automation.trigger.within == timedelta(seconds=seconds)


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_was_about_to_start_begins_again():
    """A process that is killed between taking a run and starting it leaves it pending."""
    training, *_ = deployments()
    deployment_id = training.apply()
    with get_client(sync_client=True) as client:
        taken = client.create_flow_run_from_deployment(deployment_id)
        client.set_flow_run_state(taken.id, Pending())

        recover(is_alone=False)
        assert client.read_flow_run(taken.id).state.is_pending()
        recover(is_alone=True)
        recover(is_alone=True)

        assert client.read_flow_run(taken.id).state.is_scheduled()
        client.delete_flow_run(taken.id)


@pytest.mark.usefixtures("prefect_server")
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

        due = {"before_": str(datetime.now(UTC))}
        wanted = {"flow_runs": {"expected_start_time": due, "deployment_id": {"any_": [str(deployment_id)]}}}
        count = lambda: client.request("POST", "/flow_runs/count", json=wanted).json()  # noqa: E731
        assert count() == 3

        recover(is_alone=False)

        assert count() == 1
        kept = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=["train-ctr"]))
        )

    now = datetime.now(UTC)
    assert [run.id for run in kept if run.expected_start_time < now] == [asked_for.id]


@pytest.mark.usefixtures("prefect_server")
def test_a_run_whose_process_was_killed_with_the_service_is_called_crashed(engine):
    training, *_ = deployments()
    deployment_id = training.apply()
    with get_client(sync_client=True) as client:
        gone, living = (client.create_flow_run_from_deployment(deployment_id) for _ in range(2))
        for run in (gone, living):
            client.set_flow_run_state(run.id, Running(), force=True)
        process = engine(living.id)

        recover(is_alone=True)

        assert client.read_flow_run(gone.id).state.is_crashed()
        assert client.read_flow_run(living.id).state.is_running()
        process.communicate()
        recover(is_alone=True)
        assert client.read_flow_run(living.id).state.is_crashed()
        for run in (gone, living):
            client.delete_flow_run(run.id)
