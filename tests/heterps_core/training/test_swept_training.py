"""A model whose tables do not fit into memory learns bit for bit what it learns in memory, by any plan."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.embeddings.swept import cold_rows
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import export_model
from heterps_core.training import checkpoint_writer
from heterps_core.training.checkpoint import complete_checkpoints, read_checkpoint
from heterps_core.training.evaluation import predict_held_out
from heterps_core.training.job import StartModel, TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.node import OWN_DISKS_VARIABLE
from heterps_core.training.start_model import begin
from heterps_core.training.step_metrics import read_steps
from heterps_core.training.storage.exported_files import OPTIMIZER_STATE, WEIGHTS
from heterps_core.training.storage.run_directory import CHECKPOINTS, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json
from tests.heterps_core.training.node_processes import NUM_STEPS, make_job, train
from tests.heterps_core.training.test_start_model import make_start
from tests.heterps_core.training.worker_parts import predicted_rows, training_loop_of
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

MODEL = "ctrdnn(hidden_widths=16, embedding_dim=4)"
OWN_DISKS = ("nvme1n1", "nvme2n1")
MEMORY_BYTES = 228_000
"""For a table of 26 x 1,000 rows of 20 bytes, of which two replicas have 13,000; eight batches may ask for 3,328."""

CONFIG = TrainingConfig(
    batch_size=16,
    num_microbatches=2,
    num_epochs=1,
    seed=3,
    checkpoint_interval_steps=70,
    embedding_learning_rate=0.3,
)
ALONE = (Stage(0, 3, "cpu", 1),)
REPLICAS = (Stage(0, 3, "cpu", 2),)
PIPELINE = (Stage(0, 0, "cpu", 2), Stage(1, 3, "cpu", 1))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    folder = tmp_path_factory.mktemp("swept")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=4_100, seed=1)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=1_000, out_dir=folder / "prepared"
    )


def train_part(rank: int, run_folder: str) -> dict[str, Any]:
    cold_rows.BLOCK_BYTES = 1  # so that small tables have several blocks
    run = RunDirectory(run_folder)
    job, loop = training_loop_of(rank, run)
    loop.train(begin(run, job, loop.model))
    if loop.metrics is not None:
        loop.metrics.flush("stopped")
    logits = [logits for _, logits in predict_held_out(loop)]
    rows = predicted_rows(loop) if logits else []
    return {
        "logits": dict(zip(rows, np.concatenate(logits).tolist(), strict=True)) if logits else {},
        "counts": [table.counts for table in loop.model.swept_tables.values()],
    }


class Trained:
    """What comes out of a run."""

    def __init__(
        self,
        dataset: PreparedDataset,
        folder: Path,
        stages: tuple[Stage, ...],
        config: TrainingConfig,
        *,
        start: Path | None = None,
        start_model: StartModel | None = None,
        part: Callable[[int, str], dict[str, Any]] = train_part,
    ) -> None:
        self.folder, self.part = folder, part
        run = RunDirectory(str(folder))
        job = TrainingJob(
            run_id="r",
            model=MODEL,
            dataset=str(dataset.directory),
            stages=stages,
            config=config,
            start_model=start_model,
        )
        submit_job(run, job, start_folder=start)
        self.finish(dataset)

    def finish(self, dataset: PreparedDataset) -> None:
        """Train to the end from where the run is."""
        run = RunDirectory(str(self.folder))
        num_workers = sum(TrainingJob.from_json(read_signed_json(run, "job.json")).replicas_per_stage)
        parts = run_in_processes(self.part, num_workers, str(self.folder))
        self.exported = self.folder / "exported"
        export_model(run, dataset.manifest, self.exported, model=MODEL)
        self.losses = [step.loss for step in read_steps(run)[-1]]
        self.logits = {row: logit for part in parts for row, logit in part["logits"].items()}
        self.counts = [counts for part in parts for counts in part["counts"]]
        self.tensors = {
            name: tensor
            for file in (WEIGHTS, OPTIMIZER_STATE)
            for name, tensor in load_file(self.exported / file).items()
        }


def assert_alike(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    assert found.logits == expected.logits
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[name], expected.tensors[name]) for name in expected.tensors)


@pytest.mark.parametrize(
    ("stages", "memory_bytes", "change"),
    [
        pytest.param(ALONE, MEMORY_BYTES, {"num_microbatches": 1}, id="alone"),
        pytest.param(REPLICAS, MEMORY_BYTES, {}, id="replicas", marks=pytest.mark.weekly),
        # With Adam's state a row has 40 bytes.
        pytest.param(
            PIPELINE,
            369_000,
            {"embedding_optimizer": "rowwise-adam", "update_mode": "delayed"},
            id="pipeline",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_200_steps_end_with_the_weights_that_they_end_with_in_memory(
    stages, memory_bytes, change, dataset, tmp_path
):
    config = replace(CONFIG, **change)
    in_memory = Trained(dataset, tmp_path / "memory", stages, config)
    disks = [tmp_path / "ssd", tmp_path / "hdd"] if stages is REPLICAS else []

    folders = tuple(map(str, disks))
    config = replace(config, embedding_memory_bytes=memory_bytes, embedding_folders=folders)
    swept = Trained(dataset, tmp_path / "swept", stages, config)

    assert_alike(swept, in_memory)
    assert [list(disk.iterdir()) for disk in disks] == [[] for _ in disks]
    assert len(swept.losses) >= 200
    assert in_memory.counts == []
    assert len(swept.counts) == stages[0].num_replicas
    for counts in swept.counts:
        assert 0 < counts.rows_fetched < counts.rows_asked
        assert counts.bytes_read >= counts.bytes_written > 0


def train_part_on_own_disks(rank: int, run_folder: str) -> dict[str, Any]:
    # Set here: workers begin with the environment of the first test that started one.
    os.environ[OWN_DISKS_VARIABLE] = ":".join(f"{run_folder}-{disk}" for disk in OWN_DISKS)
    return train_part(rank, run_folder)


def test_a_machine_keeps_rows_on_its_own_disks_where_no_folders_are_given(dataset, tmp_path):
    config = replace(CONFIG, num_epochs=1, embedding_memory_bytes=MEMORY_BYTES)

    swept = Trained(dataset, tmp_path / "run", ALONE, config, part=train_part_on_own_disks)

    assert swept.counts[0].bytes_written > 0
    # The folders were made for files without names.
    assert [list((tmp_path / f"run-{disk}").iterdir()) for disk in OWN_DISKS] == [[], []]


@pytest.mark.parametrize("stages", [ALONE, REPLICAS], ids=["alone", "replicas"])
def test_memory_for_fewer_than_five_batches_ends_the_training_and_says_what_it_lacks(
    stages, dataset, tmp_path
):
    """Five batches may look 2,080 rows up, so the memory of the others is enough whatever comes."""
    config = replace(CONFIG, embedding_memory_bytes=118_000)

    with pytest.raises(
        ProcessRaisedException, match=r"hold the rows of 8 batches.* raise it by [\d,]+ bytes"
    ):
        Trained(dataset, tmp_path, stages, config)


def test_a_run_resumed_at_a_checkpoint_between_sweeps_ends_with_the_same_weights(dataset, tmp_path):
    config = replace(CONFIG, embedding_memory_bytes=MEMORY_BYTES)
    unbroken = Trained(dataset, tmp_path / "run", ALONE, config)
    run = RunDirectory(str(tmp_path / "run"))
    expected = {name: tensor.clone() for name, tensor in unbroken.tensors.items()}
    shutil.rmtree(run.path(f"{CHECKPOINTS}/{complete_checkpoints(run)[-1]}"))

    unbroken.finish(dataset)

    assert int(complete_checkpoints(run)[0]) % CONFIG.checkpoint_interval_steps == 0
    assert all(torch.equal(unbroken.tensors[name], expected[name]) for name in expected)


def train_part_with_changed_rows(rank: int, run_folder: str) -> dict[str, Any]:
    """Train with checkpoints that have changed rows alone, as those of large tables have."""
    checkpoint_writer.SMALL_BYTES, checkpoint_writer.CHANGED_SHARE = 0, 5.0
    return train_part(rank, run_folder)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("stages", "memory_bytes"),
    [(ALONE, MEMORY_BYTES), pytest.param(PIPELINE, 240_000, marks=pytest.mark.weekly)],
)
def test_a_checkpoint_of_changed_rows_trains_on_to_the_same_end(stages, memory_bytes, dataset, tmp_path):
    """With the whole rows that were written beside the first steps it is what the tables were."""
    config = replace(CONFIG, embedding_memory_bytes=memory_bytes)
    expected = Trained(dataset, tmp_path / "expected", stages, config)
    found = Trained(dataset, tmp_path / "run", stages, config, part=train_part_with_changed_rows)
    run = RunDirectory(str(tmp_path / "run"))
    last, before = complete_checkpoints(run)[:-3:-1]
    shutil.rmtree(run.path(f"{CHECKPOINTS}/{last}"))

    layers = read_checkpoint(run, before).layers
    found.finish(dataset)

    listed = [rows for layer in layers for rows in layer.tensors.rows if rows.numbers_offset is not None]
    assert layers[0].folder.endswith("-whole")
    assert sum(rows.num_rows for rows in listed if rows.tensor == "embedding.weight") > 0
    assert all(torch.equal(found.tensors[key], expected.tensors[key]) for key in expected.tensors)


def train_part_until_killed(rank: int, run_folder: str) -> None:
    """Train until the kernel ends this process in the middle of a sweep after the first checkpoint."""
    run, write, num_writes = RunDirectory(run_folder), cold_rows.ColdRows.write, 0

    def write_some(self: cold_rows.ColdRows, block: int, buffer: Any) -> None:
        nonlocal num_writes
        num_writes += bool(complete_checkpoints(run))
        if num_writes == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, block, buffer)

    cold_rows.ColdRows.write = write_some
    train_part(rank, run_folder)


@pytest.mark.weekly
def test_a_worker_killed_in_the_middle_of_a_sweep_leaves_no_file_and_its_run_ends_with_the_same_weights(
    dataset, tmp_path
):
    config = replace(CONFIG, embedding_memory_bytes=MEMORY_BYTES)
    expected = Trained(dataset, tmp_path / "unbroken", ALONE, config)
    shutil.copytree(tmp_path / "unbroken", tmp_path / "run")
    run = RunDirectory(str(tmp_path / "run"))
    run.delete_folder(CHECKPOINTS)

    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_in_processes(train_part_until_killed, 1, str(tmp_path / "run"))

    assert complete_checkpoints(run) == [f"{CONFIG.checkpoint_interval_steps:08d}"]
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith("tmp")]
    resumed = object.__new__(Trained)
    resumed.folder, resumed.part = tmp_path / "run", train_part
    resumed.finish(dataset)
    assert all(torch.equal(resumed.tensors[name], expected.tensors[name]) for name in expected.tensors)
    assert resumed.logits == expected.logits


@pytest.mark.weekly
def test_a_day_that_goes_on_from_a_model_learns_what_it_learns_in_memory(dataset, tmp_path):
    first = Trained(dataset, tmp_path / "first", ALONE, CONFIG)
    start = {
        "start": first.exported,
        "start_model": replace(make_start(first.exported), accumulators_kept=0.5),
    }
    in_memory = Trained(dataset, tmp_path / "memory", ALONE, CONFIG, **start)

    swept = Trained(
        dataset,
        tmp_path / "swept",
        ALONE,
        replace(CONFIG, embedding_memory_bytes=MEMORY_BYTES),
        **start,
    )

    assert_alike(swept, in_memory)
    assert swept.losses[0] != first.losses[0]


def test_workers_of_real_nodes_sweep_and_report_it(tmp_path):
    """Replicas of one machine share memory for other tables, and sum in another order then."""
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=1_600, seed=0)
    prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=300_000, out_dir=tmp_path / "prepared"
    )
    job = make_job(tmp_path / "prepared", (2, 1))
    config = replace(job.config, checkpoint_interval_steps=NUM_STEPS)
    expected = train(RunDirectory(str(tmp_path / "memory")), replace(job, config=config))

    config = replace(config, embedding_memory_bytes=26_000_000)
    found = train(RunDirectory(str(tmp_path / "swept")), replace(job, config=config))

    assert [step.loss for step in found.steps] == pytest.approx(
        [step.loss for step in expected.steps], abs=1e-5
    )
    assert found.quality.auc == pytest.approx(expected.quality.auc, abs=1e-5)
    assert expected.sweeps == {}
    assert list(found.sweeps) == [0]
    assert 0 < found.sweeps[0].hit_share < 1
    assert found.sweeps[0].disk_bytes_per_sample > 16
