"""Deadlines by hand: 60 s of planning, 70 s of start-up, 30 s of teardown, 120 s of recording are no training."""

from datetime import UTC, datetime, time
from zoneinfo import ZoneInfo

import pytest

from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from tasks.planning.deadline import (
    _next_time_of_day,
    deadline_for,
    explained_by,
    floor_text,
    floor_with,
    parse_time_of_day,
)

BERLIN = ZoneInfo("Europe/Berlin")
SPRING, AUTUMN = (2026, 3, 29), (2026, 10, 25)
"""Nights on which the clocks of Berlin change: 02:00 to 03:00, and 03:00 back to 02:00, both at 01:00 UTC."""


def deadline(ready_by, now, *, zone=BERLIN, num_samples=1e9, num_epochs=1):
    return deadline_for(ready_by, now=now, zone=zone, num_samples=num_samples, num_epochs=num_epochs)


def test_a_gigabyte_of_model_leaves_four_seconds_less_for_training():
    asked = {
        "now": datetime(2026, 11, 21, 4, 30, tzinfo=UTC),
        "zone": BERLIN,
        "num_samples": 1e9,
        "num_epochs": 1,
    }

    small, large = (deadline_for("06:00", **asked, model_bytes=num_bytes) for num_bytes in (0.0, 1e11))

    assert small.training_seconds - large.training_seconds == pytest.approx(400)
    assert large.after_training_seconds - small.after_training_seconds == pytest.approx(400)


def test_the_floor_is_samples_over_the_time_that_is_left_for_training():
    now = datetime(2026, 11, 21, 4, 30, tzinfo=UTC)

    found = deadline("06:00", now, zone=ZoneInfo("UTC"), num_samples=25_600_000, num_epochs=2)

    # 90 minutes are 5400 s; less 280 s leaves 5120 s for 51.2 million samples.
    assert found.floor_samples_per_s == pytest.approx(10_000)
    assert found.text == "floor 10,000 samples/s, to be ready by 06:00 (2026-11-21 06:00 UTC)"


def test_checkpoints_and_evaluation_take_their_share_of_the_time_that_is_left():
    now = datetime(2026, 11, 21, 4, 30, tzinfo=UTC)

    found = deadline_for(
        "06:00", now=now, zone=ZoneInfo("UTC"), num_samples=25_600_000, num_epochs=2, pause_share=0.1
    )

    assert found.floor_samples_per_s == pytest.approx(11_000)


def test_a_large_model_takes_time_to_be_exported_after_the_training():
    now = datetime(2026, 11, 21, 4, 30, tzinfo=UTC)
    asked = {"now": now, "zone": ZoneInfo("UTC"), "num_samples": 25_600_000, "num_epochs": 2}

    found = deadline_for("06:00", model_bytes=100e9, **asked)

    # 400 s at 0.25 GB/s: 5,120 - 400 s are left for 51.2 million samples.
    assert found.floor_samples_per_s == pytest.approx(51_200_000 / 4_720)
    assert found.seconds_left(now) == pytest.approx(5_400 - 150 - 400)
    with pytest.raises(
        InfeasiblePlanError, match=r"but 2\.2 pass before the first step and 89\.2 after the last"
    ):
        deadline_for("06:00", model_bytes=1.3e12, **asked)


def test_a_plan_on_spot_is_asked_to_be_in_time_after_one_interruption():
    now = datetime(2026, 11, 21, 4, 30, tzinfo=UTC)
    found = deadline("06:00", now, zone=ZoneInfo("UTC"), num_samples=25_600_000, num_epochs=2)
    short = deadline("04:50", now, zone=ZoneInfo("UTC"), num_samples=25_600_000, num_epochs=2)

    # By hand: an interruption takes 600 s of training, 60 s of planning and 130 s of starting; the second night has
    # 1,200 - 280 s in all, so 130 s for everything.
    assert found.spot_floor_samples_per_s == pytest.approx(51_200_000 / (5_120 - 790))
    assert short.spot_floor_samples_per_s == pytest.approx(51_200_000 / 130)


@pytest.mark.parametrize(
    ("now", "hours"),
    [
        (datetime(2026, 3, 28, 0, 0, tzinfo=BERLIN), 6),
        (datetime(*SPRING, 0, 0, tzinfo=BERLIN), 5),
        (datetime(*AUTUMN, 0, 0, tzinfo=BERLIN), 7),
    ],
)
def test_the_nights_on_which_the_clocks_change_are_an_hour_shorter_or_longer(now, hours):
    found = deadline("06:00", now, num_samples=1e6)

    assert found.floor_samples_per_s == pytest.approx(1e6 / (hours * 3600 - 280))
    assert (found.ready_at.hour, found.ready_at.minute) == (6, 0)


@pytest.mark.parametrize(
    ("ready_by", "now", "instant"),
    [
        # 02:30 is skipped: the clocks pass it at the moment of the change.
        ("02:30", datetime(*SPRING, 0, 30, tzinfo=BERLIN), datetime(*SPRING, 1, 0, tzinfo=UTC)),
        # After the change the next 02:30 is that of the next day.
        ("02:30", datetime(*SPRING, 3, 10, tzinfo=BERLIN), datetime(2026, 3, 30, 0, 30, tzinfo=UTC)),
        # 02:30 comes twice: before both the first counts, between them the second.
        ("02:30", datetime(*AUTUMN, 1, 0, tzinfo=BERLIN), datetime(*AUTUMN, 0, 30, tzinfo=UTC)),
        ("02:30", datetime(*AUTUMN, 2, 45, tzinfo=BERLIN), datetime(*AUTUMN, 1, 30, tzinfo=UTC)),
        ("02:30", datetime(*AUTUMN, 2, 45, tzinfo=BERLIN, fold=1), datetime(2026, 10, 26, 1, 30, tzinfo=UTC)),
    ],
)
def test_a_time_that_is_skipped_or_comes_twice_is_the_next_one_that_clocks_pass(ready_by, now, instant):
    found = _next_time_of_day(time.fromisoformat(ready_by), now=now, zone=BERLIN)

    # Times that come twice are equal to none of another zone (PEP 495).
    assert found.astimezone(UTC) == instant


def test_a_time_that_is_past_today_is_meant_for_tomorrow_in_the_zone_of_the_schedule():
    # In Tokyo it is 05:00 of the 22nd already.
    now = datetime(2026, 11, 21, 20, 0, tzinfo=UTC)

    assert deadline("06:00", now, zone=ZoneInfo("Asia/Tokyo")).ready_at == datetime(
        2026, 11, 21, 21, tzinfo=UTC
    )
    assert deadline("04:00", now, zone=ZoneInfo("Asia/Tokyo")).ready_at == datetime(
        2026, 11, 22, 19, tzinfo=UTC
    )


def test_an_impossible_deadline_is_reported_with_its_numbers_and_the_way_out():
    with pytest.raises(InfeasiblePlanError) as caught:
        deadline("06:00", datetime(2026, 11, 21, 5, 56, tzinfo=BERLIN))

    assert str(caught.value) == (
        "no plan meets the deadline: the model must be ready by 2026-11-21 06:00 CET, in 4.0 minutes, but 2.2 pass "
        "before the first step and 2.5 after the last; start earlier, or move ready_by"
    )


def test_the_larger_floor_holds_and_is_named():
    found = deadline(
        "06:00", datetime(2026, 11, 21, 4, 30, tzinfo=UTC), zone=ZoneInfo("UTC"), num_samples=51_200_000
    )

    assert floor_with(found, 2_000.0) == pytest.approx(10_000)
    assert floor_with(found, 12_000.0) == 12_000.0
    assert floor_with(None, 7.0) == 7.0
    assert (
        floor_text(found, 2_000.0) == "; floor 10,000 samples/s, to be ready by 06:00 (2026-11-21 06:00 UTC)"
    )
    assert floor_text(found, 12_000.0) == "; floor 12,000 samples/s as asked, more than ready_by 06:00 needs"
    assert floor_text(None, 7.0) == ""


def test_a_plan_that_fails_by_the_floor_names_the_deadline():
    found = deadline("06:00", datetime(2026, 11, 21, 4, 30, tzinfo=UTC))

    with (
        pytest.raises(
            InfeasiblePlanError, match=r"missed by 10 %; the floor comes from the deadline, .*: move ready_by"
        ) as caught,
        explained_by(found),
    ):
        raise InfeasiblePlanError("throughput floor", "missed by 10 %")
    assert caught.value.constraint == "throughput floor"

    with pytest.raises(InfeasiblePlanError, match=r"missed by 10 %$"), explained_by(None):
        raise InfeasiblePlanError("throughput floor", "missed by 10 %")


@pytest.mark.parametrize("text", ["6:00", "25:00", "06:00:00", "six", "0600"])
def test_a_time_of_day_has_one_form(text):
    with pytest.raises(ConfigurationError, match="ready_by must be a time of day such as 06:00"):
        parse_time_of_day(text)
