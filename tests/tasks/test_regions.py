"""Machines of a run in another region than the default are found, refused beside others, and ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from heterps_core.errors import LiveFleetError
from infra.ledger.ledger import Ledger
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.clusters import end_machines_of, machines_of_run
from tasks.running.live_fleet import check_no_other_fleet
from tests.infra.builders import bootstrap, moto_ec2, offer, plan

pytestmark = pytest.mark.slow

ELSEWHERE = "eu-west-1"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("HETERPS_RUN_STORE", "s3://bucket/heterps")
    with moto_ec2() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        boto3.client("ec2", region_name=ELSEWHERE).register_image(
            Name="heterps-node-1", Architecture="x86_64", RootDeviceName="/dev/sda1"
        )
        yield Workspace(root=tmp_path / "home").create()


@pytest.fixture
def rented(workspace):
    """A run with two machines in the other region."""
    provider_of(workspace, "aws", region=ELSEWHERE).launch(
        plan(*[offer(region=ELSEWHERE)] * 2),
        run_id="night",
        lease_until=datetime.now(UTC) + timedelta(minutes=10),
        bootstrap=bootstrap(Path("/srv/heterps/run")),
        ledger=Ledger(workspace.ledger_path),
    )


def num_alive() -> int:
    """Count by EC2's own words."""
    reservations = boto3.client("ec2", region_name=ELSEWHERE).describe_instances()["Reservations"]
    found = [instance for reservation in reservations for instance in reservation["Instances"]]
    return sum(instance["State"]["Name"] not in ("shutting-down", "terminated") for instance in found)


def test_the_machines_of_a_run_are_found_where_they_were_rented(workspace, rented):
    assert len(machines_of_run(workspace, "night")) == num_alive() == 2


def test_another_run_is_refused_while_they_live(workspace, rented):
    with pytest.raises(LiveFleetError, match="night"):
        check_no_other_fleet(workspace, "another")

    check_no_other_fleet(workspace, "night")


@pytest.mark.parametrize("kept_share", [1.0, 0.6])
def test_they_are_ended_by_the_run_s_id_alone(workspace, rented, kept_share):
    with workspace.ledger_path.open("r+b") as file:
        file.truncate(int(workspace.ledger_path.stat().st_size * kept_share))

    end_machines_of(workspace, "night")

    assert num_alive() == 0
