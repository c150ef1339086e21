"""Launches on clusters that people have, from an inventory with a kind for each selector."""

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.plans.provisioning_plan import InstanceGroup, ProvisioningPlan
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from infra.billing.caps import Caps
from infra.bootstrap.node_start import Bootstrap, publish_node_wheel
from infra.inventory import MachineKind, inventory_path, inventory_text
from infra.ledger.ledger import EntryState, Ledger
from infra.machines.lifecycle import running_cluster
from infra.workspace import Workspace
from tests.heterps_core.training.node_processes import TINY, make_job, trained
from tests.heterps_core.training.reference import run_plainly
from tests.infra.builders import plan


def launch(provider, ledger, run_bootstrap, *, run_id="r1", lease_s=60.0, planned=None):
    """Launch a plan, by default of two machines, with a lease."""
    return provider.launch(
        planned or plan(),
        run_id=run_id,
        lease_until=datetime.now(UTC) + timedelta(seconds=lease_s),
        bootstrap=run_bootstrap,
        ledger=ledger,
    )


def listed(workspace, home, *selectors, cores=2):
    """Write an inventory of one kind for each selector; return a plan of one machine of each kind."""
    kinds = [
        MachineKind(
            kind=f"kind{number}",
            home=home,
            count=4,
            cores=cores,
            memory_gb=4.0,
            price_usd_per_hour=0.5,
            selector=selector,
        )
        for number, selector in enumerate(selectors)
    ]
    inventory_path(workspace).write_text(inventory_text(kinds))
    return plan(*[next(kind.offers()) for kind in kinds])


BEATING = """
import os, pathlib, time
name = f"beats-{os.environ['HETERPS_NODE_ID']}-{os.getpid()}"
with pathlib.Path(os.environ["HETERPS_RUN_DIR"], name).open("a") as beats:
    while True:
        print(time.time(), file=beats, flush=True)
        time.sleep(0.1)
"""
"""The program of a node that writes down every moment of its life."""


KINDS = ("epyc", "xeon", "arm")
RUN_ID = "r1"
SELECTORS = {
    "ray": lambda name: {"resource": name},
    "slurm": lambda name: {"features": name},
}


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

    def check_trained(self, training):
        """Check a training against one process in plain PyTorch, and the ledger against the inventory."""
        plain = run_plainly(self.job)
        assert [step.loss for step in training.steps] == pytest.approx(plain.losses, abs=1e-6)
        assert training.quality.auc == pytest.approx(plain.quality.auc, abs=1e-6)
        assert training.quality.log_loss == pytest.approx(plain.quality.log_loss, abs=1e-6)
        entries = self.ledger.entries()
        assert [(entry.state, entry.price_usd_per_hour) for entry in entries] == [(EntryState.ENDED, 0.1)] * 3
