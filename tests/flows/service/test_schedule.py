import zoneinfo
from datetime import datetime, time, timedelta

import pytest

from flows.service.schedule import NIGHTLY_CRON, NIGHTLY_TIME, nightly_parameters, nightly_timezone
from heterps_core.errors import ConfigurationError


def test_cron_says_the_time_that_is_shown_to_people():
    minute, hour, *every_day = NIGHTLY_CRON.split()

    assert time(int(hour), int(minute)) == time.fromisoformat(NIGHTLY_TIME)
    assert every_day == ["*", "*", "*"]


def exists_once(local, zone):
    """A skipped hour does not survive the way through UTC, a repeated one has two offsets."""
    first, second = (local.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
    return first.utcoffset() == second.utcoffset()


def test_no_time_zone_skips_or_repeats_the_nightly_hour():
    nights = [datetime(2026, 1, 1, 4, 30) + timedelta(days=day) for day in range(2 * 365)]

    wrong = {
        (name, night)
        for name in zoneinfo.available_timezones()
        for zone in [zoneinfo.ZoneInfo(name)]
        for night in nights
        if not exists_once(night, zone)
    }

    assert wrong == set()


def test_the_check_above_would_find_a_skipped_hour():
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")

    assert not exists_once(datetime(2026, 3, 29, 2, 30), berlin)
    assert not exists_once(datetime(2026, 10, 25, 2, 30), berlin)


@pytest.mark.parametrize(
    ("setting", "zone"), [({}, "UTC"), ({"HETERPS_TIMEZONE": "Asia/Tokyo"}, "Asia/Tokyo")]
)
def test_time_zone_is_utc_or_what_the_environment_says(setting, zone):
    assert nightly_timezone(setting) == zone


def test_a_misspelt_time_zone_is_answered_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"Did you mean .*Europe/Berlin"):
        nightly_timezone({"HETERPS_TIMEZONE": "Europe/Berlino"})


@pytest.mark.parametrize(
    ("setting", "parameters"),
    [
        ({}, {}),
        ({"HETERPS_NIGHTLY": " "}, {}),
        ({"HETERPS_NIGHTLY": '{"data": "/clicks", "epochs": 2}'}, {"data": "/clicks", "epochs": 2}),
    ],
)
def test_parameters_of_the_night_are_what_the_environment_says(setting, parameters):
    assert nightly_parameters(setting) == parameters


@pytest.mark.parametrize("text", ["data=/clicks", '["/clicks"]'])
def test_parameters_that_are_no_json_object_are_refused_with_an_example(text):
    with pytest.raises(ConfigurationError, match="HETERPS_NIGHTLY must be parameters of train-ctr as JSON"):
        nightly_parameters({"HETERPS_NIGHTLY": text})
