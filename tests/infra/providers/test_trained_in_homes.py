"""One plan of three stages on three kinds of machines, trained whole by each home with the same result."""

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import STEPS, RunDirectory
from infra.billing.caps import Caps
from infra.bootstrap.node_start import Bootstrap, publish_node_wheel
from infra.inventory import MachineKind, inventory_path, inventory_text
from infra.ledger.ledger import EntryState, Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers.here import HereProvider
from infra.providers.ray.provider import RayProvider
from infra.providers.slurm.provider import SlurmProvider
from infra.workspace import Workspace
from tests.heterps_core.training.node_processes import NUM_STEPS, TINY, make_job, prepare_clicks, trained
from tests.heterps_core.training.test_rows_after_losses import FOLDER_VARIABLE, in_order, noted_steps
from tests.ray_cluster import ray_cluster
from tests.slurm_cluster import slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600)]

KINDS = ("epyc", "xeon", "arm")
RUN_ID = "r1"
SELECTORS = {
    "here": lambda name: {},
    "ray": lambda name: {"resource": name},
    "slurm": lambda name: {"features": name},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as started:
        yield started


@pytest.fixture
def ray_machines():
    with ray_cluster() as started, started.entered():
        yield started


@pytest.fixture
def commands(cluster, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


def kinds_of(home):
    return [
        MachineKind(
            kind=f"{name}-2",
            home=home,
            count=1,
            cores=2,
            memory_gb=4.0,
            price_usd_per_hour=0.1,
            selector=SELECTORS[home](name),
        )
        for name in KINDS
    ]


class Home:
    """A home with an inventory of three kinds, and a run on one machine of each."""

    def __init__(self, provider_type, folder, dataset):
        self.workspace = Workspace(root=folder / "home").create()
        kinds = kinds_of(provider_type.name)
        inventory_path(self.workspace).write_text(inventory_text(kinds))
        self.provider = provider_type.for_workspace(self.workspace, region="")
        self.ledger = Ledger(self.workspace.ledger_path)
        self.run = RunDirectory(str(self.workspace.run_folder(RUN_ID)), secret=b"the key of this run")
        self.plan = ProvisioningPlan(
            replicas=(1, 1, 1),
            groups=tuple(
                InstanceGroup(
                    stage=stage,
                    device_type=next(kind.device_types()).name,
                    offer=next(kind.offers()),
                    count=1,
                    units_per_instance=2,
                )
                for stage, kind in enumerate(kinds)
            ),
            planned_price_usd_per_hour=0.3,
        )
        stages = tuple(Stage(i, i, group.device_type, 1) for i, group in enumerate(self.plan.groups))
        self.job = replace(make_job(dataset, (1, 1), model=TINY), stages=stages)
        submit_job(self.run, self.job)

    def running(self):
        return running_cluster(
            self.provider,
            self.plan,
            run_id=RUN_ID,
            bootstrap=Bootstrap(
                run_location=self.run.location,
                python=sys.executable,
                run_key=self.run.secret,
                wheel=publish_node_wheel(self.run, self.job.model),
                lifetime_s=3600,
            ),
            ledger=self.ledger,
            caps=Caps(),
            predicted_cost_usd=1.0,
        )

    def train(self, disturb=lambda progress: None):
        """Train to the end, with new workers once where some fail."""
        with self.running() as launched:
            publish_cluster(self.run, launched)
            outcome = follow_training(self.run, launched, on_progress=disturb)
            if isinstance(outcome, MachinesLost) and not outcome.node_ids:
                launched = launched.next_generation()
                publish_cluster(self.run, launched)
                outcome = follow_training(self.run, launched, on_progress=disturb)
            return trained(outcome)


def losses(training):
    return [step.loss for step in training.steps]


def test_three_kinds_train_on_slurm_as_here(commands, dataset, tmp_path):
    here = Home(HereProvider, tmp_path / "here", dataset).train()
    slurm = Home(SlurmProvider, tmp_path / "slurm", dataset)

    there = slurm.train()

    assert len(there.steps) == NUM_STEPS
    assert losses(there) == pytest.approx(losses(here), abs=1e-6)
    assert there.quality.auc == pytest.approx(here.quality.auc, abs=1e-6)
    assert there.quality.log_loss == pytest.approx(here.quality.log_loss, abs=1e-6)
    assert commands.queue() == []
    assert {entry.state for entry in slurm.ledger.entries()} == {EntryState.ENDED}
    assert [entry.price_usd_per_hour for entry in slurm.ledger.entries()] == [0.1] * 3


def test_three_kinds_train_on_ray_as_here(ray_machines, dataset, tmp_path, monkeypatch):
    here = Home(HereProvider, tmp_path / "here", dataset).train()
    for name, value in ray_machines.environment.items():
        monkeypatch.setenv(name, value)
    ray = Home(RayProvider, tmp_path / "ray", dataset)

    there = ray.train()

    assert len(there.steps) == NUM_STEPS
    assert losses(there) == pytest.approx(losses(here), abs=1e-6)
    assert there.quality.auc == pytest.approx(here.quality.auc, abs=1e-6)
    assert there.quality.log_loss == pytest.approx(here.quality.log_loss, abs=1e-6)
    assert ray.provider.list_instances() == ()
    assert {entry.state for entry in ray.ledger.entries()} == {EntryState.ENDED}


@pytest.mark.weekly
def test_a_controller_that_is_away_does_not_stop_a_training(commands, dataset, tmp_path):
    is_away = []

    def take_it_away(progress):
        if not is_away:
            is_away.append(progress.step)
            commands.kill("slurmctld")
        elif len(is_away) == 1 and progress.step > is_away[0]:
            is_away.append(progress.step)
            commands.start_controller()

    training = Home(SlurmProvider, tmp_path, dataset).train(take_it_away)

    assert len(is_away) == 2
    assert len(training.steps) == NUM_STEPS
    assert commands.queue() == []


NUM_LOSSES = 20
ROWS = "tests.heterps_core.training.test_rows_after_losses:build_noting"


class LossyHome(Home):
    """A home whose model notes the rows that it trains, in a run of 1,600 steps."""

    def __init__(self, provider_type, folder, dataset):
        super().__init__(provider_type, folder, dataset)
        config = replace(self.job.config, num_epochs=80)
        self.job = replace(self.job, model=ROWS, config=config)
        submit_job(self.run, self.job)
        self.draw = random.Random(36)
        self.seconds = []
        self.lost_at = None
        self.next_step = self.draw.randrange(11, 16)

    def disturbed(self, lose):
        """Return a callback that loses something at seeded moments and notes the time to the next finished step."""

        def on_progress(progress):
            if self.lost_at is not None:
                self.seconds.append(time.monotonic() - self.lost_at)
                self.next_step = progress.step + self.draw.randrange(11, 16)
                self.lost_at = None
            elif len(self.seconds) < NUM_LOSSES and progress.step >= self.next_step:
                time.sleep(self.draw.uniform(0.0, 0.5))
                lose(self)
                self.lost_at = time.monotonic()

        return on_progress

    def wrong_steps(self, dataset, notes):
        """Return the committed steps whose rows are not those of the epoch's order, each once."""
        data = PreparedDataset.open(dataset)
        config = self.job.config
        num_batches = data.num_batches(config.batch_size)
        trained_rows = {}
        firsts = {}
        for attempt, step in (map(int, Path(name).stem.split("-")) for name in self.run.names(STEPS)):
            firsts[attempt] = min(step, firsts.get(attempt, step))
        for attempt in sorted(firsts):
            # Attempts count from 0, generations from 1.
            [path] = notes.glob(f"{attempt + 1}-*")
            for offset, rows in enumerate(noted_steps(path)):
                trained_rows[firsts[attempt] + offset] = rows
        wrong = []
        for step in range(1, config.num_epochs * num_batches + 1):
            epoch, index = divmod(step - 1, num_batches)
            ids = data.batch_rows(epoch, index, batch_size=config.batch_size, seed=config.seed)
            if not np.array_equal(in_order(trained_rows[step]), in_order(data.batch(ids).dense.numpy())):
                wrong.append(step)
        return wrong


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "notes"))
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.mark.weekly
@pytest.mark.timeout(3000)
def test_each_row_is_trained_once_where_twenty_daemons_of_slurm_are_killed(
    commands, dataset, tmp_path, notes
):
    home = LossyHome(SlurmProvider, tmp_path / "slurm", dataset)

    def lose(home):
        hosts = commands.asked("squeue", "-h", "-o", "%N").split()
        host = home.draw.choice(hosts)
        commands.kill(host)
        commands.start_node(host)

    home.train(home.disturbed(lose))

    print(f"next steps after {sorted(round(each, 2) for each in home.seconds)} s")
    assert len(home.seconds) == NUM_LOSSES
    assert home.wrong_steps(dataset, notes) == []
    assert commands.queue() == []
    assert {entry.state for entry in home.ledger.entries()} == {EntryState.ENDED}
