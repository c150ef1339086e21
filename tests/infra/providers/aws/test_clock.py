"""The time of EC2 goes on from its last answer, by this machine's steady clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import boto3
import pytest

from infra.providers.aws import queries
from infra.providers.aws.queries import TOLERANCE, Ec2Clock
from tests.moto_server import REGION


@pytest.fixture
def clock(monkeypatch):
    """A clock, and the steady seconds that it counts on by."""
    steady = SimpleNamespace(seconds=1_000.0)
    monkeypatch.setattr(queries.time, "monotonic", lambda: steady.seconds)
    key = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("ec2", region_name=REGION, **key)

    ec2 = Ec2Clock(client)

    def answer(at):
        date = format_datetime(at.replace(microsecond=0), usegmt=True)
        ec2._hear(http_response=SimpleNamespace(headers={"Date": date}))

    return ec2, steady, answer


def test_the_time_counts_on_from_an_answer_of_another_time(clock):
    ec2, steady, answer = clock
    answered = datetime(2026, 11, 26, 3, 0, 0, tzinfo=UTC)
    answer(answered)

    times = []
    for seconds in (0.0, 90.0):
        steady.seconds = 1_000.0 + seconds
        times.append(ec2.now())

    assert times == [answered, answered + timedelta(seconds=90)]


def test_an_answer_within_the_tolerance_leaves_this_machines_time(clock):
    ec2, _, answer = clock
    before = datetime.now(UTC)
    answer(before - TOLERANCE / 2)

    assert before <= ec2.now() <= datetime.now(UTC)


def test_an_answer_without_a_date_leaves_the_clock_as_it_was(clock):
    ec2, _, _ = clock

    ec2._hear(http_response=SimpleNamespace(headers={}))

    assert not ec2.is_set
