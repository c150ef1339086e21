"""What a person sets of a deployment in Prefect, over starts of the serving process."""

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.schedules import CronSchedule
from prefect.schedules import Cron

from flows.service import kept_settings
from flows.service.deployments import ONE_AT_A_TIME, deployment
from flows.service.kept_settings import register
from flows.sweep_orphans import sweep_orphans
from heterps_core.json_file import replace_json

NAME = "sweep-orphans/sweep-orphans"


@pytest.fixture
def client(prefect_server):
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def start(client, tmp_path):
    """Return a start of the serving process; what is given has changed in the code or the environment since."""

    def start(*, cron="30 4 * * *", timezone="UTC", **settings):
        made = deployment(
            sweep_orphans, schedule=Cron(cron, timezone=timezone), concurrency_limit=ONE_AT_A_TIME, **settings
        )
        register([made], record=tmp_path / "deployments.json")
        # Prefect's `serve` registers what it is given once more.
        made.apply()
        return client.read_deployment_by_name(NAME)

    yield start
    client.delete_deployment(client.read_deployment_by_name(NAME).id)


def of(served):
    [schedule] = served.schedules
    return schedule.schedule.cron, schedule.schedule.timezone, schedule.active


def test_a_pause_lasts(start, client):
    client.pause_deployment(start().id)

    assert start().paused
    assert start(parameters={"new": 1}).paused
    client.resume_deployment(client.read_deployment_by_name(NAME).id)
    assert not start().paused


@pytest.mark.weekly
def test_a_schedule_that_was_switched_off_stays_off(start, client):
    served = start()
    client.update_deployment_schedule(served.id, served.schedules[0].id, active=False)

    assert of(start()) == ("30 4 * * *", "UTC", False)
    assert of(start(timezone="Europe/Berlin")) == ("30 4 * * *", "UTC", False)


@pytest.mark.weekly
def test_another_hour_stays(start, client):
    served = start()
    hour = CronSchedule(cron="0 2 * * *", timezone="UTC")
    client.update_deployment_schedule(served.id, served.schedules[0].id, schedule=hour)

    assert of(start()) == ("0 2 * * *", "UTC", True)
    assert of(start()) == ("0 2 * * *", "UTC", True)


def test_a_schedule_that_was_deleted_does_not_come_back(start, client):
    served = start()
    client.delete_deployment_schedule(served.id, served.schedules[0].id)

    assert start().schedules == []


def test_tags_and_a_limit_that_a_person_has_set_stay(start, client):
    served = start()
    client.update_deployment(served.id, DeploymentUpdate(tags=["mine"], concurrency_limit=3))

    kept = start()

    assert (kept.tags, kept.global_concurrency_limit.limit) == (["mine"], 3)


def test_of_parameters_each_is_the_persons_or_else_the_codes(start, client):
    served = start(parameters={"data": "/clicks", "epochs": 1, "seed": 7})
    client.update_deployment(served.id, DeploymentUpdate(parameters={"data": "/mine", "epochs": 1}))

    kept = start(parameters={"data": "/other", "epochs": 2, "seed": 8, "model": "lr"})

    assert kept.parameters == {"data": "/mine", "epochs": 2, "model": "lr"}


def test_what_nobody_has_set_follows_the_code(start):
    start()

    changed = start(cron="0 6 * * *", timezone="Europe/Berlin", tags=["new"], parameters={"epochs": 2})

    assert of(changed) == ("0 6 * * *", "Europe/Berlin", True)
    assert (changed.tags, changed.parameters) == (["new"], {"epochs": 2})


def test_a_kill_right_after_a_registration_makes_no_setting_a_persons(start, client, monkeypatch):
    start()
    writes = []

    def write_once(path, document):
        writes.append(path)
        if len(writes) == 2:
            raise KeyboardInterrupt
        replace_json(path, document)

    with monkeypatch.context() as patch:
        patch.setattr(kept_settings, "replace_json", write_once)
        with pytest.raises(KeyboardInterrupt):
            start(cron="0 5 * * *", parameters={"epochs": 2}, tags=["new"])

    changed = start(cron="0 6 * * *", parameters={"epochs": 3}, tags=["newer"])

    assert of(changed) == ("0 6 * * *", "UTC", True)
    assert (changed.tags, changed.parameters) == (["newer"], {"epochs": 3})
    assert changed.global_concurrency_limit.limit == 1


@pytest.mark.parametrize("text", ["[1]", '{"a/b": []}', '{"a/b": {"held": 1, "kept": []}}', "damaged"])
def test_notes_of_another_form_count_as_none(tmp_path, text):
    (tmp_path / "deployments.json").write_text(text)

    assert kept_settings._read_notes(tmp_path / "deployments.json") == {}


@pytest.mark.weekly
def test_a_pause_of_before_anything_was_written_down_lasts_too(start, client, tmp_path):
    client.pause_deployment(start().id)
    (tmp_path / "deployments.json").write_text("damaged")

    assert start(timezone="Europe/Berlin").paused
    assert of(start()) == ("30 4 * * *", "UTC", True)


def test_a_deployment_that_was_deleted_begins_anew(start, client):
    served = start()
    client.pause_deployment(served.id)
    client.delete_deployment(served.id)

    assert not start().paused
