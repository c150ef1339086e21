import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from heterps_core.errors import ConfigurationError, LedgerError, ProvisioningError
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.sweeper import sweep
from infra.providers.local import LEASE_SUFFIX, LocalProvider
from infra.providers.local_processes import STATE_VARIABLE, ProcessIdentity
from tests.infra.builders import SLEEP, bootstrap, plan
from tests.paths import PROJECT
from tests.waiting import wait_for


@pytest.fixture
def provider(tmp_path):
    local = LocalProvider(tmp_path / "leases")
    yield local
    for instance in local.list_instances():
        local.terminate(instance.run_id)
    assert tagged_pids(local) == []


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


def launch(provider, ledger, run_bootstrap, *, run_id="r1", lease_s=60.0):
    return provider.launch(
        plan(),
        run_id=run_id,
        lease_until=datetime.now(UTC) + timedelta(seconds=lease_s),
        bootstrap=run_bootstrap,
        ledger=ledger,
    )


def tagged_pids(provider) -> list[int]:
    """Live processes that carry the tag, found without the provider's own code."""
    return list(tagged_sessions(provider))


def tagged_sessions(provider) -> dict[int, int]:
    """The same, each with the process that leads its session."""
    tag = f"{STATE_VARIABLE}={provider.state_directory}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = tag in (folder / "environ").read_bytes().split(b"\0")
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if is_ours and state != "Z":
            found[int(folder.name)] = int(session)
    return found


def leaders_of_two_nodes(provider) -> set[int]:
    """Return the processes that lead the sessions of two nodes, once both show their tags.

    Linux shows no environment of a process while it begins a program, and `Popen` returns a moment before that ends.
    """
    found: set[int] = set()

    def are_both_seen() -> bool:
        found.update(pid for pid, leader in tagged_sessions(provider).items() if pid == leader)
        return len(found) == 2

    wait_for(are_both_seen)
    return found


def test_the_node_sees_its_run_and_runs_in_the_run_directory(provider, ledger, tmp_path):
    program = (
        "import json, os, time\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if 'HETERPS_' in k}), flush=True)\n"
        "time.sleep(100)\n"
    )
    reported = replace(bootstrap(tmp_path / "run", ("-c", program)), run_key=b"key")
    cluster = launch(provider, ledger, reported)
    provider.wait_until_ready(cluster, timeout_s=120.0)
    console = tmp_path / "run" / "nodes" / "stage1-node0" / "console.log"
    wait_for(lambda: console.read_text().endswith("}\n"))

    variables = json.loads(console.read_text())

    assert variables["HETERPS_RUN_ID"] == "r1"
    assert variables["HETERPS_NODE_ID"] == "stage1-node0"
    assert (variables["HETERPS_NODE_IS"], variables["HETERPS_DRY_RUN"]) == ("process", "1")
    assert variables["HETERPS_RUN_DIR"] == str(tmp_path / "run")
    assert bytes.fromhex(variables["HETERPS_RUN_KEY"]) == b"key"
    assert "key" not in repr(reported).replace("run_key", "")


@pytest.mark.slow
def test_ends_children_that_left_the_session_and_children_that_dropped_the_tag(provider, ledger, tmp_path):
    program = textwrap.dedent(
        """
        import os, pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
        other_session = subprocess.Popen(sleep, start_new_session=True)
        without_tag = subprocess.Popen(sleep, env={})
        folder = pathlib.Path(os.environ["HETERPS_RUN_DIR"]) / "nodes" / os.environ["HETERPS_NODE_ID"]
        (folder / "part").write_text(f"{os.getpid()} {other_session.pid} {without_tag.pid}")
        (folder / "part").rename(folder / "pids")
        time.sleep(100)
        """
    )
    launch(provider, ledger, bootstrap(tmp_path / "run", ("-c", program)))
    files = [tmp_path / "run" / "nodes" / f"stage{i}-node0" / "pids" for i in (0, 1)]
    wait_for(lambda: all(file.exists() for file in files))
    identities = [ProcessIdentity.of(int(pid)) for file in files for pid in file.read_text().split()]
    assert all(identity.is_alive() for identity in identities)

    provider.terminate("r1")

    assert len(identities) == 6
    assert not any(identity.is_alive() for identity in identities)
    assert list(provider.state_directory.iterdir()) == []


OWNER = textwrap.dedent(
    """
    import signal, sys, time
    # Whatever runs the tests may ignore these, as nohup does; a user's shell does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from pathlib import Path
    from infra.billing.caps import Caps
    from infra.ledger.ledger import Ledger
    from infra.machines.lifecycle import running_cluster
    from infra.providers.local import LEASE_SUFFIX, LocalProvider
    from tests.infra.builders import bootstrap, plan

    folder = Path(sys.argv[1])
    with running_cluster(
        LocalProvider(folder / "leases"),
        plan(),
        run_id="owned",
        bootstrap=bootstrap(folder / "run"),
        ledger=Ledger(folder / "ledger.sqlite"),
        caps=Caps(),
        predicted_cost_usd=0.0,
    ):
        (folder / "up").touch()
        time.sleep(100)
    """
)


@pytest.fixture
def owner(tmp_path, provider):
    """A separate process that holds a cluster of two nodes."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=PROJECT, start_new_session=True
    )
    wait_for(lambda: (tmp_path / "up").exists() or process.poll() is not None)
    yield process
    process.kill()
    process.wait()


def test_after_a_sigkill_of_the_owner_one_sweep_leaves_no_process(owner, provider, ledger):
    leaders = leaders_of_two_nodes(provider)
    assert sweep(provider, now=datetime.now(UTC), ledger=ledger) == []

    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_for(lambda: leaders <= set(tagged_pids(provider)))  # the nodes outlive their owner
    swept = sweep(provider, now=datetime.now(UTC), ledger=ledger)

    assert [(m.run_id, m.node_id, m.reason) for m in swept] == [
        ("owned", "stage0-node0", EndReason.OWNER_DEAD),
        ("owned", "stage1-node0", EndReason.OWNER_DEAD),
    ]
    assert tagged_pids(provider) == []
    assert {entry.state for entry in ledger.entries(run_id="owned")} == {EntryState.ENDED}
    assert list(provider.state_directory.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_owner_that_is_asked_to_end_takes_its_nodes_along(owner, provider, ledger, signum):
    owner.send_signal(signum)
    owner.wait(timeout=20)

    assert owner.returncode != 0
    assert tagged_pids(provider) == []
    assert {entry.reason for entry in ledger.entries(run_id="owned")} == {EndReason.RUN_ENDED}


def test_processes_whose_lease_file_is_lost_are_found_by_their_tag(provider, ledger, tmp_path):
    launch(provider, ledger, bootstrap(tmp_path / "run"))
    leaders_of_two_nodes(provider)
    for path in provider.state_directory.glob("*/*"):
        path.unlink()

    swept = sweep(LocalProvider(provider.state_directory), now=datetime.now(UTC), ledger=ledger)

    assert [m.reason for m in swept] == [EndReason.LEASE_UNREADABLE] * 2
    assert tagged_pids(provider) == []


def test_a_lease_file_of_an_older_version_keeps_its_node_alive(provider, ledger, tmp_path):
    launch(provider, ledger, bootstrap(tmp_path / "run"))
    for path in provider.state_directory.glob(f"*/*{LEASE_SUFFIX}"):
        lease = json.loads(path.read_text())
        port = lease.pop("port")
        path.write_text(json.dumps({**lease, "run_id": "r1", "rendezvous": f"127.0.0.1:{port}"}))

    assert sweep(provider, now=datetime.now(UTC), ledger=ledger) == []
    assert len(provider.living_nodes("r1")) == 2


@pytest.mark.parametrize("content", ["", "{", '{"lease_until": 3}', "[]"])
def test_a_lease_file_that_cannot_be_read_counts_as_expired(provider, ledger, tmp_path, content):
    launch(provider, ledger, bootstrap(tmp_path / "run"))
    next(provider.state_directory.glob("r1/stage0*")).write_text(content)

    swept = sweep(provider, now=datetime.now(UTC), ledger=ledger)

    assert [(m.node_id, m.reason) for m in swept] == [("stage0-node0", EndReason.LEASE_UNREADABLE)]
    assert [instance.node_id for instance in provider.list_instances()] == ["stage1-node0"]


def test_a_lease_file_that_another_process_removes_while_it_is_looked_at_is_no_machine(provider):
    """A link to nothing is listed and then not there, as such a file is."""
    run_folder = provider.state_directory / "r1"
    run_folder.mkdir(parents=True)
    (run_folder / f"stage0-node0{LEASE_SUFFIX}").symlink_to("removed")

    assert provider.list_instances() == ()


def test_a_node_that_dies_at_once_is_reported_with_its_console(provider, ledger, tmp_path):
    broken = bootstrap(tmp_path / "run", python=str(tmp_path / "no-such-python"))
    cluster = launch(provider, ledger, broken)

    with pytest.raises(ProvisioningError, match=r"(?s)ended before it was up.*must be Python 3\.11"):
        provider.wait_until_ready(cluster, timeout_s=120.0)


def test_a_node_that_ends_after_it_was_up_is_reported_while_another_still_boots(provider, ledger, tmp_path):
    """Its last line has no newline, as of a process that is killed while it prints."""
    cluster = launch(provider, ledger, bootstrap(tmp_path / "run", ("-c", "print('no room', end='')")))
    folders = [tmp_path / "run" / "nodes" / node.node_id for node in cluster.nodes]
    wait_for((folders[0] / "booted").exists)
    wait_for(lambda: not provider.living_nodes("r1"))
    (folders[0] / "console.log").write_text("no room")
    (folders[1] / "booted").unlink(missing_ok=True)

    with pytest.raises(
        ProvisioningError, match=r"stage0-node0 of run r1 ended before all were up.*: no room$"
    ):
        provider.wait_until_ready(cluster, timeout_s=20.0)


def test_a_node_that_does_not_come_up_in_time_is_reported(provider, ledger, tmp_path):
    slow_python = tmp_path / "slow-python"
    slow_python.write_text("#!/bin/sh\nsleep 100\n")
    slow_python.chmod(0o755)
    cluster = launch(provider, ledger, bootstrap(tmp_path / "run", python=str(slow_python)))

    with pytest.raises(ProvisioningError, match="is not up after 0 s"):
        provider.wait_until_ready(cluster, timeout_s=0.2)


def test_a_launch_that_fails_half_way_leaves_nothing_and_says_what_it_cost(provider, ledger, tmp_path):
    nodes = tmp_path / "run" / "nodes"
    nodes.mkdir(parents=True)
    (nodes / "stage1-node0").write_text("a file where the node's folder must be")

    with pytest.raises(
        ProvisioningError, match=r"stage1-node0 could not be started.*what was started is ended"
    ):
        launch(provider, ledger, bootstrap(tmp_path / "run"))

    assert tagged_pids(provider) == []
    assert provider.list_instances() == ()
    first, second = ledger.entries(run_id="r1")
    assert (first.state, first.reason) == (EntryState.ENDED, EndReason.LAUNCH_FAILED)
    assert second.state is EntryState.FAILED


def test_a_node_that_was_up_and_was_forgotten_is_charged_to_the_end_of_its_lease(ledger, tmp_path):
    class ForgetfulProvider(LocalProvider):
        def start(self, requests, launch):
            def started():
                folder = tmp_path / "run" / "nodes" / requests[0].node_id
                folder.mkdir(parents=True)
                (folder / "booted").touch()
                raise ProvisioningError("the home is away")
                yield

            return started()

    provider = ForgetfulProvider(tmp_path / "leases")
    with pytest.raises(ProvisioningError, match="the home is away"):
        launch(provider, ledger, bootstrap(tmp_path / "run"))

    first, second = ledger.entries(run_id="r1")
    assert (first.state, second.state) == (EntryState.ENDED, EntryState.FAILED)
    up_for = first.ended_at - first.launched_at
    assert timedelta(seconds=provider.lease_s) <= up_for < timedelta(seconds=provider.lease_s + 30)


def test_machines_end_though_the_ledger_cannot_be_written(provider, ledger, tmp_path, monkeypatch):
    def failed(*arguments, **keywords):
        raise LedgerError("database or disk is full")

    launch(provider, ledger, bootstrap(tmp_path / "run", SLEEP))
    monkeypatch.setattr(ledger, "entries", failed)

    with pytest.raises(LedgerError, match="disk is full"):
        provider.end_run("r1", ledger=ledger, reason=EndReason.RUN_ENDED)

    assert tagged_pids(provider) == []


def test_a_node_ends_itself_when_its_lifetime_is_over(provider, ledger, tmp_path):
    launch(provider, ledger, bootstrap(tmp_path / "run", SLEEP, lifetime_s=1))

    wait_for(lambda: tagged_pids(provider) == [])

    assert len(provider.list_instances()) == 2  # as on a cloud, until someone ends it


def test_without_arguments_the_bootstrap_script_becomes_the_training_node(provider, ledger, tmp_path):
    echo = tmp_path / "python-that-echoes"
    echo.write_text('#!/bin/sh\necho "called with: $@"\n')
    echo.chmod(0o755)
    launch(provider, ledger, bootstrap(tmp_path / "run", (), python=str(echo)))
    console = tmp_path / "run" / "nodes" / "stage0-node0" / "console.log"

    wait_for(lambda: "called with: -m heterps_core.training.node\n" in console.read_text())


def test_refuses_a_run_directory_that_is_not_on_this_machine(provider, ledger):
    with pytest.raises(ConfigurationError, match="must be a local path, got s3:"):
        launch(provider, ledger, Bootstrap(run_location="s3://b/p", python="python"))


def test_the_tag_of_another_state_directory_is_left_alone(provider, ledger, tmp_path):
    launch(provider, ledger, bootstrap(tmp_path / "run"))
    leaders = leaders_of_two_nodes(provider)
    other = LocalProvider(tmp_path / "other-leases")

    assert other.list_instances() == ()
    assert other.terminate("r1") == ()
    wait_for(lambda: leaders <= set(tagged_pids(provider)))
    assert len(provider.list_instances()) == 2
