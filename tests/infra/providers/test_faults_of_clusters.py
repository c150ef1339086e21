"""Seeded faults of launches on real daemons of Slurm leave no machine and no unaccounted second, and say one line."""

import random
import threading
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from heterps_core.errors import HeterpsError
from infra.billing.caps import Caps
from infra.ledger.ledger import Ledger
from infra.machines.lifecycle import running_cluster
from infra.machines.sweeper import sweep
from infra.providers.base import InsufficientCapacityError
from infra.providers.slurm.provider import SlurmProvider
from infra.workspace import Workspace
from tests.infra.builders import bootstrap
from tests.infra.cluster_homes import listed
from tests.slurm_cluster import CORES_EACH, slurm_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.weekly, pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(3000)]

NUM_FAULTS = 14


class Faults:
    """Launches on a cluster, each of which meets a fault."""

    def __init__(self, daemons, folder):
        self.workspace = Workspace(root=folder)
        self.provider = SlurmProvider(self.workspace, wait_s=2.0)
        self.daemons, self.folder = daemons, folder
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.said = []

    def launch(self, number, *selectors, meanwhile=lambda: None, cores=2):
        """Launch a machine of each selector and end it; note the error."""
        planned = listed(self.workspace, self.provider.name, *selectors, cores=cores)
        try:
            with running_cluster(
                self.provider,
                planned,
                run_id=f"r{number}",
                bootstrap=bootstrap(self.folder / "run"),
                ledger=self.ledger,
                caps=Caps(),
                predicted_cost_usd=1.0,
            ):
                meanwhile()
        except HeterpsError as problem:
            self.said.append(str(problem))
            return problem
        return None

    def check(self, number):
        """Check that nothing is left, and that each entry is closed and lasts from its start to its end."""
        assert self.provider.list_instances() == ()
        sweep(self.provider, now=datetime.now(UTC), ledger=self.ledger)
        entries = self.ledger.entries(run_id=f"r{number}")
        assert entries
        assert not [entry for entry in entries if entry.is_open]
        known = {each.provider_instance_id: each for each in self.provider.remembered_instances([])}
        for entry in entries:
            machine = known.get(entry.provider_instance_id or "")
            if machine is not None and machine.ended_at is not None and entry.launched_at is not None:
                assert entry.launched_at <= machine.launched_at
                assert entry.ended_at >= machine.ended_at
        assert all("\n" not in said for said in self.said)
        print(number, *self.said[-1:], flush=True)


def wrong_partition(faults, number, draw):
    assert "name a partition that sinfo shows" in str(faults.launch(number, {"partition": "gone"}))


def wrong_feature(faults, number, draw):
    assert "name a feature that sinfo" in str(faults.launch(number, {"features": "gone"}))


def larger_than_any_node(faults, number, draw):
    problem = faults.launch(number, {}, cores=CORES_EACH + draw.randrange(1, 64))
    # Slurm refuses it, or lets it wait for ever where it was restarted since.
    assert "no node of the partition has so many cores" in str(problem) or "PartitionConfig" in str(problem)


def full_queue(faults, number, draw):
    # By hand: one node has the feature, and each machine takes all its cores.
    selectors = [{"features": "arm"}] * draw.randrange(2, 5)
    assert isinstance(faults.launch(number, *selectors, cores=CORES_EACH), InsufficientCapacityError)


def drained_node(faults, number, draw):
    state = ("scontrol", "update", "NodeName=arm1")
    faults.daemons.asked(*state, "State=DRAIN", "Reason=test")
    try:
        assert isinstance(faults.launch(number, {"features": "arm"}), InsufficientCapacityError)
    finally:
        # A restarted controller may have forgotten the drain.
        with suppress(AssertionError):
            faults.daemons.asked(*state, "State=RESUME")


def cancelled_by_another(faults, number, draw):
    def cancel():
        [first, *_] = faults.daemons.queue()
        faults.daemons.asked("scancel", first if draw.random() < 0.5 else first.partition("+")[0])

    assert faults.launch(number, {"features": "epyc"}, {"features": "xeon"}, meanwhile=cancel) is None


def forgotten_by_the_controller(faults, number, draw):
    """The controller is killed at a moment of the launch, and comes back with the state that it last wrote."""

    def restart():
        faults.daemons.kill("slurmctld")
        faults.daemons.start_controller()

    timer = threading.Timer(draw.uniform(0.0, 2.0), restart)
    timer.start()
    faults.launch(number, {"features": "epyc"}, {"features": "xeon"})
    timer.join()
    wait_for(lambda: answers(faults.provider), what="the controller")
    wait_for(lambda: not faults.provider.list_instances(), what="the end of the job")


def answers(provider):
    try:
        provider.list_instances()
    except HeterpsError:
        return False
    return True


SLURM_FAULTS = (
    wrong_partition,
    wrong_feature,
    larger_than_any_node,
    full_queue,
    drained_node,
    cancelled_by_another,
    forgotten_by_the_controller,
)


def test_faults_of_slurm_leave_nothing(tmp_path, monkeypatch):
    draw = random.Random(36)
    with slurm_cluster() as daemons:
        for name, value in daemons.environment.items():
            monkeypatch.setenv(name, value)
        faults = Faults(daemons, tmp_path)

        for number in range(NUM_FAULTS):
            SLURM_FAULTS[number % len(SLURM_FAULTS)](faults, number, draw)
            assert daemons.queue() == []
            faults.check(number)

    assert len(faults.said) >= NUM_FAULTS / 2
