"""Seeded faults of launches on real daemons leave no machine and no unaccounted second, and say one line each."""

import random
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import psutil
import pytest

from heterps_core.errors import HeterpsError
from infra.billing.caps import Caps
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.machines.sweeper import sweep
from infra.providers.base import InsufficientCapacityError
from infra.providers.ray.provider import RayProvider
from infra.providers.slurm.provider import SlurmProvider
from infra.workspace import Workspace
from tests.infra.builders import bootstrap
from tests.infra.cluster_homes import BEATING, listed
from tests.paths import PROJECT
from tests.ray_cluster import CORES_EACH, NODES, ray_cluster
from tests.slurm_cluster import slurm_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.weekly, pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(400)]

NUM_FAULTS = 100
OUTAGES_S = (1.0, 5.0, 15.0, 60.0)
LEASE_S = 10.0

FLOW = f"""
import sys
from pathlib import Path
from infra.billing.caps import Caps
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import provider_of
from infra.workspace import Workspace
from tests.infra.builders import bootstrap
from tests.infra.cluster_homes import BEATING, listed
home, folder, number, selector, cores = sys.argv[1:]
workspace = Workspace(root=Path(folder))
provider = provider_of(workspace, home)
provider.lease_s = {LEASE_S}
planned = listed(workspace, home, eval(selector), cores=int(cores))
print("begins", flush=True)
with running_cluster(
    provider,
    planned,
    run_id=f"r{{number}}",
    bootstrap=bootstrap(workspace.root / "run", ("-c", BEATING)),
    ledger=Ledger(workspace.root / "ledger.sqlite"),
    caps=Caps(),
    predicted_cost_usd=1.0,
):
    print("launched", flush=True)
    sys.stdin.read()
"""
"""A flow that has a machine until its input ends."""


class Faults:
    """A launch on a cluster that meets a fault."""

    provider_type = None

    def __init__(self, daemons, folder, seed):
        self.daemons, self.folder, self.number = daemons, folder, seed
        self.workspace = Workspace(root=folder)
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.draw = random.Random(seed)

    def provider(self, *, wait_s=60.0):
        provider = self.provider_type(self.workspace, wait_s=wait_s)
        provider.lease_s = LEASE_S
        return provider

    def launch(self, *selectors, meanwhile=lambda: None, cores=2, wait_s=60.0):
        """Launch a machine of each selector and end it; return the error, which is one line with a way out."""
        planned = listed(self.workspace, self.provider_type.name, *selectors, cores=cores)
        try:
            with running_cluster(
                self.provider(wait_s=wait_s),
                planned,
                run_id=f"r{self.number}",
                bootstrap=bootstrap(self.folder / "run", ("-c", BEATING)),
                ledger=self.ledger,
                caps=Caps(),
                predicted_cost_usd=1.0,
            ):
                meanwhile()
        except HeterpsError as error:
            problem = error
        else:
            return None
        print(self.number, problem, flush=True)
        assert "\n" not in str(problem)
        assert ";" in str(problem)
        return problem

    def has_no_room(self, *selectors):
        """Launch where not all machines can start."""
        problem = self.launch(*selectors, cores=CORES_EACH, wait_s=2.0)
        assert isinstance(problem, InsufficientCapacityError)

    @contextmanager
    def flow(self, selector, *, cores=2):
        """Run a flow in a process of its own, which is killed at the end of the block where it lives."""
        arguments = (self.provider_type.name, str(self.folder), str(self.number), repr(selector), str(cores))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-c", FLOW, *arguments]
        with (
            (self.folder / "flow.log").open("w") as said,
            subprocess.Popen(command, cwd=PROJECT, text=True, stderr=said, **pipes) as flow,
        ):
            try:
                assert flow.stdout.readline() == "begins\n"
                yield flow
            finally:
                flow.kill()

    def nodes(self):
        """Return the processes that belong to nodes of these launches."""
        found = []
        for process in psutil.process_iter():
            try:
                is_own = process.environ().get("HETERPS_RUN_DIR") == str(self.folder / "run")
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def is_gone(self):
        """Tell whether the cluster answers, with no machine of these launches."""
        try:
            return not self.provider().list_instances() and not self.nodes()
        except HeterpsError:
            return False

    def check(self):
        """Check that nothing is left, and that each entry is closed and lasts from its start to its end."""
        wait_for(self.is_gone, timeout_s=150, what="the end of the machines", poll_s=0.5)
        after_leases = datetime.now(UTC) + timedelta(seconds=2 * LEASE_S)
        sweep(self.provider(), now=after_leases, ledger=self.ledger)
        entries = self.ledger.entries(run_id=f"r{self.number}")
        assert entries
        assert not [entry for entry in entries if entry.is_open]
        self.check_account({entry.node_id: entry for entry in entries})

    def check_account(self, entries):
        """Check that the ledger has every second in which a node beat."""
        for beats in (self.folder / "run").glob("beats-*"):
            moments = [
                float(line) for line in beats.read_text().splitlines(keepends=True) if line.endswith("\n")
            ]
            if moments:
                entry = entries[beats.name.removeprefix("beats-").rpartition("-")[0]]
                assert entry.launched_at is not None, f"{moments[-1] - moments[0]:.1f} s are missing: {entry}"
                assert entry.launched_at.timestamp() <= moments[0]
                assert moments[-1] <= entry.ended_at.timestamp()


class SlurmFaults(Faults):
    """The faults as Slurm has them."""

    provider_type = SlurmProvider

    @contextmanager
    def taken(self):
        """Let another user's job have the one node of a feature."""
        command = ("sbatch", "--parsable", "--exclusive", "--constraint=arm", "--output=/dev/null")
        job = self.daemons.asked(*command, "--wrap=sleep 1000").strip()
        try:
            shown = ("squeue", "-h", "-j", job, "-o", "%T")
            wait_for(
                lambda: self.daemons.asked(*shown) == "RUNNING\n", timeout_s=120, what="its start", poll_s=0.5
            )
            yield
        finally:
            self.daemons.asked("scancel", job)

    def home_is_away(self):
        """The controller is killed at a moment of the launch; it comes back with the state that it last wrote."""

        def outage():
            self.daemons.kill("slurmctld")
            time.sleep(self.draw.choice(OUTAGES_S))
            self.daemons.start_controller()

        timer = threading.Timer(self.draw.uniform(0.0, 2.0), outage)
        timer.start()
        self.launch({"features": "epyc"}, {"features": "xeon"}, wait_s=20.0)
        timer.join()

    def node_is_drained(self):
        state = ("scontrol", "update", "NodeName=arm1")
        self.daemons.asked(*state, "State=DRAIN", "Reason=test")
        self.has_no_room({"features": "arm"})
        self.daemons.asked(*state, "State=RESUME")

    def queue_is_full(self):
        with self.taken():
            self.has_no_room({"features": "arm"})

    def another_cancels(self):
        def cancel():
            [first, *_] = self.daemons.queue()
            job = first if self.draw.random() < 0.5 else first.partition("+")[0]
            self.daemons.asked("scancel", "--quiet", job)

        assert self.launch({"features": "epyc"}, {"features": "xeon"}, meanwhile=cancel) is None

    def pends_without_its_flow(self):
        with self.taken():
            with self.flow({"features": "arm"}, cores=CORES_EACH):
                wait_for(self.provider().list_instances, timeout_s=60, what="the pending job")
                time.sleep(self.draw.uniform(0.0, 1.0))
            expired = datetime.now(UTC) + timedelta(seconds=LEASE_S)
            assert sweep(self.provider(), now=expired, ledger=self.ledger)

    def group_cannot_be_placed(self):
        # By hand: one node has the feature, and each machine takes all its cores.
        self.has_no_room(*[{"features": "arm"}] * self.draw.randrange(2, 5))

    def node_is_down(self):
        """A machine is lost with all its processes, and comes back after a while."""

        def lose():
            self.daemons.kill("arm1")
            back.start()
            for process in self.nodes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()

        def come_back():
            self.daemons.start_node("arm1")

        back = threading.Timer(self.draw.uniform(0.0, 15.0), come_back)
        assert self.launch({"features": "arm"}, meanwhile=lose) is None
        back.join()

    def machine_is_unknown(self):
        selector, cores, way_out = self.draw.choice(
            [
                ({"partition": "gone"}, 2, "name a partition that sinfo shows"),
                ({"features": "gone"}, 2, "name a feature that sinfo"),
                ({}, CORES_EACH + self.draw.randrange(1, 64), "no node of the partition has so many cores"),
            ]
        )
        # A controller that was restarted lets a job that is too large wait for ever.
        assert re.search(f"{way_out}|PartitionConfig", str(self.launch(selector, cores=cores, wait_s=5.0)))

    def restore(self):
        """Wait until all nodes are idle: a controller that lost its last state starts cancelled jobs once more."""

        def are_idle():
            try:
                self.daemons.asked("scancel", "--quiet", "--user=root")
                states = self.daemons.asked("sinfo", "-h", "-N", "-o", "%T").split()
                if "drained" in states or "down" in states:
                    names = ",".join(self.daemons.nodes)
                    self.daemons.asked("scontrol", "update", f"NodeName={names}", "State=RESUME")
                return states == ["idle"] * len(self.daemons.nodes)
            except AssertionError:
                return False

        wait_for(are_idle, timeout_s=120, what="idle nodes", poll_s=0.5)


class RayFaults(Faults):
    """The faults as Ray has them."""

    provider_type = RayProvider

    def home_is_away(self):
        """The head stands still in or after a launch; after a minute, Ray may end the flow with its machines."""
        import ray

        with self.flow({"resource": "arm"}) as flow:
            if self.draw.random() < 0.5:
                time.sleep(self.draw.uniform(0.0, 8.0))
            else:
                assert flow.stdout.readline() == "launched\n"
            ray.shutdown()
            [head] = [each for each in self.daemons.inside() if each.name() == "gcs_server"]
            outage_s = self.draw.choice(OUTAGES_S)
            head.suspend()
            time.sleep(outage_s)
            head.resume()
            flow.stdin.close()
            status = flow.wait(150)
        *_, said = ["", *(self.folder / "flow.log").read_text().splitlines()]
        print(f"{self.number} away for {outage_s:.0f} s: the flow ended with {status}: {said}", flush=True)
        assert status == 0 or re.search(r"Error: .*; ", said)

    def node_is_drained(self):
        self.daemons.add_node("drained")
        self.provider().list_instances()
        self.daemons.drain("drained")
        self.has_no_room({"resource": "drained"})
        for raylet in self.daemons.raylets("drained"):
            raylet.kill()

    def queue_is_full(self):
        import ray

        self.provider().list_instances()
        taken = ray.util.placement_group([{"CPU": CORES_EACH, "arm": 0.001}])
        assert taken.wait(60)
        self.has_no_room({"resource": "arm"})
        ray.util.remove_placement_group(taken)

    def another_cancels(self):
        import ray

        def cancel():
            chosen = self.draw.choice(ray.util.list_named_actors(all_namespaces=True))
            ray.kill(ray.get_actor(chosen["name"], namespace=chosen["namespace"]))

        assert self.launch({"resource": "epyc"}, {"resource": "xeon"}, meanwhile=cancel) is None

    def pends_without_its_flow(self):
        import ray

        self.provider().list_instances()
        taken = ray.util.placement_group([{"CPU": CORES_EACH, "arm": 0.001}])
        assert taken.wait(60)
        with self.flow({"resource": "arm"}, cores=CORES_EACH):
            time.sleep(self.draw.uniform(2.0, 8.0))
        ray.util.remove_placement_group(taken)
        wait_for(
            lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"],
            timeout_s=60,
            what="free cores",
        )

    def group_cannot_be_placed(self):
        # By hand: one machine has the resource, and each bundle takes all its cores.
        self.has_no_room(*[{"resource": "arm"}] * self.draw.randrange(2, 5))

    def node_is_down(self):
        def lose():
            [raylet] = self.daemons.raylets("arm")
            raylet.kill()
            time.sleep(self.draw.uniform(0.0, 15.0))

        assert self.launch({"resource": "arm"}, meanwhile=lose) is None

    def machine_is_unknown(self):
        self.has_no_room({"resource": "gone"})

    def restore(self):
        """Add machines in place of lost ones, and wait until all are there and free."""
        import ray

        for name in NODES:
            if not self.daemons.raylets(name):
                self.daemons.add_node(name)
        self.provider().list_instances()

        def are_free():
            free = ray.available_resources()
            is_there = all(free.get(name, 0) >= 1 for name in NODES)
            return is_there and free.get("CPU") == CORES_EACH * len(NODES)

        wait_for(are_free, timeout_s=120, what="free machines", poll_s=0.5)


KINDS = (
    "machine_is_unknown",
    "home_is_away",
    "node_is_drained",
    "queue_is_full",
    "another_cancels",
    "pends_without_its_flow",
    "group_cannot_be_placed",
    "node_is_down",
)


def meet(faults):
    kind = KINDS[faults.number % len(KINDS)]
    print(faults.number, kind, flush=True)
    try:
        getattr(faults, kind)()
        faults.check()
    finally:
        faults.restore()


@pytest.fixture(scope="module")
def slurm_daemons():
    with slurm_cluster() as started:
        yield started


@pytest.mark.parametrize("seed", range(NUM_FAULTS))
def test_a_fault_of_slurm_leaves_nothing(slurm_daemons, tmp_path, monkeypatch, seed):
    for name, value in slurm_daemons.environment.items():
        monkeypatch.setenv(name, value)

    meet(SlurmFaults(slurm_daemons, tmp_path, seed))


@pytest.fixture(scope="module")
def ray_daemons():
    with ray_cluster() as started:
        yield started


@pytest.mark.parametrize("seed", range(NUM_FAULTS))
def test_a_fault_of_ray_leaves_nothing(ray_daemons, tmp_path, monkeypatch, seed):
    for name, value in ray_daemons.environment.items():
        monkeypatch.setenv(name, value)

    with ray_daemons.entered():
        meet(RayFaults(ray_daemons, tmp_path, seed))
