"""Real processes of this machine, a real ledger, and real locks between processes."""

import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.errors import LiveFleetError, ProvisioningError
from infra.billing.caps import Caps
from infra.ledger.ledger import EntryState, Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.clusters import end_machines_of
from tasks.running import live_fleet
from tasks.running.live_fleet import (
    FleetHolder,
    check_no_other_fleet,
    last_fleet,
    only_fleet,
)
from tests.infra.builders import bootstrap, offer, plan
from tests.waiting import wait_for

LAUNCH_AND_DIE = """
import os, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from infra.ledger.ledger import Ledger
from infra.workspace import Workspace
from infra.providers import provider_of
from tests.infra.builders import bootstrap, offer, plan
from tests.waiting import wait_for
workspace = Workspace(root=Path(sys.argv[1]))
provider_of(workspace, "local").launch(
    plan(offer()),
    run_id="dead",
    lease_until=datetime.now(UTC) + timedelta(seconds=60),
    bootstrap=bootstrap(workspace.run_folder("dead")),
    ledger=Ledger(workspace.ledger_path),
)
os._exit(0)
"""

HOLD_THE_LOCK = """
import sys
import threading
from pathlib import Path
from infra.workspace import Workspace
from tasks.running.live_fleet import only_fleet
with only_fleet(Workspace(root=Path(sys.argv[1])), "starting"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("HETERPS_RUN_STORE", raising=False)
    return Workspace(root=tmp_path / "home").create()


def fleet(workspace, run_id):
    return running_cluster(
        provider_of(workspace, "local"),
        plan(offer()),
        run_id=run_id,
        bootstrap=bootstrap(workspace.run_folder(run_id)),
        ledger=Ledger(workspace.ledger_path),
        caps=Caps(),
        predicted_cost_usd=1.0,
    )


def states(workspace):
    return {entry.run_id: entry.state for entry in Ledger(workspace.ledger_path).entries()}


def test_a_workspace_without_machines_lets_a_run_launch(workspace):
    check_no_other_fleet(workspace, "run-2")
    with only_fleet(workspace, "run-2"), fleet(workspace, "run-2"):
        pass
    with only_fleet(workspace, "run-3"):
        pass


def test_machines_of_another_run_refuse_a_launch_with_the_way_out(workspace):
    with fleet(workspace, "run-1.2"):
        for refuse in (
            lambda: check_no_other_fleet(workspace, "run-2"),
            lambda: only_fleet(workspace, "run-2").__enter__(),
        ):
            with pytest.raises(ProvisioningError) as caught:
                refuse()
            assert str(caught.value).endswith(
                "run run-1 has 1 machine; wait until it has ended, or end it: heterps stop run-1"
            )
        assert len(provider_of(workspace, "local").list_instances("run-1.2")) == 1
    check_no_other_fleet(workspace, "run-2")


def test_machines_of_the_run_itself_are_no_other_fleet(workspace):
    with only_fleet(workspace, "run-1"), fleet(workspace, "run-1.2"):
        check_no_other_fleet(workspace, "run-1")


def test_what_a_dead_process_left_is_ended_and_does_not_refuse(workspace):
    subprocess.run([sys.executable, "-c", LAUNCH_AND_DIE, str(workspace.root)], check=True)
    assert states(workspace) == {"dead": EntryState.LAUNCHED}

    check_no_other_fleet(workspace, "run-2")

    assert provider_of(workspace, "local").list_instances() == ()
    assert states(workspace) == {"dead": EntryState.ENDED}


def test_an_entry_of_which_no_machine_is_left_does_not_refuse(workspace):
    ledger = Ledger(workspace.ledger_path)
    [request] = plan(offer()).node_requests()
    at = datetime.now(UTC) - timedelta(seconds=5)
    ledger.intend("lost", "local", request, at=at)
    ledger.launched("lost", request.node_id, provider_instance_id="lost/x", at=at)

    check_no_other_fleet(workspace, "run-2")


def test_of_two_that_start_at_once_one_is_refused_until_the_other_is_gone(workspace):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(workspace.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(
                ProvisioningError,
                match=r"starting is planning, launching .* wait for it, or cancel its flow run$",
            ),
            only_fleet(workspace, "run-2"),
        ):
            pass
    finally:
        # Killed, not asked: the lock ends with the process.
        holder.kill()
        holder.communicate()
    with only_fleet(workspace, "run-2"):
        pass


def test_a_run_that_may_wait_says_for_whom_and_begins_once_the_other_is_gone(workspace, monkeypatch, caplog):
    monkeypatch.setattr(live_fleet, "POLL_INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO)
    entered = threading.Event()

    def wait_and_enter():
        with only_fleet(workspace, "run-2", flow_run_id="second", max_wait_s=60):
            entered.set()

    waiting = threading.Thread(target=wait_and_enter)
    with only_fleet(workspace, "run-1"), fleet(workspace, "run-1"):
        waiting.start()
        wait_for(lambda: "waiting" in caplog.text)
        assert not entered.wait(0.3)
    waiting.join(timeout=300)

    assert entered.is_set()
    assert (
        caplog.text.count("for at most 1 min, as one fleet at a time may be alive in a workspace, but") == 1
    )
    assert "run run-1 has 1 machine" in caplog.text
    assert last_fleet(workspace).run_id == "run-2"


def test_a_run_that_has_waited_long_enough_is_refused(workspace, monkeypatch):
    monkeypatch.setattr(live_fleet, "POLL_INTERVAL_S", 0.05)

    with (
        only_fleet(workspace, "run-1"),
        pytest.raises(LiveFleetError, match="run-1 is planning"),
        only_fleet(workspace, "run-2", max_wait_s=0.2),
    ):
        pass


def test_a_second_flow_run_of_one_run_is_refused_at_once_and_reported_of_its_machines(workspace, caplog):
    caplog.set_level(logging.INFO)
    with (
        only_fleet(workspace, "run-1", flow_run_id="first"),
        fleet(workspace, "run-1.2"),
        pytest.raises(LiveFleetError, match=r"run run-1 has 1 machine; .*end it: heterps stop run-1$"),
        only_fleet(workspace, "run-1", flow_run_id="second", max_wait_s=60),
    ):
        pass
    assert last_fleet(workspace) == FleetHolder(run_id="run-1", flow_run_id="first")
    assert "waiting" not in caplog.text


def test_machines_that_were_stopped_no_longer_refuse(workspace):
    with fleet(workspace, "run-1"):
        end_machines_of(workspace, "run-1")

        check_no_other_fleet(workspace, "run-2")
