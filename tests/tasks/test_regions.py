"""Machines of a run in another region than the default are found, refused beside others, and ended."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from flows.cli import main
from heterps_core.errors import ConfigurationError, LiveFleetError
from infra.ledger.ledger import Ledger
from infra.machines.sweeper import sweep_workspace
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.clusters import end_machines_of, machines_of_run
from tasks.provisioning import check_rentable
from tasks.running.live_fleet import check_no_other_fleet
from tests.infra.builders import bootstrap, moto_ec2, offer, plan
from tests.moto_server import REGION

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
    rent(workspace, lease_minutes=10)


def rent(workspace, *, lease_minutes):
    provider_of(workspace, "aws", region=ELSEWHERE).launch(
        plan(*[offer(region=ELSEWHERE)] * 2),
        run_id="night",
        lease_until=datetime.now(UTC) + timedelta(minutes=lease_minutes),
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


def test_they_are_ended_where_the_ledger_was_deleted(workspace, rented, monkeypatch):
    workspace.ledger_path.unlink()
    monkeypatch.setenv("HETERPS_RUN_STORE", f"s3://bucket/heterps?region={ELSEWHERE}")

    assert end_machines_of(workspace, "night") == 2

    assert num_alive() == 0


def test_without_a_ledger_expired_machines_in_the_region_of_the_run_store_are_ended(workspace, monkeypatch):
    rent(workspace, lease_minutes=-1)
    workspace.ledger_path.unlink()
    monkeypatch.setenv("HETERPS_RUN_STORE", f"s3://bucket/heterps?region={ELSEWHERE}")

    swept = sweep_workspace(workspace, ["aws"])

    assert swept.places == (f"aws in {ELSEWHERE}", f"aws in {REGION}")
    assert num_alive() == 0


def test_doctor_looks_in_the_default_region_and_in_those_of_the_ledger(
    workspace, rented, monkeypatch, capsys
):
    monkeypatch.setenv("HETERPS_HOME", str(workspace.root))

    main(["doctor", "--provider", "aws", "--json"])

    found = {check["what"]: check["found"] for check in json.loads(capsys.readouterr().out)}
    for region in (REGION, ELSEWHERE):
        assert found[f"AWS credentials {region}"] == f"accepted in {region}"
        assert f"AWS image of x86_64 {region}" in found


def test_an_image_that_a_region_lacks_is_reported_with_the_command_that_copies_one(workspace):
    none, one = (provider_of(workspace, "aws", region=region) for region in ("eu-north-1", ELSEWHERE))

    assert none.missing_images().keys() == {"x86_64", "arm64"}
    assert none.missing_images().keys() - one.missing_images().keys() == {"x86_64"}
    with pytest.raises(ConfigurationError, match=f"copy-image --region {ELSEWHERE} --source-region REGION"):
        check_rentable(["cpu-c8g"], provider=one)
