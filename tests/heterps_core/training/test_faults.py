"""Whole runs in which something goes wrong that no restart fixes, or of which no worker can tell.

Killed workers and full disks are in `test_nodes`, a lack of memory in `test_memory_faults`.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from heterps_core.errors import ConfigurationError, DataError, TrainingError
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training import monitor
from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.gradients.optimizers import DenseOptimizer
from heterps_core.training.node.failures import root_cause
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.step_metrics import Progress
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import SILENCE_LIMIT_S
from tests.heterps_core.training.node_processes import (
    CHECKPOINT_INTERVAL_STEPS,
    GO_ON_VARIABLE,
    HELD,
    HELD_STEP,
    NUM_MICROBATCHES,
    NUM_STEPS,
    build_tiny,
    kill_machine,
    make_job,
    prepare_clicks,
    running_nodes,
    train,
    worker_processes,
)

pytestmark = pytest.mark.slow

STEP_OF_NAN = 13


class Overflows(nn.Module):
    """Gives no number in the second micro-batch of step 13, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        return activation * (math.nan if self.num_calls == STEP_OF_NAN * NUM_MICROBATCHES else 1.0)


def build_overflowing(features):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(
        OrderedDict(embedding=embedding, overflow=Overflows(), output=nn.Linear(embedding.output_width, 1))
    )


FREEZES_VARIABLE = "HETERPS_TEST_FREEZES"
"""Names the file that a worker makes before it stands still, once."""


def build_frozen_in_checkpoint(features):
    """A model whose last stage stands still between its update of step 10 and the checkpoint behind it."""
    num_updates = 0

    update = DenseOptimizer.step

    def update_and_stand_still(self, learning_rate):
        nonlocal num_updates
        update(self, learning_rate)
        num_updates += 1
        mark = Path(os.environ[FREEZES_VARIABLE])
        if num_updates == CHECKPOINT_INTERVAL_STEPS and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    DenseOptimizer.step = update_and_stand_still
    return build_tiny(features)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_clicks(tmp_path_factory.mktemp("clicks"))


def test_a_loss_that_is_no_number_ends_the_run_before_it_spoils_a_checkpoint(dataset, tmp_path):
    run = RunDirectory(str(tmp_path))

    with pytest.raises(TrainingError) as failure:
        train(run, make_job(dataset, (2, 1), model=f"{__name__}:build_overflowing"))

    message = str(failure.value)
    assert "(stage 1, replica 0) failed after step 12: the loss must be a finite number" in message
    assert "nan in micro-batch 2 of 2 of step 13" in message
    assert complete_checkpoints(run) == ["00000010"]
    assert failure.value.exit_status == TrainingError.exit_status


@pytest.mark.weekly
def test_a_row_group_that_is_damaged_while_it_waits_is_named(dataset, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset, damaged)
    with (damaged / "rows-00000.parquet").open("r+b") as file:
        file.seek(200)
        file.write(bytes(4_000))

    with pytest.raises(TrainingError) as failure:
        train(RunDirectory(str(tmp_path / "run")), make_job(damaged, (2, 1)))

    assert "rows-00000.parquet: row group 0 of 1 cannot be read as Parquet" in str(failure.value)
    assert str(damaged) in str(failure.value)
    assert failure.value.exit_status == DataError.exit_status


def test_nodes_that_were_given_different_jobs_do_not_train(dataset, tmp_path, monkeypatch):
    # The node that is astray gives no sign of life here, and how fast workers start is not looked at.
    monkeypatch.setattr(monitor, "SILENCE_LIMIT_S", 120.0)
    job = make_job(dataset, (1, 1))
    other = replace(job, config=replace(job.config, seed=4))

    with pytest.raises(TrainingError) as failure:
        train(RunDirectory(str(tmp_path / "one")), job, astray=(RunDirectory(str(tmp_path / "other")), other))

    fingerprints = re.findall(r"on node stage(\d) has ([0-9a-f]{12})", str(failure.value))
    assert {node for node, _ in fingerprints} == {"0", "1"}
    assert len({fingerprint for _, fingerprint in fingerprints}) == 2
    assert failure.value.exit_status == ConfigurationError.exit_status


@pytest.mark.weekly
def test_a_worker_that_stands_still_is_named_and_replaced(dataset, tmp_path):
    run = RunDirectory(str(tmp_path))

    def freeze_the_last_stage(progress: Progress, nodes: list[psutil.Process]) -> bool:
        if progress.step < 13:
            return False
        worker_processes(nodes[1:])[0].send_signal(signal.SIGSTOP)
        return True

    training_run = train(run, make_job(dataset, (2, 1)), freeze_the_last_stage)

    message = str(root_cause(run))
    assert training_run.is_complete
    assert training_run.num_attempts == 2
    assert len(training_run.steps) == NUM_STEPS
    named = re.match(
        r"worker \d \(stage 1, replica 0\) failed after step (\d+): .* stood still for (\d+) s", message
    )
    assert named, message
    assert int(named.group(1)) >= 12
    assert int(named.group(2)) <= SILENCE_LIMIT_S


@pytest.mark.weekly
def test_a_worker_that_stands_still_in_a_checkpoint_is_named_as_elsewhere_and_no_disk_is_blamed(
    dataset, tmp_path, monkeypatch
):
    """The others wait for it in the checkpoint, where one that writes much may take 300 s."""
    monkeypatch.setenv(FREEZES_VARIABLE, str(tmp_path / "frozen"))
    run = RunDirectory(str(tmp_path / "run"))

    training_run = train(run, make_job(dataset, (1, 1), model=f"{__name__}:build_frozen_in_checkpoint"))

    message = str(root_cause(run))
    named = re.match(
        r"worker \d \(stage 1, replica 0\) failed after step 9: .* stood still for (\d+) s", message
    )
    assert named, message
    assert int(named.group(1)) <= SILENCE_LIMIT_S
    assert "disk" not in message
    assert training_run.is_complete
    assert training_run.num_attempts == 2
    assert training_run.steps[-1].step == NUM_STEPS


@pytest.mark.weekly
def test_a_machine_that_is_lost_is_named_with_its_replica_and_last_step(dataset, tmp_path, monkeypatch):
    """Two replicas of one stage on two machines, one of which is gone without a word."""
    monkeypatch.setenv(GO_ON_VARIABLE, str(tmp_path / "go on"))
    job = replace(make_job(dataset, (1, 1), model=HELD), stages=(Stage(0, 2, "cpu", 2),))
    run = RunDirectory(str(tmp_path / "run"))
    lost = []

    with running_nodes(run, job, is_one_per_replica=True) as (cluster, nodes):

        def lose_the_second(progress: Progress) -> None:
            if progress.step >= HELD_STEP - 1 and not lost:
                lost.append(progress.step)
                kill_machine(nodes[1])
                (tmp_path / "go on").touch()

        outcome = monitor.follow_training(run, cluster, on_progress=lose_the_second)

    # Whichever is seen first: the silence of the lost machine, or the end of the other's worker, which misses it.
    assert isinstance(outcome, MachinesLost)
    assert outcome.node_ids == ("stage0-1",)
    message = outcome.message
    assert "stage 0, replica 1" in message
    assert "stage0-1" in message
    steps = re.search(r"(?:after step|the last step known is) (\d+)", message)
    assert steps, message
    assert int(steps.group(1)) >= lost[0]
