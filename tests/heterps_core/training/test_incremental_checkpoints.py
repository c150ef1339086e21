"""A checkpoint of changed rows and of rows that were written while they changed is what the model was at its step.

Constants that let a small table be copied whole are set so that these tables, of some hundred rows, are not.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import CheckpointError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training import checkpoint_writer
from heterps_core.training.checkpoint import (
    TrainingCursor,
    all_tensors,
    complete_checkpoints,
    load_latest_checkpoint,
    read_checkpoint,
)
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.stored_tensors import TensorRows, read_tensors
from tests.heterps_core.training.test_layer_modes import make_job
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.tiers import weekly_after
from tests.worker_processes import run_in_processes

FEATURES = FeatureSpec(num_dense=2, slot_rows=(401, 300))
INTERVAL_STEPS = 3
NUM_STEPS = 24
LOOKUPS = 4


def build(num_replicas: int, *, optimizer: str = "rowwise-adam") -> StageModel:
    checkpoint_writer.SMALL_BYTES = 0
    checkpoint_writer.PIECE_BYTES = 2_000
    config = TrainingConfig(
        batch_size=8, num_microbatches=1, num_epochs=1, seed=1, embedding_optimizer=optimizer
    )
    group = dist.group.WORLD if num_replicas > 1 else None
    return build_stage_model(
        "ctrdnn", FEATURES, config, [Stage(0, 7, "cpu", num_replicas)], StagePlace(group=group)
    )


def train_step(model: StageModel, step: int, *, num_rows: int = LOOKUPS) -> None:
    """Update some rows by gradients that depend on the step alone, and all dense parameters."""
    drawn = np.random.default_rng(step)
    ids = torch.from_numpy(drawn.integers(0, FEATURES.slot_rows, (num_rows, 2)))
    batch = ClickBatch(dense=torch.ones(num_rows, 2), ids=ids, labels=torch.zeros(num_rows))
    activation = model.layers["embedding"](batch, None)
    (activation * torch.linspace(-1, 1, activation.shape[1])).sum().backward()
    for layer in model.layers.values():
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * step)
    model.update_dense(0.01)
    model.update_rows(0.1)


def copied(model: StageModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in all_tensors(model).items()}


def train(
    run: RunDirectory,
    model: StageModel,
    *,
    first: int = 0,
    stop: int = NUM_STEPS,
    at_step: Callable[[CheckpointWriter, int], None] = lambda writer, step: None,
) -> dict[int, dict[str, Tensor]]:
    """Train with checkpoints; returns the tensors as they were at each of them."""
    writer = CheckpointWriter(run, model, group=group_of_all(), world=dist.new_group())
    writer.begin(first)
    seen = {}
    for step in range(first + 1, stop + 1):
        train_step(model, step)
        writer.check()
        if step % INTERVAL_STEPS == 0:
            writer.save(TrainingCursor(step=step), is_last=step == stop)
            seen[step] = copied(model)
        at_step(writer, step)
    writer.finish()
    return seen


def group_of_all() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def wait_for_writes(writer: CheckpointWriter, step: int) -> None:
    """So that on any machine the same files are there at the same steps."""
    if writer._whole is not None:
        writer._whole[1].result()
    if writer._saving is not None:
        writer._saving.result()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def row_hashes(model: StageModel) -> dict[str, list[int]]:
    """Return a hash of each row of a shard's tensors: what processes return must be short."""
    tensors = model.tables["embedding"].tensors().items()
    return {name: [zlib.crc32(row.numpy().tobytes()) for row in tensor] for name, tensor in tensors}


def train_two(rank: int, folder: str, optimizer: str) -> dict[str, list[int]]:
    model = build(2, optimizer=optimizer)
    train(RunDirectory(folder), model, at_step=wait_for_writes)
    return row_hashes(model)


def load(rank: int, folder: str, optimizer: str, num_replicas: int) -> tuple[int, dict[str, list[int]]]:
    model = build(num_replicas, optimizer=optimizer)
    cursor = load_latest_checkpoint(RunDirectory(folder), model)
    assert cursor is not None
    return cursor.step, row_hashes(model)


@pytest.mark.weekly
@pytest.mark.parametrize("optimizer", weekly_after(1, ["rowwise-adam", "rowwise-adagrad"]))
def test_what_two_replicas_wrote_in_parts_any_number_reads(optimizer: str, tmp_path: Path) -> None:
    shards = run_in_processes(train_two, 2, str(tmp_path), optimizer)
    whole = {name: shards[0][name] + shards[1][name] for name in shards[0]}

    for num_replicas in (1, 2, 3):
        parts = run_in_processes(load, num_replicas, str(tmp_path), optimizer, num_replicas)
        assert {step for step, _ in parts} == {NUM_STEPS}
        for name, rows in whole.items():
            assert [row for _, tensors in parts for row in tensors[name]] == rows


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    kept = (checkpoint_writer.SMALL_BYTES, checkpoint_writer.PIECE_BYTES)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    checkpoint_writer.SMALL_BYTES, checkpoint_writer.PIECE_BYTES = kept


def test_every_checkpoint_is_the_model_of_its_step_and_has_changed_rows_only(one_process, tmp_path):
    run = RunDirectory(str(tmp_path))
    changed_bytes = []

    def look(writer: CheckpointWriter, step: int) -> None:
        wait_for_writes(writer, step)
        if step % INTERVAL_STEPS:
            return
        newest = read_checkpoint(run, complete_checkpoints(run)[-1])
        assert newest.cursor.step == step
        fresh = build(1)
        load_latest_checkpoint(run, fresh)
        assert_equal(copied(fresh), copied(model))
        changed_bytes.append(
            sum(rows.num_rows for rows in newest.layers[-1].tensors.rows if rows.tensor == "embedding.weight")
        )

    model = build(1)
    train(run, model, at_step=look)

    # Two slots with four rows each in three steps; hardly any row comes twice.
    assert all(20 <= num_rows <= 2 * LOOKUPS * INTERVAL_STEPS for num_rows in changed_bytes)
    assert len(changed_bytes) == NUM_STEPS // INTERVAL_STEPS


def test_whole_rows_come_again_once_the_changed_ones_add_up_and_what_nothing_needs_is_deleted(
    one_process, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_writer, "CHANGED_SHARE", 0.2)
    run = RunDirectory(str(tmp_path))
    model = build(1)

    seen = train(run, model, at_step=wait_for_writes)

    newest, before = (read_checkpoint(run, name) for name in complete_checkpoints(run)[:-3:-1])
    whole = [layer for layer in newest.layers if layer.folder.endswith("-whole")]
    assert newest.cursor.step == NUM_STEPS
    assert before.cursor.step == NUM_STEPS - INTERVAL_STEPS
    assert len(whole) == 1
    assert whole[0].folder != "checkpoints/00000000-whole"
    # One more checkpoint has no file in common with the newest; whatever is damaged, one is left.
    oldest = read_checkpoint(run, complete_checkpoints(run)[0])
    folders = {layer.folder for each in (newest, before, oldest) for layer in each.layers}
    assert not {layer.folder for layer in oldest.layers} & {layer.folder for layer in newest.layers}
    assert {f"checkpoints/{name}" for name in run.names("checkpoints")} == folders
    for layer in newest.layers:
        shutil.copytree(tmp_path, tmp_path.with_name("damaged"))
        (file,) = layer.tensors.files
        flip(tmp_path.with_name("damaged") / layer.folder / file.name)
        fresh = build(1)
        cursor = load_latest_checkpoint(RunDirectory(str(tmp_path.with_name("damaged"))), fresh)
        assert cursor.step in (before.cursor.step, oldest.cursor.step)
        assert_equal(copied(fresh), seen[cursor.step])
        shutil.rmtree(tmp_path.with_name("damaged"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # The rows follow the dense part, of which only the newest is read.
    content[-1] ^= 0x40
    path.write_bytes(content)


class WatchedRun(RunDirectory):
    """Calls a function before each piece that is appended to a file, with its key."""

    def __init__(self, location: str, before_piece: Callable[[str], None]) -> None:
        super().__init__(location)
        self.before_piece = before_piece

    @contextmanager
    def appending(self, key: str) -> Iterator[Callable[[memoryview], object]]:
        with super().appending(key) as append:

            def watched(content: memoryview) -> None:
                self.before_piece(key)
                append(content)

            yield watched


def test_rows_that_change_while_whole_ones_are_written_are_those_of_the_next_checkpoint(
    one_process, tmp_path
):
    """The thread stops in the middle of the table until step 5, so that its file is of no single step."""
    is_held, may_go_on = threading.Event(), threading.Event()
    num_pieces = 0

    def hold(key: str) -> None:
        nonlocal num_pieces
        if "-whole/" in key:
            num_pieces += 1
            if num_pieces == 100:  # of 204: four tensors of 14 rows at a time
                is_held.set()
                assert may_go_on.wait(30)

    def look(writer: CheckpointWriter, step: int) -> None:
        if step == 1:
            # Rows that step 2 changes for the first time were read before it, however late the thread began.
            assert is_held.wait(30)
        if step == INTERVAL_STEPS:
            writer._saving.result()
            # Changed rows are written, but there are no whole ones yet.
            assert complete_checkpoints(run) == []
        if step == INTERVAL_STEPS + 2:
            may_go_on.set()
            wait_for_writes(writer, step)

    run, model = WatchedRun(str(tmp_path), hold), build(1)
    start = copied(model)
    seen = train(run, model, stop=2 * INTERVAL_STEPS, at_step=look)

    fresh = build(1)
    assert load_latest_checkpoint(run, fresh).step == 2 * INTERVAL_STEPS
    assert_equal(copied(fresh), seen[2 * INTERVAL_STEPS])
    whole, rows = read_checkpoint(run, "00000006").layers[0], torch.empty_like(start["embedding.weight"])
    assert whole.folder == "checkpoints/00000000-whole"
    read_tensors(run, [whole], {"embedding.weight": TensorRows.whole(rows)})
    is_of_start = (rows == start["embedding.weight"]).all(1)
    is_later = (start["embedding.weight"] != seen[INTERVAL_STEPS]["embedding.weight"]).any(1)
    # Of the rows that steps 1 to 3 changed, some were read before and some after.
    assert is_of_start[is_later].any()
    assert not is_of_start[is_later].all()


@pytest.mark.parametrize("where", ["-whole/", "/00000009/"])
def test_a_full_disk_ends_the_training_at_a_step_boundary_and_earlier_checkpoints_stay(
    one_process, tmp_path, where
):
    num_pieces = 0

    def fill(key: str) -> None:
        nonlocal num_pieces
        num_pieces += where in key
        if num_pieces == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, model = WatchedRun(str(tmp_path), fill), build(1)
    with pytest.raises(CheckpointError) as failure:
        train(run, model, at_step=wait_for_writes_without_errors)

    kept = complete_checkpoints(run)
    assert kept == ([] if where == "-whole/" else ["00000003", "00000006"])
    step = 0 if where == "-whole/" else 9
    assert f"the checkpoint of step {step} could not be written to {tmp_path}" in str(failure.value)
    assert "No space left on device" in str(failure.value)
    assert str(failure.value).endswith("; free space there and resume the run")
    # What was half written is gone, so that there is room for last words.
    assert not (
        tmp_path / "checkpoints" / f"{step:08d}{where[:-1] if step == 0 else ''}/rank-00000.bin"
    ).exists()


def wait_for_writes_without_errors(writer: CheckpointWriter, step: int) -> None:
    with_errors = [writer._saving, None if writer._whole is None else writer._whole[1]]
    for future in with_errors:
        if future is not None:
            future.exception()


def train_to_the_end(rank: int, folder: str, killed_at: str | None) -> dict[str, int]:
    """Train from the newest checkpoint, or die while a piece of a file is written; returns hashes of all tensors."""
    num_pieces = 0

    def kill(key: str) -> None:
        nonlocal num_pieces
        num_pieces += killed_at is not None and killed_at in key
        if num_pieces == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    run, model = WatchedRun(folder, kill), build(1)
    cursor = load_latest_checkpoint(run, model) or TrainingCursor()
    train(run, model, first=cursor.step, at_step=wait_for_writes)
    return {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in copied(model).items()}


@pytest.mark.weekly
@pytest.mark.parametrize("killed_at", ["00000000-whole/", "/00000009/"])
def test_a_worker_killed_while_it_writes_goes_on_from_the_checkpoint_before_as_if_nothing_had_been(
    killed_at, tmp_path
):
    with pytest.raises(ProcessExitedException):
        run_in_processes(train_to_the_end, 1, str(tmp_path / "killed"), killed_at)
    complete = complete_checkpoints(RunDirectory(str(tmp_path / "killed")))

    resumed = run_in_processes(train_to_the_end, 1, str(tmp_path / "killed"), None)
    undisturbed = run_in_processes(train_to_the_end, 1, str(tmp_path / "undisturbed"), None)

    assert complete == ([] if "whole" in killed_at else ["00000003", "00000006"])
    assert resumed == undisturbed


def train_job(rank: int, folder: str) -> tuple[int, int]:
    """Train one worker's part of a job; returns its first and its last step."""
    checkpoint_writer.SMALL_BYTES = 0
    run = RunDirectory(folder)
    job, loop = training_loop_of(rank, run)
    cursor = begin(run, job, loop.model)
    return cursor.step, loop.train(cursor).step


def final_tensors(job: TrainingJob, folder: Path) -> dict[str, Tensor]:
    """Read the last checkpoint into one process."""
    features = PreparedDataset.open(job.dataset).features
    stages = [Stage(0, job.stages[-1].last_layer, "cpu", 1)]
    whole = build_stage_model(job.model, features, job.config, stages)
    load_latest_checkpoint(RunDirectory(str(folder)), whole)
    return copied(whole)


@pytest.mark.slow
@pytest.mark.parametrize("update_mode", weekly_after(1, ["sync", "delayed"]))
def test_a_run_that_goes_on_learns_the_same_bits_and_with_another_cut_the_same_within_rounding(
    update_mode, tmp_path
):
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=1100, seed=1)
    dataset = prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=97, out_dir=tmp_path / "prepared"
    )
    job = make_job(dataset, "ctrdnn", (Stage(0, 2, "cpu", 2), Stage(3, 7, "cpu", 1)), update_mode=update_mode)
    submit_job(RunDirectory(str(tmp_path / "undisturbed")), job)
    run_in_processes(train_job, 3, str(tmp_path / "undisturbed"))
    before, last = complete_checkpoints(RunDirectory(str(tmp_path / "undisturbed")))[-2:]
    # With delayed updates another cut has other delays.
    cuts = {"same": job.stages}
    if update_mode == "sync":
        cuts["other"] = (Stage(0, 4, "cpu", 1), Stage(5, 7, "cpu", 2))

    for name, stages in cuts.items():
        shutil.copytree(tmp_path / "undisturbed", tmp_path / name)
        (tmp_path / name / "checkpoints" / last / "manifest.json").unlink()
        submit_job(RunDirectory(str(tmp_path / name)), replace(job, stages=stages))
        assert run_in_processes(train_job, 3, str(tmp_path / name)) == [(int(before), int(last))] * 3

    undisturbed = final_tensors(job, tmp_path / "undisturbed")
    assert_equal(final_tensors(job, tmp_path / "same"), undisturbed)
    if "other" in cuts:
        other = final_tensors(job, tmp_path / "other")
        for name, tensor in undisturbed.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=2e-5)


def fail_on_one(rank: int, folder: str) -> str:
    def fill(key: str) -> None:
        if key.endswith("/00000006/rank-00001.bin"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        train(WatchedRun(folder, fill), build(2), at_step=wait_for_writes_without_errors)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.weekly
def test_all_workers_end_where_one_cannot_write(tmp_path):
    messages = run_in_processes(fail_on_one, 2, str(tmp_path))

    assert len(set(messages)) == 1
    assert "the checkpoint of step 6 could not be written" in messages[0]
    assert "the checkpoint of step 3 stays" in messages[0] or "there is none before it" in messages[0]


def test_where_copying_fails_half_way_there_is_no_checkpoint(one_process, tmp_path):
    run, model = RunDirectory(str(tmp_path)), build(1)
    writer = CheckpointWriter(run, model, group=None, world=None)
    writer.begin(0)
    train_step(model, 1, num_rows=300)
    copies_of, num_calls = model.tables["embedding"].copies_of, 0

    def fail_later(rows_U: Tensor) -> dict[str, Tensor]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("no memory left on the card")
        return copies_of(rows_U)

    model.tables["embedding"].copies_of = fail_later
    with pytest.raises(RuntimeError, match="no memory left"):
        writer.save(TrainingCursor(step=1), is_last=True)
    with pytest.raises(RuntimeError, match="no memory left"):
        writer.finish()

    assert complete_checkpoints(run) == []


def test_training_waits_where_more_rows_change_than_memory_may_hold(one_process, tmp_path, monkeypatch):
    """The store takes a piece only when another waits; at no time more than four are copied."""
    monkeypatch.setattr(checkpoint_writer, "COPIED_BYTES", 4_000)
    waiting: list[int] = []
    model = build(1)

    class Counted(CheckpointWriter):
        def _changed_rows(self):
            for part in super()._changed_rows():
                waiting.append(1)
                yield part

    held = threading.Event()

    def hold(key: str) -> None:
        if "/00000001/" in key:
            assert held.wait(30)

    run = WatchedRun(str(tmp_path), hold)
    writer = Counted(run, model, group=None, world=None)
    writer.begin(0)
    train_step(model, 1, num_rows=300)
    saving = threading.Thread(target=writer.save, args=(TrainingCursor(step=1),), kwargs={"is_last": True})
    saving.start()
    saving.join(1.0)
    assert saving.is_alive()
    num_held = len(waiting)
    held.set()
    saving.join()
    writer.finish()

    fresh = build(1)
    load_latest_checkpoint(run, fresh)
    assert_equal(copied(fresh), copied(model))
    assert num_held <= 4
    assert len(waiting) > 10
