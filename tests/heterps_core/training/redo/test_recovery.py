"""What machines have kept is, bit for bit, the checkpoint that the workers would have written at that step."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import DynamicIds
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training import checkpoint_writer
from heterps_core.training.checkpoint import (
    TrainingCursor,
    all_tensors,
    complete_checkpoints,
    load_latest_checkpoint,
)
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.redo import recovery
from heterps_core.training.redo.keeper import Keeper, KeeperPlace
from heterps_core.training.redo.recovery import NotKeptError, dense_part, plan_recovery, recover
from heterps_core.training.redo.step_log import DenseChange, LoggedWorker, LogSummary
from heterps_core.training.redo.step_sender import StepSender, buddy_of
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import CHECKPOINTS, JOB, RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.worker_processes import run_in_processes

KEY = b"the key of this run"
INTERVAL_STEPS, KEPT_STEP = 10, 15
MACHINES = ("first", "second", "second")
"""Of each rank: the two replicas of the first stage are on two machines, the second stage is on one of them."""


class LostError(Exception):
    """The end of a generation."""


def log_of(
    rank: int, *steps: int, generation: int = 1, has_dense: bool = True, base_step: int = 0
) -> LogSummary:
    worker = LoggedWorker(
        generation=generation,
        rank=rank,
        world_size=3,
        stage=min(rank // 2, 1),
        num_stages=2,
        shards={"table": (rank, 2)} if rank < 2 else {},
        has_dense=has_dense,
    )
    return LogSummary(
        worker=worker, base_step=base_step, cursors={step: TrainingCursor(step=step) for step in steps}
    )


def test_the_newest_step_that_is_kept_of_all_is_written_each_part_once():
    found = [
        [log_of(0, 13, 14, 15), log_of(2, 12, 13, 14)],
        [],
        [log_of(1, 14, 15, 16, has_dense=False), log_of(2, 12, 13, 14), log_of(0, 13, 14)],
    ]

    plan = plan_recovery(found, base="00000010")

    assert plan is not None
    assert plan.cursor == TrainingCursor(step=14)
    parts = [
        (rank, part) for own in plan.written_by.values() for rank, parts in own.items() for part in parts
    ]
    assert sorted(parts) == [(0, "dense layers"), (0, "rows"), (1, "rows"), (2, "dense layers"), (2, "rows")]
    assert plan.shards == {0: {"table": (0, 2)}, 1: {"table": (1, 2)}, 2: {}}


@pytest.mark.parametrize(
    ("found", "base", "reason"),
    [
        (
            [[log_of(0, 14), log_of(1, 14)], []],
            "00000010",
            "the rows of worker 2 of generation 1 are kept nowhere",
        ),
        (
            [[log_of(0, 14), log_of(1, 14)], [log_of(2, 14, has_dense=False)]],
            "00000010",
            "the dense layers of stage 1 of generation 1 are kept nowhere",
        ),
        ([[log_of(0, 14), log_of(1, 14), log_of(2, 19)]], "00000010", "no step is kept of all"),
        ([[log_of(0, 14), log_of(1, 14), log_of(2, 14)]], None, "no checkpoint"),
        ([[log_of(0, 14), log_of(1, 14), log_of(2, 14, base_step=11)]], "00000010", "the rows of worker 2"),
        (
            [[log_of(0, 14), log_of(1, 14), log_of(2, 14)], [log_of(0, 15, generation=2)]],
            "00000010",
            "worker 1 of generation 2",
        ),
        ([[], []], "00000010", "no checkpoint"),
    ],
)
def test_where_a_part_is_not_kept_the_reason_says_which(found, base, reason):
    with pytest.raises(NotKeptError, match=reason):
        plan_recovery(found, base=base)


def test_nothing_is_written_where_the_checkpoint_is_as_new():
    found = [[log_of(0, 9, 10), log_of(1, 10), log_of(2, 10, 11)]]

    assert plan_recovery(found, base="00000010") is None


def test_a_dense_part_is_made_by_its_optimizer_and_what_no_gradient_changes_is_the_last_that_was_sent():
    config = TrainingConfig(batch_size=4, num_microbatches=1, num_epochs=1, seed=0)
    whole = {"fc.weight": np.ones(2, np.float32), "norm.mean": np.zeros(1)}
    whole |= {f"fc.weight.{name}": np.zeros(2, np.float32) for name in ("exp_avg", "exp_avg_sq")}
    whole["fc.weight.step"] = np.zeros((), np.float32)
    gradient = np.array([2.0, -5.0], np.float32)
    step = DenseChange(
        values={"norm.mean": np.ones(1)}, gradients={"fc.weight": gradient}, learning_rate=0.25
    )

    made = dense_part([DenseChange(values=whole), step], config)

    # Adam's first step is the learning rate, against the sign of the gradient.
    assert made["fc.weight"].tolist() == pytest.approx([0.75, 1.25])
    assert made["fc.weight.step"].item() == made["norm.mean"].item() == 1.0
    without_parameters = [DenseChange(values={"norm.mean": np.zeros(1)}), replace(step, gradients={})]
    assert dense_part(without_parameters, config)["norm.mean"].item() == 1.0


def test_the_machines_form_a_ring():
    places = [KeeperPlace(name, f"{name}:1") for name in ("a", "a", "b", "c")]

    assert [buddy_of(name, places).node_id for name in "abc"] == ["b", "c", "a"]
    assert buddy_of("a", places[:2]) is None


def layout_of(job: TrainingJob) -> RankLayout:
    first, second = job.replicas_per_stage
    return RankLayout((tuple(range(first)), tuple(range(first, first + second))))


def train_until_lost(rank: int, folder: str, places: dict[str, str], last_step: int) -> None:
    """Train with checkpoints and, where there are keepers, logs, and break off behind a step."""
    checkpoint_writer.SMALL_BYTES = 0
    run = RunDirectory(folder, secret=KEY)
    job, loop = training_loop_of(rank, run)
    assert loop.checkpoints is not None
    sender = None
    if places:
        sender = StepSender(
            KeeperPlace(MACHINES[rank], places[MACHINES[rank]]),
            key=KEY,
            generation=1,
            layout=layout_of(job),
            model=loop.model,
            checkpoints=loop.checkpoints,
        )

    def lose(step: int) -> None:
        if step == INTERVAL_STEPS and loop.checkpoints._whole is not None:
            # So that there is a checkpoint of this step.
            loop.checkpoints._whole[1].result()
        if step == last_step:
            raise LostError

    loop = replace(loop, step_log=sender, on_step=lose)
    with suppress(LostError):
        loop.train(begin(run, job, loop.model))
    if sender is not None:
        assert sender._has_arrived.wait(30)
    loop.checkpoints.finish()


def recover_as(rank: int, folder: str, addresses: list[str], generation: int = 2) -> list[str]:
    """Begin a generation on as many machines as there are keepers; returns the checkpoints."""
    run = RunDirectory(folder, secret=KEY)
    config = TrainingJob.from_json(run.require_json(JOB)).config
    recover(run, KeeperPlace("any", addresses[rank]), generation=generation, config=config)
    return complete_checkpoints(run)


def die_while_recovering(rank: int, folder: str, addresses: list[str]) -> None:
    """Begin a generation that is lost when one of it has written its part, and its manifest is not there."""
    write_tensors = recovery.write_tensors

    def write_and_die(*args: Any) -> None:
        write_tensors(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    recovery.write_tensors = write_and_die
    recover_as(rank, folder, addresses)


def tensors_of(run: RunDirectory, dataset: PreparedDataset) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's newest checkpoint, read by one worker."""
    job = TrainingJob.from_json(run.require_json(JOB))
    whole = [Stage(0, job.stages[-1].last_layer, "cpu", 1)]
    model = build_stage_model(job.model, dataset.features, job.config, whole, 0, None)
    load_latest_checkpoint(run, model)
    return all_tensors(model)


def prepare(folder: Path, *, has_dynamic_ids: bool) -> PreparedDataset:
    schema = CRITEO_SCHEMA
    if has_dynamic_ids:
        schema = replace(schema, dynamic_ids=DynamicIds(min_sightings=2, time_to_live_days=2))
    stream = write_click_stream(folder / "clicks.tsv", num_rows=3_200, seed=1)
    return prepare_dataset(stream.path, schema=schema, buckets_per_slot=512, out_dir=folder / "prepared")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update_mode", "has_dynamic_ids", "lost"),
    [
        ("sync", False, "first"),
        ("sync", False, "second"),
        ("sync", True, "second"),
        ("delayed", False, "first"),
        ("delayed", False, "second"),
    ],
)
def test_what_is_kept_is_bit_for_bit_the_checkpoint_of_its_step(update_mode, has_dynamic_ids, lost, tmp_path):
    """The other training begins from the same checkpoint and writes one behind the step by itself.

    The first generation behind the loss is lost, too, while it makes the checkpoint.
    """
    is_delayed = update_mode == "delayed"
    dataset = prepare(tmp_path, has_dynamic_ids=has_dynamic_ids)
    config = TrainingConfig(
        batch_size=32,
        num_microbatches=4,
        num_epochs=1,
        seed=3,
        checkpoint_interval_steps=INTERVAL_STEPS,
        update_mode=update_mode,
        dense_l2=0.01,
        embedding_optimizer="rowwise-adam",
        day_number=700_000,
    )
    job = TrainingJob(
        run_id="test",
        model="ctrdnn(hidden_widths=16, embedding_dim=4)",
        dataset=str(dataset.directory),
        stages=(Stage(0, 0, "cpu", 2), Stage(1, 3, "cpu", 1)),
        config=config,
    )
    run, other = (RunDirectory(str(tmp_path / name), secret=KEY) for name in ("run", "other"))
    submit_job(run, job)
    with ExitStack() as keepers:
        addresses = {}
        for machine in dict.fromkeys(MACHINES):
            keeper = keepers.enter_context(closing(Keeper("127.0.0.1", key=KEY)))
            keeper.start()
            addresses[machine] = str(keeper.address)
        run_in_processes(train_until_lost, 3, str(run.path("")), addresses, KEPT_STEP + is_delayed)
        shutil.copytree(run.path(CHECKPOINTS), other.path(CHECKPOINTS))

        # The other machine has a new one beside it, which has kept nothing.
        left = [*(address for machine, address in addresses.items() if machine != lost), ""]
        with pytest.raises(ProcessExitedException):
            run_in_processes(die_while_recovering, 2, str(run.path("")), left)
        assert complete_checkpoints(run) == [f"{INTERVAL_STEPS:08d}"]
        (complete, _) = run_in_processes(recover_as, 2, str(run.path("")), left, 3)

    assert complete == [f"{INTERVAL_STEPS:08d}", f"{KEPT_STEP:08d}"]
    submit_job(other, replace(job, config=replace(config, checkpoint_interval_steps=KEPT_STEP)))
    run_in_processes(train_until_lost, 3, str(other.path("")), {}, KEPT_STEP + 1)
    assert complete_checkpoints(other)[-1] == f"{KEPT_STEP:08d}"
    found, expected = (tensors_of(each, dataset) for each in (run, other))
    assert set(found) == set(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
