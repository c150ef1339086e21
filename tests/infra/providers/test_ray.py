"""A real Ray cluster starts, finds and ends the nodes of a run."""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from heterps_core.errors import ProvisioningError
from infra.ledger.ledger import EntryState, Ledger
from infra.providers.base import InsufficientCapacityError
from infra.providers.ray.node_actor import node_class
from infra.providers.ray.provider import RayProvider
from infra.workspace import Workspace, free_loopback_port
from tests.heterps_core.training.node_processes import prepare_clicks
from tests.infra.builders import bootstrap
from tests.infra.cluster_homes import Home, launch, listed
from tests.paths import PROJECT
from tests.ray_cluster import CORES_EACH, NODES, ray_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture(scope="module")
def started():
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def machines(started, monkeypatch):
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    with started.entered():
        yield started


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path)


@pytest.fixture
def provider(machines, workspace):
    ray = RayProvider(workspace)
    yield ray
    for instance in ray.list_instances():
        ray.terminate(instance.run_id)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


def node_processes(machines, folder):
    """Return the processes in the namespace that belong to nodes of a run."""
    found = []
    for process in machines.inside():
        try:
            if process.environ().get("HETERPS_RUN_DIR") == str(folder) and process.status() != "zombie":
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_node_sees_its_run_and_its_name_and_is_no_dry_run(provider, ledger, tmp_path):
    program = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'HETERPS_' in k}))"
    reported = replace(bootstrap(tmp_path / "run", ("-c", program)), run_key=b"key")
    launch(provider, ledger, reported)
    console = tmp_path / "run" / "nodes" / "stage1-node0" / "console.log"
    wait_for(lambda: console.exists() and console.read_text().endswith("}\n"))

    variables = json.loads(console.read_text())

    assert (variables["HETERPS_RUN_ID"], variables["HETERPS_NODE_ID"]) == ("r1", "stage1-node0")
    assert (variables["HETERPS_NODE_IS"], variables["HETERPS_DRY_RUN"]) == ("process", "0")
    assert bytes.fromhex(variables["HETERPS_RUN_KEY"]) == b"key"
    assert variables["HETERPS_OWN_DISKS"] == "/var/tmp"


def test_the_machines_that_a_cluster_shows_are_its_kinds(machines, workspace):
    found = RayProvider.found_machines(workspace)

    assert {kind.selector["resource"]: (kind.count, kind.cores) for kind in found} == dict.fromkeys(
        NODES, (1, CORES_EACH)
    )
    # By hand: 16 GiB are 17.18 GB.
    assert {kind.memory_gb for kind in found} == {17.1}


def test_each_kind_goes_to_the_machines_that_its_selector_names(provider, workspace, ledger, tmp_path):
    import ray

    planned = listed(workspace, "ray", {"resource": "xeon"}, {"resource": "arm"})

    launch(provider, ledger, bootstrap(tmp_path / "run"), planned=planned)

    left = ray.available_resources()
    assert (left["xeon"], left["arm"], left["epyc"]) == (0.999, 0.999, 1.0)


def test_a_group_that_cannot_be_placed_holds_nothing(machines, workspace, ledger, tmp_path):
    import ray

    provider = RayProvider(workspace, wait_s=2.0)
    planned = listed(workspace, "ray", {"resource": "epyc"}, {"resource": "riscv"})

    with pytest.raises(
        InsufficientCapacityError, match="did not place the 2 machines of run r1 within 2 s"
    ) as error:
        launch(provider, ledger, bootstrap(tmp_path / "run"), planned=planned)

    assert "\n" not in str(error.value)
    assert {entry.state for entry in ledger.entries()} == {EntryState.FAILED}
    wait_for(lambda: ray.available_resources().get("CPU") == CORES_EACH * len(NODES), what="free cores")


def test_a_machine_that_ended_is_had_again_in_its_place(provider, workspace, ledger, tmp_path):
    planned = listed(workspace, "ray", {"resource": "epyc"}, {"resource": "arm"}, cores=CORES_EACH)
    launch(provider, ledger, bootstrap(tmp_path / "run"), planned=planned)
    lost = provider.list_instances("r1")[1]
    provider.terminate_instances([lost])

    launch(provider, ledger, bootstrap(tmp_path / "run"), run_id="r1.2", planned=planned.only([lost.node_id]))

    assert [each.node_id for each in provider.list_instances("r1.2")] == ["stage1-node0"]
    assert [each.node_id for each in provider.list_instances("r1")] == ["stage0-node0"]
    provider.terminate("r1.2")
    assert len(provider.list_instances("r1")) == 1


LAUNCHER = """
import sys, time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from infra.ledger.ledger import Ledger
from infra.providers.ray.provider import RayProvider
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, plan
folder = Path(sys.argv[1])
RayProvider(Workspace(root=folder)).launch(
    plan(),
    run_id="r1",
    lease_until=datetime.now(UTC) + timedelta(seconds=60),
    bootstrap=bootstrap(folder / "run"),
    ledger=Ledger(folder / "ledger.sqlite"),
)
print("launched", flush=True)
time.sleep(100)
"""


@pytest.fixture
def flow(machines, tmp_path):
    """A process with two machines."""
    launching = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    with launching:
        try:
            assert launching.stdout.readline() == "launched\n"
            wait_for(lambda: len(node_processes(machines, tmp_path / "run")) >= 2, what="the nodes")
            yield launching
        finally:
            launching.kill()


def test_another_process_finds_and_ends_the_machines(flow, machines, provider, tmp_path):
    assert len(provider.terminate("r1")) == 2

    assert provider.list_instances() == ()
    wait_for(lambda: not node_processes(machines, tmp_path / "run"), what="the end of the nodes")


def test_a_killed_flow_leaves_neither_actor_nor_process(flow, machines, provider, tmp_path):
    flow.kill()

    wait_for(lambda: not node_processes(machines, tmp_path / "run"), what="the end of the nodes")
    assert provider.list_instances() == ()


NUM_KILLS, LAST_KILL_S = 50, 12.0


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_a_launching_process_that_is_killed_at_any_moment_leaves_nothing(
    machines, provider, ledger, tmp_path
):
    moments = random.Random(36)
    longest_s = 0.0

    for number in range(NUM_KILLS):
        launching = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER.replace('"r1"', f'"r{number}"'), str(tmp_path)],
            cwd=PROJECT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with suppress(subprocess.TimeoutExpired):
            launching.wait(moments.uniform(1.0, LAST_KILL_S))
        launching.kill()
        launching.wait()
        killed_s = time.monotonic()
        wait_for(lambda: not node_processes(machines, tmp_path / "run"), what=f"end {number}")
        wait_for(lambda: not provider.list_instances(), what=f"the end of launch {number}")
        longest_s = max(longest_s, time.monotonic() - killed_s)

    print(f"nothing was left {longest_s:.1f} s after a kill at the latest")
    assert len({entry.run_id for entry in ledger.entries()}) > NUM_KILLS / 2


def test_a_machine_that_is_drained_gives_its_node_notice(machines, provider, workspace, ledger, tmp_path):
    program = (
        "import os, pathlib, time\n"
        "from heterps_core.training.node.node_life import SignalledNotice\n"
        "notice, folder = SignalledNotice(), pathlib.Path(os.environ['HETERPS_RUN_DIR'])\n"
        "while notice.interrupted_at() is None: time.sleep(0.05)\n"
        "(folder / 'notice').touch()\n"
        "time.sleep(100)\n"
    )
    machines.add_node("drained")
    planned = listed(workspace, "ray", {"resource": "drained"})
    cluster = launch(provider, ledger, bootstrap(tmp_path / "run", ("-c", program)), planned=planned)
    provider.wait_until_ready(cluster, timeout_s=60.0)

    machines.drain("drained")

    wait_for((tmp_path / "run" / "notice").exists, what="the notice")
    assert len(provider.list_instances("r1")) == 1


def test_a_machine_needs_nothing_of_heterps_to_run_an_actor(started, machines):
    # Loaded where neither this folder nor its packages can be found but Ray.
    import ray

    code = ray.cloudpickle.dumps(node_class()).hex()
    place = str(Path(ray.__file__).parents[1])
    program = (
        f"import sys; sys.path.insert(0, {place!r})\n"
        "import ray.cloudpickle\n"
        f"print(ray.cloudpickle.loads(bytes.fromhex({code!r})))\n"
    )

    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd="/", capture_output=True, text=True, check=True
    )

    assert "Node" in done.stdout


def refusal(environment):
    """Return what a process says that asks a cluster which it cannot use."""
    program = (
        "from infra.providers.ray.provider import RayProvider\n"
        "from infra.workspace import Workspace\n"
        "from pathlib import Path\n"
        "RayProvider(Workspace(root=Path('/tmp'))).list_instances()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("address", ["", "nowhere", "ray://head:10001"])
def test_an_address_that_is_none_is_answered_in_one_line(machines, address):
    assert "RAY_ADDRESS must be host:port of a Ray cluster" in refusal({"RAY_ADDRESS": address})


def test_an_address_that_answers_nothing_is_answered_in_one_line(machines):
    said = refusal({"RAY_ADDRESS": f"127.0.0.1:{free_loopback_port()}"})

    assert "RAY_ADDRESS must be host:port" in said
    assert "refused" in said


def test_a_cluster_of_another_version_is_refused(machines, tmp_path):
    # As a process sees a cluster whose Ray is not its own.
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.59.0'\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    said = refusal({"PYTHONPATH": path})

    assert "of version 2.59.0" in said
    assert "Version mismatch" in said


@pytest.mark.weekly
def test_a_lost_machine_is_no_machine_any_more(machines, provider, workspace, ledger, tmp_path):
    machines.add_node("spare")
    planned = listed(workspace, "ray", {"resource": "spare"}, {"resource": "arm"})
    launch(provider, ledger, bootstrap(tmp_path / "run"), planned=planned)

    machines.raylets("spare")[0].kill()

    wait_for(lambda: len(provider.list_instances("r1")) == 1, what="the loss", poll_s=0.5)
    assert provider.list_instances("r1")[0].node_id == "stage1-node0"


def test_every_check_of_a_cluster_is_well(provider):
    assert {check.what: check.state for check in provider.checks()} == dict.fromkeys(
        ("Ray cluster", "Ray machines", "run directory"), "ok"
    )


def test_three_kinds_train_as_in_one_process(machines, tmp_path):
    (tmp_path / "clicks").mkdir()
    ray = Home(RayProvider, tmp_path, prepare_clicks(tmp_path / "clicks"))

    ray.check_trained(ray.train())

    assert ray.provider.list_instances() == ()


def test_a_machine_without_the_folder_of_the_run_is_reported_in_one_line(
    provider, ledger, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "infra.providers.ray.provider.prepared_console", lambda *_: tmp_path / "elsewhere" / "console.log"
    )

    with pytest.raises(
        ProvisioningError, match=r"No such file or directory: .*elsewhere.*; .*must be a"
    ) as e:
        launch(provider, ledger, bootstrap(tmp_path / "run"))

    assert "\n" not in str(e.value)
    assert {entry.state for entry in ledger.entries()} == {EntryState.FAILED}
    assert provider.list_instances() == ()
