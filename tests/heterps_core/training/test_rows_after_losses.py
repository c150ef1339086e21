"""No row is lost or trained twice where a training loses machines and goes on with other numbers of replicas."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from heterps_core.data.dataset import PreparedDataset
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor, complete_checkpoints
from heterps_core.training.monitor import follow_training, publish_cluster
from heterps_core.training.node.node_life import GENERATION_VARIABLE
from heterps_core.training.outcome import Complete, MachinesLost
from heterps_core.training.pipeline.stage_exchange import batch_slices
from heterps_core.training.replica_batches import spread
from heterps_core.training.step_metrics import read_steps
from heterps_core.training.storage.run_directory import JOB, RunDirectory
from heterps_core.training.storage.verified_files import write_signed_json
from tests.heterps_core.training.node_processes import (
    CHECKPOINT_INTERVAL_STEPS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    Held,
    Slow,
    kill_machine,
    make_job,
    prepare_clicks,
    running_nodes,
    worker_processes,
)
from tests.tiers import weekly_after
from tests.waiting import wait_for

NUM_CASES = 20
FOLDER_VARIABLE = "HETERPS_TEST_ROWS"
"""Names the folder in which workers note the rows that they train."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return PreparedDataset.open(prepare_clicks(tmp_path_factory.mktemp("clicks")))


def rows_of_replicas(dataset, cursor, *, batch_size, num_microbatches, seed, num_replicas):
    """Return the rows that the replicas of a stage read at a step, as their loops do."""
    rows = []
    for replica in range(num_replicas):
        slices = batch_slices(
            batch_size, num_microbatches=num_microbatches, shares=(1,) * num_replicas, replica=replica
        )
        rows += dataset.batch_rows(
            cursor.epoch,
            cursor.batch_index,
            batch_size=batch_size,
            seed=seed,
            positions=spread(batch_size, num_microbatches, slices),
        ).tolist()
    return rows


@pytest.mark.parametrize("seed", weekly_after(6, range(NUM_CASES)))
def test_every_stage_trains_the_rows_of_an_undisturbed_run_each_once_an_epoch(dataset, seed):
    draw = random.Random(seed)
    num_microbatches = draw.choice([1, 2, 4])
    batch_size = num_microbatches * draw.randrange(8, 33)
    batches_per_epoch = dataset.num_batches(batch_size)
    interval = draw.randrange(1, batches_per_epoch)
    numbers = {"batch_size": batch_size, "num_microbatches": num_microbatches, "seed": seed}
    kept: dict[tuple[int, int], list[int]] = {}
    """Rows of a step at a stage, as they were trained last."""

    checkpoint = cursor = TrainingCursor()
    replicas = [draw.randrange(1, 6) for _ in range(2)]
    num_losses = draw.randrange(1, 5)
    while cursor.epoch < 2:
        for stage, num_replicas in enumerate(replicas):
            kept[cursor.step, stage] = rows_of_replicas(dataset, cursor, num_replicas=num_replicas, **numbers)
        cursor = cursor.after_batch(batches_per_epoch)
        if cursor.step % interval == 0:
            checkpoint = TrainingCursor.from_json(cursor.to_json())
        if num_losses and draw.random() < num_losses / batches_per_epoch:
            cursor, num_losses = checkpoint, num_losses - 1
            replicas = [draw.randrange(1, 6) for _ in range(2)]

    assert len(kept) == 2 * 2 * batches_per_epoch
    for epoch in range(2):
        undisturbed = [
            row
            for index in range(batches_per_epoch)
            for row in dataset.batch_rows(epoch, index, batch_size=batch_size, seed=seed).tolist()
        ]
        assert len(set(undisturbed)) == len(undisturbed) == batch_size * batches_per_epoch
        for stage in range(2):
            steps = range(epoch * batches_per_epoch, (epoch + 1) * batches_per_epoch)
            trained = [row for step in steps for row in kept[step, stage]]
            assert sorted(trained) == sorted(undisturbed)


class NotesRows(Slow):
    """Notes the numeric columns of the rows that it trains, by which a row is known."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.num_columns = num_columns

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        if self.training:
            name = f"{int(os.environ[GENERATION_VARIABLE])}-{os.environ['RANK']}"
            with (Path(os.environ[FOLDER_VARIABLE]) / name).open("ab") as notes:
                np.save(notes, activation[:, -self.num_columns :].detach().numpy())
        return super().forward(activation)


def build_noting(features, **before):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(
        OrderedDict(
            embedding=embedding,
            **before,
            notes=NotesRows(features.num_dense),
            output=nn.Linear(embedding.output_width, 1),
        )
    )


class HeldUntilLost(Held):
    """Stands in the sixteenth step of a generation that is to lose something until it has."""

    held_step = 16

    def go_on_path(self) -> Path:
        return Path(os.environ[FOLDER_VARIABLE]).with_name(f"lost-{os.environ[GENERATION_VARIABLE]}")


def build_held_noting(features):
    return build_noting(features, held=HeldUntilLost())


def noted_steps(path: Path) -> list[np.ndarray]:
    """Return the rows that a worker has trained in each step of a generation."""
    parts = []
    with path.open("rb") as notes:
        while notes.peek(1):
            parts.append(np.load(notes))
    whole = len(parts) // NUM_MICROBATCHES * NUM_MICROBATCHES
    return [np.concatenate(parts[at : at + NUM_MICROBATCHES]) for at in range(0, whole, NUM_MICROBATCHES)]


@pytest.mark.weekly
def test_a_training_that_loses_one_machine_and_a_worker_of_the_others_trains_each_row_once(
    dataset, tmp_path, monkeypatch
):
    """Two replicas of the first stage; its second machine is lost and not replaced, later a worker is."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "notes"))
    (tmp_path / "notes").mkdir()
    run = RunDirectory(str(tmp_path / "run"), secret=b"the key of this run")
    job = make_job(dataset.directory, (2, 1), model=f"{__name__}:build_held_noting")
    # The noting layer is in the first stage, whose replicas share the rows of each batch.
    job = replace(job, stages=(Stage(0, 2, "cpu", 2), Stage(3, 3, "cpu", 1)))
    draw = random.Random(7)

    with running_nodes(run, job, is_one_per_replica=True) as (cluster, nodes):

        def at_step(step, action, generation):
            done = tmp_path / f"lost-{generation}"

            def on_progress(progress):
                if progress.step >= step and not done.exists():
                    wait_for(lambda: complete_checkpoints(run), what="a checkpoint")
                    action()
                    done.touch()

            return on_progress

        (tmp_path / "lost-3").touch()
        lose = at_step(draw.randrange(11, 16), lambda: kill_machine(nodes[1]), 1)
        lost = follow_training(run, cluster, on_progress=lose)
        assert isinstance(lost, MachinesLost), lost
        assert lost.node_ids == ("stage0-1",), lost.message
        smaller = replace(job, stages=tuple(replace(stage, num_replicas=1) for stage in job.stages))
        following = cluster.next_generation()
        following = replace(following, nodes=(cluster.nodes[0], cluster.nodes[2]))
        write_signed_json(run, JOB, smaller.to_json())
        publish_cluster(run, following)

        def kill_worker():
            max(worker_processes(nodes[2:]), key=lambda each: each.create_time()).kill()

        # The second generation begins at the eleventh step at the earliest, and stands in its sixteenth.
        kill = at_step(draw.randrange(22, 26), kill_worker, 2)
        lost = follow_training(run, following, on_progress=kill)
        assert isinstance(lost, MachinesLost), lost
        assert lost.node_ids == (), lost.message
        last = following.next_generation()
        publish_cluster(run, last)
        outcome = follow_training(run, last, on_progress=lambda progress: None)

    assert isinstance(outcome, Complete), outcome
    firsts = [steps[0].step for steps in read_steps(run)]
    assert len(firsts) == 3
    assert all((first - 1) % CHECKPOINT_INTERVAL_STEPS == 0 for first in firsts)
    batches_per_epoch = dataset.num_batches(job.config.batch_size)
    stops = [*firsts[1:], NUM_STEPS + 1]
    for generation, (first, stop) in enumerate(zip(firsts, stops, strict=True), start=1):
        by_replica = [noted_steps(path) for path in sorted((tmp_path / "notes").glob(f"{generation}-*"))]
        for step in range(first, stop):
            trained = np.concatenate([steps[step - first] for steps in by_replica])
            epoch, batch_index = divmod(step - 1, batches_per_epoch)
            rows = dataset.batch_rows(
                epoch, batch_index, batch_size=job.config.batch_size, seed=job.config.seed
            )
            expected = dataset.batch(rows).dense.numpy()
            assert np.array_equal(in_order(trained), in_order(expected)), f"step {step}"


def in_order(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T)]
