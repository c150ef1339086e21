"""Slurm's own daemons start, find and end the nodes of a run."""

import json
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from heterps_core.errors import HeterpsError, ProvisioningError
from heterps_core.training.node import NOTICE_S
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.sweeper import sweep
from infra.providers.base import InsufficientCapacityError
from infra.providers.slurm.provider import SlurmProvider
from infra.workspace import Workspace
from tests.heterps_core.training.node_processes import prepare_clicks
from tests.infra.builders import bootstrap, offer, plan
from tests.infra.cluster_homes import Home, launch, listed
from tests.paths import PROJECT
from tests.slurm_cluster import CORES_EACH, slurm_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as started:
        yield started


@pytest.fixture
def commands(cluster, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster
    for job in cluster.queue():
        cluster.asked("scancel", "--quiet", job.partition("+")[0])
    wait_for(lambda: not cluster.queue(), what="an empty queue", poll_s=0.2)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


def larger_than_any_node():
    large = offer()
    return plan(replace(large, instance_type=replace(large.instance_type, vcpus=2 * CORES_EACH)))


def fills_a_node(number_of_nodes):
    whole = offer()
    whole = replace(whole, instance_type=replace(whole.instance_type, vcpus=CORES_EACH))
    return plan(*[whole] * number_of_nodes)


def test_a_node_sees_its_run_and_its_name_and_is_no_dry_run(commands, workspace, ledger, tmp_path):
    variables = "{name: value for name, value in os.environ.items() if 'HETERPS_' in name}"
    # It stays: a job that has ended before it was seen to run is a failed launch.
    program = f"import json, os, signal; print(json.dumps({variables}), flush=True); signal.pause()"
    reported = replace(bootstrap(tmp_path / "run", ("-c", program)), run_key=b"key")
    launch(SlurmProvider(workspace), ledger, reported)
    console = tmp_path / "run" / "nodes" / "stage1-node0" / "console.log"
    wait_for(lambda: console.exists() and console.read_text().endswith("}\n"))

    variables = json.loads(console.read_text())

    assert (variables["HETERPS_RUN_ID"], variables["HETERPS_NODE_ID"]) == ("r1", "stage1-node0")
    assert (variables["HETERPS_NODE_IS"], variables["HETERPS_DRY_RUN"]) == ("process", "0")
    assert bytes.fromhex(variables["HETERPS_RUN_KEY"]) == b"key"
    assert variables["HETERPS_OWN_DISKS"] == "/var/tmp"


def test_the_queue_shows_run_lease_node_and_kind(commands, workspace, ledger, tmp_path):
    launch(SlurmProvider(workspace), ledger, bootstrap(tmp_path / "run"))

    shown = sorted(commands.asked("squeue", "-h", "-o", "%j %k").splitlines())

    assert [re.fullmatch(r"(\S+) heterps-[0-9a-f]{8} r1 20\S+\+00:00", line)[1] for line in shown] == [
        "stage0-node0@c7i.large",
        "stage1-node0@c7i.xlarge",
    ]


def test_settings_of_squeue_in_the_environment_hide_no_machine(
    commands, workspace, ledger, tmp_path, monkeypatch
):
    provider = SlurmProvider(workspace)
    launch(provider, ledger, bootstrap(tmp_path / "run"))
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")

    assert len(provider.list_instances("r1")) == 2


def test_another_workspace_of_the_user_does_not_see_its_machines(commands, workspace, ledger, tmp_path):
    launch(SlurmProvider(workspace), ledger, bootstrap(tmp_path / "run"), planned=plan(offer()))

    assert SlurmProvider(Workspace(root=tmp_path / "other")).list_instances() == ()


def test_each_kind_goes_to_the_nodes_that_its_selector_names(commands, workspace, ledger, tmp_path):
    planned = listed(workspace, "slurm", {"features": "xeon", "partition": "cpu"}, {"features": "arm"})

    cluster = launch(SlurmProvider(workspace), ledger, bootstrap(tmp_path / "run"), planned=planned)

    hosts = dict(line.split() for line in commands.asked("squeue", "-h", "-o", "%j %N").splitlines())
    assert hosts["stage0-node0@kind0.2"] in ("xeon1", "xeon2")
    assert hosts["stage1-node0@kind1.2"] == "arm1"
    assert [node.address for node in cluster.nodes][1] == "127.0.0.15"


def test_a_component_can_end_alone(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace)
    launch(provider, ledger, bootstrap(tmp_path / "run"))
    first, second = sorted(provider.list_instances("r1"), key=lambda each: each.node_id)

    provider.terminate_instances([second])

    assert provider.list_instances("r1") == (first,)


def test_the_end_of_the_first_component_ends_all(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace)
    launch(provider, ledger, bootstrap(tmp_path / "run"))

    provider.terminate_instances([min(provider.list_instances("r1"), key=lambda each: each.node_id)])

    wait_for(lambda: provider.list_instances("r1") == ())


def test_nodes_end_themselves_where_nobody_renews_their_lease(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace)
    provider.lease_s = 2.0
    launch(provider, ledger, bootstrap(tmp_path / "run"))

    wait_for(lambda: not commands.queue(), what="the end of the job", poll_s=0.2)


LAUNCHER = """
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from infra.ledger.ledger import Ledger
from infra.providers.slurm.provider import SlurmProvider
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, plan
folder = Path(sys.argv[1])
SlurmProvider.lease_s = 2.0
print("begins", flush=True)
SlurmProvider(Workspace(root=folder)).launch(
    plan(),
    run_id=sys.argv[2],
    lease_until=datetime.now(UTC) + timedelta(seconds=2),
    bootstrap=bootstrap(folder / "run"),
    ledger=Ledger(folder / "ledger.sqlite"),
)
print("launched", flush=True)
"""
NUM_KILLS, LAST_KILL_S = 50, 1.0


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_a_launching_process_that_is_killed_at_any_moment_leaves_no_job(
    commands, workspace, ledger, tmp_path
):
    moments = random.Random(36)
    provider = SlurmProvider(workspace)

    for number in range(NUM_KILLS):
        launching = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), f"r{number}"],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        launching.stdout.readline()
        with suppress(subprocess.TimeoutExpired):
            launching.wait(moments.uniform(0.0, LAST_KILL_S))
        launching.kill()
        launching.communicate()
        wait_for(lambda: not commands.queue(), what=f"the end of launch {number}", poll_s=0.2)

    sweep(provider, now=datetime.now(UTC) + timedelta(minutes=5), ledger=ledger)
    assert {entry.state for entry in ledger.entries()} <= {EntryState.FAILED, EntryState.ENDED}
    assert len({entry.run_id for entry in ledger.entries()}) > NUM_KILLS / 2


def test_a_launch_without_room_leaves_nothing_in_the_queue(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace, wait_s=2.0)

    with pytest.raises(
        InsufficientCapacityError, match=r"did not start the 6 machines .* \(PENDING \(Re"
    ) as error:
        launch(provider, ledger, bootstrap(tmp_path / "run"), planned=fills_a_node(6))

    assert "\n" not in str(error.value)
    assert commands.queue() == []
    assert {entry.state for entry in ledger.entries()} == {EntryState.FAILED}


@pytest.mark.parametrize(
    ("selector", "complaint"),
    [
        ({"partition": "gone"}, "invalid partition specified: gone.*name a partition that sinfo shows"),
        ({"features": "gone"}, "Invalid feature specification; name a feature that sinfo"),
        ({"queue": "cpu"}, "may name partition, features, gres, got queue; correct machines.toml"),
    ],
)
def test_a_wrong_selector_is_answered_in_one_line(commands, workspace, ledger, tmp_path, selector, complaint):
    with pytest.raises(HeterpsError, match=complaint) as error:
        launch(
            SlurmProvider(workspace),
            ledger,
            bootstrap(tmp_path),
            planned=listed(workspace, "slurm", selector),
        )

    assert "\n" not in str(error.value)
    assert {entry.state for entry in ledger.entries()} <= {EntryState.FAILED}


def test_a_machine_larger_than_every_node_is_refused(commands, workspace, ledger, tmp_path):
    with pytest.raises(ProvisioningError, match="no node of the partition has so many cores"):
        launch(SlurmProvider(workspace), ledger, bootstrap(tmp_path), planned=larger_than_any_node())


def test_a_job_that_another_user_cancels_is_known_with_its_end(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace)
    cluster = launch(provider, ledger, bootstrap(tmp_path / "run"))
    job = cluster.nodes[0].provider_instance_id.rpartition("/")[2].partition("+")[0]
    commands.asked("scancel", job)
    wait_for(lambda: not provider.list_instances("r1"))

    known = [each for each in provider.remembered_instances([]) if each.run_id == "r1"]

    assert {(each.is_ended, each.ended_because.partition(" ")[0]) for each in known} >= {(True, "CANCELLED")}
    assert all(
        abs(each.ended_at - datetime.now(UTC)) < timedelta(minutes=1) for each in known if each.ended_at
    )
    swept = sweep(provider, now=datetime.now(UTC), ledger=ledger)
    assert {machine.reason for machine in swept} <= {EndReason.GONE}
    assert {entry.state for entry in ledger.entries(run_id="r1")} == {EntryState.ENDED}


def test_a_controller_that_is_away_makes_machines_unknown_and_not_gone(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace)
    launch(provider, ledger, bootstrap(tmp_path / "run"))
    before = provider.list_instances("r1")
    commands.wait_for_saved_state()
    commands.kill("slurmctld")

    try:
        with pytest.raises(ProvisioningError, match=r"Unable to contact slurm controller.*scontrol ping"):
            provider.list_instances("r1")
        with pytest.raises(ProvisioningError, match="Unable to contact"):
            sweep(provider, now=datetime.now(UTC), ledger=ledger)
    finally:
        commands.start_controller()

    wait_for(lambda: answers(provider), what="the controller")
    assert provider.list_instances("r1") == before
    assert {entry.state for entry in ledger.entries()} == {EntryState.LAUNCHED}


def answers(provider):
    try:
        provider.list_instances()
    except ProvisioningError:
        return False
    return True


def test_nodes_outlive_the_daemon_of_their_machine(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace)
    cluster = launch(provider, ledger, bootstrap(tmp_path / "run"))
    provider.wait_until_ready(cluster, timeout_s=20.0)
    host = commands.asked("squeue", "-h", "-o", "%N").split()[0]

    commands.kill(host)

    assert len(provider.list_instances("r1")) == 2
    commands.start_node(host)
    wait_for(lambda: host in commands.asked("sinfo", "-h", "-N", "-t", "mix", "-o", "%N").split())
    assert len(provider.list_instances("r1")) == 2


def test_a_drained_node_takes_no_new_machine_and_keeps_its_own(commands, workspace, ledger, tmp_path):
    provider = SlurmProvider(workspace, wait_s=2.0)
    only = listed(workspace, "slurm", {"features": "arm"})
    launch(provider, ledger, bootstrap(tmp_path / "run"), planned=only)
    commands.asked("scontrol", "update", "NodeName=arm1", "State=DRAIN", "Reason=test")

    try:
        assert len(provider.list_instances("r1")) == 1
        with pytest.raises(
            InsufficientCapacityError, match=r"ReqNodeNotAvail|Nodes required|Resources|DRAIN"
        ):
            launch(provider, ledger, bootstrap(tmp_path / "run2"), run_id="r2", planned=only)
    finally:
        commands.asked("scontrol", "update", "NodeName=arm1", "State=RESUME")

    assert len(provider.list_instances("r1")) == 1


def test_a_notice_reaches_the_training_process_and_ends_nothing_else(commands, workspace, ledger, tmp_path):
    program = (
        "import os, pathlib, time\n"
        "from heterps_core.training.node.node_life import SignalledNotice\n"
        "notice, folder = SignalledNotice(), pathlib.Path(os.environ['HETERPS_RUN_DIR'])\n"
        "(folder / 'ready').touch()\n"
        "while notice.interrupted_at() is None: time.sleep(0.05)\n"
        "(folder / 'part').write_text(notice.interrupted_at())\n"
        "(folder / 'part').rename(folder / 'notice')\n"
        "time.sleep(100)\n"
    )
    provider = SlurmProvider(workspace)
    launch(provider, ledger, bootstrap(tmp_path / "run", ("-c", program)), planned=plan(offer()))
    wait_for((tmp_path / "run" / "ready").exists)

    commands.asked("scancel", "--signal=USR1", *commands.queue())

    wait_for((tmp_path / "run" / "notice").exists, what="the notice")
    at = datetime.fromisoformat((tmp_path / "run" / "notice").read_text())
    assert abs(at - datetime.now(UTC) - timedelta(seconds=NOTICE_S)) < timedelta(seconds=30)
    assert len(provider.list_instances("r1")) == 1


def test_the_wall_stands_a_minute_after_the_lifetime_of_a_node(commands, workspace, ledger, tmp_path):
    launch(
        SlurmProvider(workspace), ledger, bootstrap(tmp_path / "run", lifetime_s=600), planned=plan(offer())
    )

    shown = commands.asked("scontrol", "show", "job", *commands.queue())

    assert re.search(r"TimeLimit=(\S+)", shown)[1] == "00:11:00"
    assert "Requeue=0" in shown


def test_several_machines_need_the_backfill_scheduler(workspace, ledger, tmp_path, monkeypatch):
    with slurm_cluster(scheduler="builtin", nodes=("epyc1", "epyc2")) as other:
        for name, value in other.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ProvisioningError, match="SchedulerType=sched/backfill"):
            launch(SlurmProvider(workspace), ledger, bootstrap(tmp_path))
        checks = {check.what: check for check in SlurmProvider(workspace).checks()}

    assert checks["Slurm components"].state == "missing"
    assert checks["Slurm version"].state == "ok"


def test_the_nodes_that_a_cluster_shows_are_its_kinds(commands, workspace):
    found = {kind.selector["features"]: kind for kind in SlurmProvider.found_machines(workspace)}

    assert {name: kind.count for name, kind in found.items()} == {"epyc": 2, "xeon": 2, "arm": 1}
    assert sorted(kind.kind for kind in found.values()) == ["slurm-8-1", "slurm-8-2", "slurm-8-3"]
    assert {kind.selector["partition"] for kind in found.values()} == {"cpu"}
    # By hand: 16,384 MiB are 17.18 GB.
    assert {(kind.cores, kind.memory_gb) for kind in found.values()} == {(CORES_EACH, 17.1)}


def test_every_check_of_a_cluster_is_well(commands, workspace):
    names = ("Slurm version", "Slurm controller", "Slurm machines", "Slurm components", "run directory")

    found = {check.what: check.state for check in SlurmProvider(workspace).checks()}

    assert found == dict.fromkeys(names, "ok")


def replaced_command(folder: Path, monkeypatch, name: str, script: str) -> None:
    """Put a command in place of one of Slurm's, as an older version or a failing one would answer."""
    folder.mkdir()
    command = folder / name
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_an_older_slurm_is_refused(commands, workspace, ledger, tmp_path, monkeypatch):
    replaced_command(tmp_path / "bin", monkeypatch, "sinfo", "echo slurm 19.05.2")

    with pytest.raises(ProvisioningError, match=r"20\.11 or later, got 'slurm 19\.05\.2'"):
        launch(SlurmProvider(workspace), ledger, bootstrap(tmp_path / "run"))


@pytest.mark.parametrize("script", ["", "echo hello"], ids=["nothing", "no header"])
def test_an_answer_without_header_is_unknown(workspace, tmp_path, monkeypatch, script):
    replaced_command(tmp_path / "bin", monkeypatch, "squeue", script)

    with pytest.raises(ProvisioningError, match="which machines there are is unknown"):
        SlurmProvider(workspace).list_instances()


def test_a_machine_without_slurm_is_answered_in_one_line(workspace, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert not SlurmProvider.is_set_up()
    with pytest.raises(ProvisioningError, match=r"squeue of Slurm must be installed here.*login node"):
        SlurmProvider(workspace).list_instances()


def test_a_machine_that_knows_no_cluster_is_not_set_up(commands, workspace, monkeypatch):
    assert SlurmProvider.is_set_up()

    monkeypatch.delenv("SLURM_CONF")
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine knows a cluster")

    assert not SlurmProvider.is_set_up()
    with pytest.raises(ProvisioningError, match="login node of the cluster"):
        SlurmProvider(workspace).list_instances()


def test_three_kinds_train_as_in_one_process(commands, tmp_path):
    (tmp_path / "clicks").mkdir()
    slurm = Home(SlurmProvider, tmp_path, prepare_clicks(tmp_path / "clicks"))

    slurm.check_trained(slurm.train())

    assert commands.queue() == []
