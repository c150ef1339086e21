"""Nights on which the clocks change, as a real Prefect server schedules them: each calendar night has one run."""

from datetime import date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.schedules import Cron

from flows.service.deployments import deployment, deployments
from flows.service.schedule import NIGHTLY_TIME, TIMEZONE_VARIABLE
from flows.train_ctr import train_ctr

pytestmark = pytest.mark.usefixtures("prefect_server")

CHANGES = [
    ("Europe/Berlin", date(2026, 10, 25)),
    ("Europe/Berlin", date(2027, 3, 28)),
    ("America/New_York", date(2026, 11, 1)),
    ("America/New_York", date(2027, 3, 14)),
]
"""The clocks go back in autumn and forward in spring, at 03:00 and 02:00 in Berlin, both at 02:00 in New York."""


def scheduled(nightly, *, zone, changed_on):
    """Return when runs are to start in three nights, in the zone: asked for again and again, as the server does."""
    midnight = datetime.combine(changed_on, time(), ZoneInfo(zone))
    since, until = midnight - timedelta(days=1), midnight + timedelta(days=2)
    hours = [since.timestamp() + 600 + 3_600 * hour for hour in (0, *range(23, 31))]
    with get_client(sync_client=True) as client:
        deployment_id = nightly.apply()
        for at in hours:
            asked = {
                "start_time": datetime.fromtimestamp(at, ZoneInfo("UTC")).isoformat(),
                "end_time": until.isoformat(),
            }
            client.request(
                "POST", "/deployments/{id}/schedule", path_params={"id": deployment_id}, json=asked
            )
        runs = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id]))
        )
        for run in runs:
            client.delete_flow_run(run.id)
    starts = sorted(run.expected_start_time.timestamp() for run in runs)
    local = [datetime.fromtimestamp(start, ZoneInfo(zone)) for start in starts]
    return [start for start in local if since.date() <= start.date() <= changed_on + timedelta(days=1)]


def nights_around(day):
    return [day + timedelta(days=offset) for offset in (-1, 0, 1)]


@pytest.mark.parametrize(("zone", "changed_on"), CHANGES)
def test_every_night_has_one_run_at_the_nightly_time(zone, changed_on, monkeypatch):
    monkeypatch.setenv(TIMEZONE_VARIABLE, zone)

    starts = scheduled(deployments()[0], zone=zone, changed_on=changed_on)

    assert [start.date() for start in starts] == nights_around(changed_on)
    assert {f"{start:%H:%M}" for start in starts} == {NIGHTLY_TIME}


@pytest.mark.parametrize(("zone", "changed_on"), CHANGES)
def test_a_time_that_is_skipped_or_comes_twice_has_one_run_too(zone, changed_on):
    """Such as 02:30, which somebody may choose: skipped in spring in both zones, twice in autumn in Berlin."""
    at_half_past_two = deployment(train_ctr, schedule=Cron("30 2 * * *", timezone=zone))

    starts = scheduled(at_half_past_two, zone=zone, changed_on=changed_on)

    assert [start.date() for start in starts] == nights_around(changed_on)
    # In spring it comes 24 hours after the one before, which the clocks call 01:30.
    of_the_change = "01:30" if changed_on.month == 3 else "02:30"
    assert [f"{start:%H:%M}" for start in starts] == ["02:30", of_the_change, "02:30"]
