"""`heterps sweep` on EC2 as moto serves it: other regions in the shell, damaged ledgers, a disk that is full."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.providers import provider_of
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, moto_ec2, offer, plan
from tests.moto_server import REGION
from tests.paths import PROJECT

pytestmark = pytest.mark.slow

NUM_MACHINES = 3


@pytest.fixture
def aws(tmp_path, monkeypatch):
    """The environment of a shell that is set to another region than the machines'."""
    for name in ("AWS_PROFILE", "HETERPS_RUN_STORE"):
        monkeypatch.delenv(name, raising=False)
    with moto_ec2() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
        yield


@pytest.fixture
def workspace(aws):
    return Workspace.locate().create()


def rent(workspace, *, lease_s, region=REGION):
    """Launch machines of 0.09 USD/hour."""
    ledger = Ledger(workspace.ledger_path)
    provider_of(workspace, "aws", region=region).launch(
        plan(*[offer(region=region)] * NUM_MACHINES),
        run_id="night",
        lease_until=datetime.now(UTC) + timedelta(seconds=lease_s),
        bootstrap=bootstrap(Path("/srv/heterps/run")),
        ledger=ledger,
    )
    return ledger


def cron(*arguments, env=None):
    program = "import sys; sys.modules['prefect'] = None; from flows.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "sweep", *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )


def num_alive(region=REGION):
    """Count by EC2's own words."""
    pages = boto3.client("ec2", region_name=region).get_paginator("describe_instances").paginate()
    found = [i for page in pages for reservation in page["Reservations"] for i in reservation["Instances"]]
    return sum(instance["State"]["Name"] not in ("shutting-down", "terminated") for instance in found)


def states(workspace):
    return {entry.state for entry in Ledger(workspace.ledger_path).entries()}


def age(ledger, *, by):
    """Make the entries of a ledger look older, as if the launch had been before."""
    at = (datetime.now(UTC) - by).isoformat()
    with ledger._transaction() as database:
        database.execute("UPDATE machines SET intended_at = ?, launched_at = ?", (at, at))


def test_living_machines_are_not_closed_by_a_shell_that_is_set_to_another_region(workspace):
    ledger = rent(workspace, lease_s=600.0)
    age(ledger, by=timedelta(hours=1))

    done = cron()

    assert done.returncode == 0, done.stderr
    assert "found gone" not in done.stdout
    assert states(workspace) == {EntryState.LAUNCHED}
    assert num_alive() == NUM_MACHINES


def test_expired_machines_are_ended_from_a_shell_that_is_set_to_another_region(workspace):
    rent(workspace, lease_s=-1.0)

    done = cron("--provider", "aws")

    assert done.returncode == 0, done.stderr
    assert num_alive() == 0
    assert states(workspace) == {EntryState.ENDED}
    assert f"swept aws in {REGION}" in done.stdout


def test_machines_in_a_region_that_only_the_ledger_names_are_ended(workspace):
    boto3.client("ec2", region_name="eu-west-1").register_image(
        Name="heterps-node-1", Architecture="x86_64", RootDeviceName="/dev/sda1"
    )
    rent(workspace, lease_s=-1.0, region="eu-west-1")

    done = cron()

    assert done.returncode == 0, done.stderr
    assert num_alive("eu-west-1") == 0
    assert states(workspace) == {EntryState.ENDED}


def test_machines_of_a_region_that_does_not_answer_are_not_closed(workspace):
    ledger = rent(workspace, lease_s=600.0)
    age(ledger, by=timedelta(hours=1))
    with ledger._transaction() as database:
        database.execute("UPDATE machines SET region = 'us_east'")

    done = cron()

    assert done.returncode == 5
    assert "aws in us_east was not swept" in done.stderr
    assert states(workspace) == {EntryState.LAUNCHED}


def test_machines_that_were_closed_and_live_are_launched_again(workspace):
    ledger = rent(workspace, lease_s=600.0)
    age(ledger, by=timedelta(hours=1))
    long_ago = datetime.now(UTC) - timedelta(minutes=10)
    for entry in ledger.entries():
        ledger.ended("night", entry.node_id, reason=EndReason.GONE, at=long_ago)

    done = cron("--provider", "aws")

    assert done.returncode == 0, done.stderr
    assert states(workspace) == {EntryState.LAUNCHED}
    assert {entry.ended_at for entry in ledger.entries()} == {None}


@pytest.mark.parametrize("kept_share", [0.0, 0.3, 0.6])
def test_with_a_truncated_ledger_all_expired_machines_are_ended_and_charged(workspace, kept_share):
    ledger = rent(workspace, lease_s=-1.0)
    launched = {(e.provider_instance_id, e.price_usd_per_hour, e.launched_at) for e in ledger.entries()}
    with workspace.ledger_path.open("r+b") as file:
        file.truncate(int(workspace.ledger_path.stat().st_size * kept_share))

    done = cron()

    assert done.returncode == 0, done.stderr
    assert num_alive() == 0
    entries = Ledger(workspace.ledger_path).entries()
    assert {(e.provider_instance_id, e.price_usd_per_hour, e.launched_at) for e in entries} == launched
    assert {entry.state for entry in entries} == {EntryState.ENDED}
    assert "the ledger was damaged and is kept as" in done.stdout
    assert len(list(workspace.root.glob("ledger.sqlite.damaged-*"))) == 1


def test_with_a_truncated_ledger_living_machines_are_written_down_again(workspace):
    rent(workspace, lease_s=600.0)
    with workspace.ledger_path.open("r+b") as file:
        file.truncate(5_000)

    assert cron().returncode == 0

    assert num_alive() == NUM_MACHINES
    assert states(workspace) == {EntryState.LAUNCHED}
    assert len(Ledger(workspace.ledger_path).entries()) == NUM_MACHINES


def test_on_a_full_disk_all_expired_machines_are_ended_and_the_sweep_fails(small_disk, aws, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(small_disk.path / "home"))
    workspace = Workspace.locate().create()
    rent(workspace, lease_s=-1.0)
    small_disk.fill()

    full = cron("--provider", "aws", "--region", REGION)

    assert full.returncode == 5, full.stdout
    assert num_alive() == 0
    assert full.stderr.count("not written down") == NUM_MACHINES
    assert f"aws in {REGION} was swept and is not all written down" in full.stderr
    assert cron("--provider", "aws", "--region", REGION).returncode == 5

    small_disk.empty()
    assert cron("--provider", "aws", "--region", REGION).returncode == 0
    assert states(workspace) == {EntryState.ENDED}
