"""When a machine that the cloud took back is not charged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from infra.prices.spot_charges import is_free

LAUNCHED = datetime(2026, 11, 26, 1, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "is_preempted", "expected"),
    [(3_599, True, True), (3_600, True, False), (3_599, False, False)],
)
def test_only_what_the_cloud_takes_within_the_first_hour_is_free(seconds, is_preempted, expected):
    ended_at = LAUNCHED + timedelta(seconds=seconds)

    assert is_free(is_preempted=is_preempted, launched_at=LAUNCHED, ended_at=ended_at) is expected
