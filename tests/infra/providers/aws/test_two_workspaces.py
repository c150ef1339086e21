"""Two people in one account: neither sees, books nor ends the machines of the other."""

from datetime import UTC, datetime, timedelta

import pytest

from infra.ledger.ledger import Ledger
from infra.machines.sweeper import sweep_workspace
from infra.providers import provider_of
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, plan
from tests.small_disk import CAN_MOUNT, mounted


@pytest.fixture
def people(server, tmp_path, monkeypatch):
    """Two workspaces, each with a night of its own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HETERPS_AWS_WORKSPACE", raising=False)
    monkeypatch.delenv("HETERPS_AWS_NODE_BOUNDARY", raising=False)
    found = {name: Workspace(root=tmp_path / name).create() for name in ("ann", "ben")}
    for name, workspace in found.items():
        provider_of(workspace, "aws").launch(
            plan(),
            run_id=f"night-of-{name}",
            lease_until=datetime.now(UTC) + timedelta(seconds=600),
            bootstrap=bootstrap(tmp_path / "run"),
            ledger=Ledger(workspace.ledger_path),
        )
    return found


def living(server):
    return {
        tag["Value"]
        for instance in server.instances()
        if instance["State"]["Name"] == "running"
        for tag in instance["Tags"]
        if tag["Key"] == "heterps:run-id"
    }


def test_neither_lists_nor_ends_the_machines_of_the_other(people, server):
    ann, ben = people.values()

    provider = provider_of(ann, "aws")
    assert {each.run_id for each in provider.list_instances()} == {"night-of-ann"}
    assert provider.terminate("night-of-ben") == ()
    assert len(provider.terminate("night-of-ann")) == 2

    assert living(server) == {"night-of-ben"}
    assert {entry.run_id for entry in Ledger(ben.ledger_path).entries()} == {"night-of-ben"}


def test_a_sweep_after_every_lease_ends_and_books_ones_own_alone(people, server, monkeypatch):
    ann, _ = people.values()
    after = datetime.now(UTC) + timedelta(hours=1)
    monkeypatch.setattr(type(provider_of(ann, "aws")), "now", lambda provider: after)

    swept = sweep_workspace(ann, ["aws"])

    assert {machine.run_id for machine in swept.machines} == {"night-of-ann"}
    assert living(server) == {"night-of-ben"}
    assert {entry.run_id for entry in Ledger(ann.ledger_path).entries()} == {"night-of-ann"}


def test_a_drawn_name_stays_and_goes_with_the_folder(tmp_path):
    workspace = Workspace(root=tmp_path / "home")
    name = workspace.cloud_name()

    assert workspace.create().cloud_name() == Workspace(root=workspace.root).cloud_name() == name
    assert name != Workspace(root=tmp_path / "other").create().cloud_name()
    assert name == workspace.cloud_name_path.read_text()


@pytest.mark.skipif(not CAN_MOUNT, reason="mounting a small file system needs root")
def test_on_a_full_or_read_only_disk_the_name_is_read_and_none_is_drawn(tmp_path):
    """A sweep must reach its machines; a new workspace has none."""
    with mounted(tmp_path / "home") as disk:
        workspace = Workspace(root=disk.path)
        name = workspace.cloud_name()
        disk.fill()
        assert workspace.cloud_name() == name
        disk.set_read_only()
        assert workspace.cloud_name() == name
    with mounted(tmp_path / "new") as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            Workspace(root=disk.path).cloud_name()
