"""Trainings on three kinds of machines of a cluster, with daemons and machines that are killed."""

import random
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from heterps_core.data.dataset import PreparedDataset
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import STEPS
from infra.billing.caps import Caps
from infra.ledger.ledger import EntryState
from infra.providers.ray.provider import RayProvider
from infra.providers.slurm.provider import SlurmProvider
from tasks.provisioning import Provisioning
from tasks.running.fleet import Fleet, FleetRun, replaced
from tests.heterps_core.training.node_processes import NUM_STEPS, prepare_clicks, trained
from tests.heterps_core.training.test_rows_after_losses import FOLDER_VARIABLE, in_order, noted_steps
from tests.infra.cluster_homes import KINDS, RUN_ID, Home
from tests.ray_cluster import ray_cluster
from tests.slurm_cluster import slurm_cluster

pytestmark = [pytest.mark.weekly, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as started:
        yield started


@pytest.fixture
def commands(cluster, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


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

    is_interrupted = False
    """What it loses stops the training, which goes on in another attempt."""

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
                if progress.attempt < self.next_attempt:
                    return
                self.seconds.append(time.monotonic() - self.lost_at)
                self.next_step = progress.step + self.draw.randrange(11, 16)
                self.lost_at = None
            elif len(self.seconds) < NUM_LOSSES and progress.step >= self.next_step:
                time.sleep(self.draw.uniform(0.0, 0.5))
                print(
                    f"{time.monotonic():.2f} s: step {progress.step}, attempt {progress.attempt}", flush=True
                )
                self.lost_at, self.next_attempt = time.monotonic(), progress.attempt + self.is_interrupted
                lose(self)

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


class ReplacedHome(LossyHome):
    """A home that replaces lost machines, as in a night."""

    is_interrupted = True

    def train(self, disturb):
        bought = Provisioning(
            cloud_plan=self.plan,
            launch_plan=self.plan,
            launch_stages=self.job.stages,
            predicted_cost_usd=1.0,
            is_dry_run=False,
        )
        run = FleetRun(
            workspace=self.workspace,
            run_id=RUN_ID,
            directory=self.run,
            provider_name=self.provider.name,
            region="",
            model=ROWS,
            caps=Caps(),
            problem=None,
            num_steps=1_600,
        )
        with ExitStack() as machines:
            fleet = Fleet(machines.enter_context(self.running()), bought)
            while True:
                publish_cluster(self.run, fleet.cluster)
                outcome = follow_training(self.run, fleet.cluster, on_progress=disturb)
                if not isinstance(outcome, MachinesLost):
                    return trained(outcome)
                print(f"{time.monotonic():.2f} s", outcome.message, outcome.node_ids, flush=True)
                if outcome.node_ids:
                    fleet = machines.enter_context(replaced(run, fleet, outcome.node_ids))
                else:
                    fleet = replace(fleet, cluster=fleet.cluster.next_generation())
                print(f"{time.monotonic():.2f} s: the machines are complete", flush=True)


@pytest.fixture
def machines(notes, monkeypatch):
    # After the variable of the notes, which nodes inherit from their raylets.
    with ray_cluster() as started, started.entered():
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        yield started


@pytest.mark.timeout(3000)
def test_each_row_is_trained_once_where_twenty_machines_of_ray_are_killed(machines, dataset, tmp_path, notes):
    home = ReplacedHome(RayProvider, tmp_path / "ray", dataset)

    def lose(home):
        kind = home.draw.choice(KINDS)
        for raylet in machines.raylets(kind):
            # A machine is lost with all its processes: nodes outlive their raylet alone.
            for process in [raylet, *raylet.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        print(f"{kind} is lost", flush=True)
        threading.Thread(target=machines.add_node, args=(kind,)).start()

    home.train(home.disturbed(lose))

    print(f"next steps after {sorted(round(each, 2) for each in home.seconds)} s")
    assert len(home.seconds) == NUM_LOSSES
    assert home.wrong_steps(dataset, notes) == []
    assert home.provider.list_instances() == ()
    assert {entry.state for entry in home.ledger.entries()} == {EntryState.ENDED}
