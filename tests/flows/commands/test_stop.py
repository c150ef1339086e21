import threading

import pytest

from flows.cli import main
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from infra.billing.caps import Caps
from infra.ledger.ledger import EndReason, Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import provider_of
from tests.infra.builders import bootstrap, offer, plan
from tests.waiting import wait_for


@pytest.fixture
def run(workspace):
    """A real process that sleeps."""
    with running_cluster(
        provider_of(workspace, "local"),
        plan(offer()),
        run_id="r1",
        bootstrap=bootstrap(workspace.run_folder("r1")),
        ledger=Ledger(workspace.ledger_path),
        caps=Caps(),
        predicted_cost_usd=1.0,
    ):
        yield RunDirectory(str(workspace.run_folder("r1")))


def heterps(capsys, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["heterps", *arguments])
    return main(), capsys.readouterr()


def test_a_run_that_obeys_ends_by_itself(workspace, run, capsys, monkeypatch):
    def obey():
        wait_for(lambda: run.exists(STOP))
        provider_of(workspace, "local").end_run(
            "r1", ledger=Ledger(workspace.ledger_path), reason=EndReason.RUN_ENDED
        )

    worker = threading.Thread(target=obey)
    worker.start()
    status, printed = heterps(capsys, monkeypatch, "stop", "r1")
    worker.join()

    assert status == 0
    assert printed.out.splitlines()[-1] == "run r1 has ended"


def test_a_run_that_hangs_loses_its_machines_after_the_wait(workspace, run, capsys, monkeypatch):
    status, printed = heterps(capsys, monkeypatch, "stop", "r1", "--wait", "0.5")

    assert status == 0
    assert run.exists(STOP)
    assert printed.out.splitlines()[-1] == "run r1 has ended; 1 machines were ended as they were"
    assert provider_of(workspace, "local").list_instances("r1") == ()


def test_a_run_whose_machines_are_ended_at_once_does_not_go_on_with_others(
    workspace, run, capsys, monkeypatch
):
    heterps(capsys, monkeypatch, "stop", "r1", "--wait", "0")

    assert run.exists(STOP)


def test_a_run_without_machines_is_left_alone(workspace, run, capsys, monkeypatch):
    heterps(capsys, monkeypatch, "stop", "r1", "--wait", "0")

    status, printed = heterps(capsys, monkeypatch, "stop", "r1")

    assert status == 0
    assert printed.out.startswith("run r1 has no machines: nothing to stop;")


def test_an_unknown_run_is_refused(workspace, capsys, monkeypatch):
    status, printed = heterps(capsys, monkeypatch, "stop", "r2")

    assert status == 2
    assert "'r2' is not a known run with machines" in printed.err


def test_machines_of_a_run_are_ended_where_the_ledger_was_deleted(workspace, run, capsys, monkeypatch):
    workspace.ledger_path.unlink()

    status, printed = heterps(capsys, monkeypatch, "stop", "latest")

    assert status == 0
    assert printed.out == "the ledger is lost; 1 machines of run r1 were ended as they were\n"
    assert provider_of(workspace, "local").list_instances("r1") == ()
