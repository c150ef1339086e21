import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.errors import LedgerError, ProvisioningError
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.ledger.ledger_entry import Instance
from infra.machines.sweeper import providers_in_use, reason_to_end, sweep, sweep_workspace
from infra.providers.local import LocalProvider
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, offer, plan

NOW = datetime(2026, 7, 21, tzinfo=UTC)
LIVE = Instance(
    provider_instance_id="i",
    run_id="r",
    node_id="n",
    instance_type="c7i.large",
    launched_at=NOW,
    is_ended=False,
    ended_at=None,
    lease_until=NOW + timedelta(seconds=1),
    is_owner_dead=False,
    terms=None,
)


@pytest.mark.parametrize(
    ("instance", "reason"),
    [
        (LIVE, None),
        (replace(LIVE, lease_until=NOW), None),
        (replace(LIVE, lease_until=NOW - timedelta(seconds=1)), EndReason.LEASE_EXPIRED),
        (replace(LIVE, lease_until=None), None),
        (replace(LIVE, lease_until=None, launched_at=NOW - timedelta(seconds=299)), None),
        (
            replace(LIVE, lease_until=None, launched_at=NOW - timedelta(seconds=300)),
            EndReason.LEASE_UNREADABLE,
        ),
        # By a clock that is two hours behind EC2's it would never be old.
        (replace(LIVE, lease_until=None, launched_at=NOW + timedelta(hours=2)), EndReason.LEASE_UNREADABLE),
        (replace(LIVE, is_owner_dead=True), EndReason.OWNER_DEAD),
    ],
)
def test_why_a_machine_should_end(instance, reason):
    assert reason_to_end(instance, now=NOW, tags_grace_s=300.0) == reason


def test_a_provider_that_shows_leases_at_once_gives_no_grace():
    unreadable = replace(LIVE, lease_until=None)

    assert reason_to_end(unreadable, now=NOW, tags_grace_s=0.0) is EndReason.LEASE_UNREADABLE


@pytest.fixture
def provider(tmp_path):
    return LocalProvider(tmp_path / "leases")


@pytest.fixture
def ledger(tmp_path):
    """Machines that the provider does not have: one launched, one only intended, one of another provider."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    request = plan(offer()).node_requests()[0]
    for run_id, provider in [("gone", "local"), ("never", "local"), ("cloud", "aws")]:
        ledger.intend(run_id, provider, request, at=NOW)
    for run_id in ("gone", "cloud"):
        ledger.launched(run_id, request.node_id, provider_instance_id=f"i-{run_id}", at=NOW)
    return ledger


def states(ledger):
    return {entry.run_id: entry.state for entry in ledger.entries()}


def test_entries_without_a_machine_are_closed_when_they_are_old(provider, ledger):
    swept = sweep(provider, now=NOW + timedelta(seconds=provider.lease_s + 1), ledger=ledger)

    assert [(m.run_id, m.provider_instance_id, m.reason) for m in swept] == [
        ("gone", "i-gone", EndReason.GONE)
    ]
    assert states(ledger) == {
        "gone": EntryState.ENDED,
        "never": EntryState.FAILED,
        "cloud": EntryState.LAUNCHED,
    }


def test_young_entries_are_left_to_the_launch_that_may_be_under_way(provider, ledger):
    assert sweep(provider, now=NOW + timedelta(seconds=1), ledger=ledger) == []
    assert EntryState.FAILED not in states(ledger).values()


def test_providers_with_open_entries_are_swept_by_default(ledger):
    assert providers_in_use(ledger.entries()) == ["aws", "here", "local"]
    ledger.close_run("cloud", reason=EndReason.RUN_ENDED, at=NOW)
    assert providers_in_use(ledger.entries()) == ["here", "local"]


def left_machines(workspace, tmp_path):
    """Start three machines with a lease that is over; return their ledger."""
    ledger = Ledger(workspace.ledger_path)
    LocalProvider.for_workspace(workspace, region="").launch(
        plan(offer(), offer(), offer()),
        run_id="left",
        lease_until=datetime.now(UTC) - timedelta(seconds=1),
        bootstrap=bootstrap(tmp_path / "run"),
        ledger=ledger,
    )
    return ledger


def refuse_updates(ledger, condition):
    """Let SQLite answer updates of some entries as where the disk is full."""
    with closing(sqlite3.connect(ledger.path)) as database, database:
        database.execute(
            f"CREATE TRIGGER full BEFORE UPDATE ON machines WHEN {condition} "
            "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
        )


def test_machines_end_where_the_ledger_cannot_be_read_at_that_moment(tmp_path):
    provider = LocalProvider.for_workspace(workspace := Workspace(root=tmp_path), region="")
    ledger = left_machines(workspace, tmp_path)
    ledger.path.write_bytes(b"no database" * 1_000)

    with pytest.raises(LedgerError, match="not a database") as caught:
        sweep(provider, now=datetime.now(UTC), ledger=ledger)

    assert provider.list_instances() == ()
    assert [str(machine).endswith("; not written down") for machine in caught.value.machines] == [True] * 3


def test_a_ledger_that_fails_in_the_middle_of_a_sweep_loses_no_machine_of_its_report(tmp_path):
    workspace = Workspace(root=tmp_path)
    ledger = left_machines(workspace, tmp_path)
    second = ledger.entries()[1].node_id
    refuse_updates(ledger, f"OLD.node_id = '{second}'")

    swept = sweep_workspace(workspace, ["local"])

    assert LocalProvider.for_workspace(workspace, region="").list_instances() == ()
    assert [(machine.problem, machine.is_booked) for machine in swept.machines] == [
        (None, True),
        (None, False),
        (None, False),
    ]
    (problem,) = swept.problems
    assert "local was swept and is not all written down" in problem
    assert "database or disk is full" in problem
    with pytest.raises(ProvisioningError, match=f"{second}.*; not written down; .*disk is full"):
        swept.check_clean()


@pytest.fixture
def asked_ids(monkeypatch):
    """The ids by which each sweep looks for machines."""
    asked = []
    remembered = LocalProvider.remembered_instances

    def seen(provider, ids):
        asked.append(set(ids))
        return remembered(provider, ids)

    monkeypatch.setattr(LocalProvider, "remembered_instances", seen)
    return asked


def test_machines_are_looked_for_by_id_where_the_ledger_can_be_read_and_not_written(tmp_path, asked_ids):
    ledger = left_machines(workspace := Workspace(root=tmp_path), tmp_path)
    refuse_updates(ledger, "TRUE")

    swept = sweep_workspace(workspace, ["local"])

    assert asked_ids == [{entry.provider_instance_id for entry in ledger.entries()}]
    assert [machine.is_booked for machine in swept.machines] == [False] * 3


@pytest.mark.parametrize("is_cut", [False, True], ids=["between writes", "within a write"])
def test_machines_are_looked_for_by_id_on_a_read_only_disk(tmp_path, small_disk, asked_ids, is_cut):
    """The kernel lets nothing be written after an error of the disk; a write that it cut leaves a journal."""
    (tmp_path / "leases").mkdir()
    (small_disk.path / "leases").symlink_to(tmp_path / "leases")
    workspace = Workspace(root=small_disk.path)
    ledger = left_machines(workspace, tmp_path)
    ids = {entry.provider_instance_id for entry in ledger.entries()}
    if is_cut:
        content = ledger.path.read_bytes()
        subprocess.run([sys.executable, "-c", CUT_WRITE, str(ledger.path)], check=True)
        # As before the pages follow their journal.
        ledger.path.write_bytes(content)
    small_disk.set_read_only()

    swept = sweep_workspace(workspace, ["local"])

    small_disk.set_read_only(False)
    assert asked_ids == [ids]
    assert LocalProvider.for_workspace(workspace, region="").list_instances() == ()
    assert [machine.is_booked for machine in swept.machines] == [False] * 3
    (problem,) = swept.problems
    assert "local was swept and is not all written down: " in problem
    assert "readonly database" in problem
    assert {entry.provider_instance_id for entry in ledger.entries()} == ids


CUT_WRITE = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA cache_size = 1")
columns = ", ".join(row[1] for row in database.execute("PRAGMA table_info(machines)") if row[1] != "run_id")
database.execute("BEGIN IMMEDIATE")
for number in range(100):
    insert = f"INSERT INTO machines (run_id, {columns}) SELECT ?, {columns} FROM machines WHERE run_id = 'left'"
    database.execute(insert, (f"cut-{number}",))
os._exit(0)
"""
"""Dies when the journal of a transaction is on the disk."""
