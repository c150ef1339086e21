"""Whole runs on real nodes: processes that fork workers, train, fail, are killed, and go on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import boto3
import psutil
import pytest
import torch
from torch import nn

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.errors import CheckpointError, TrainingError
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.training.checkpoint import complete_checkpoints
from heterps_core.training.monitor import follow_training
from heterps_core.training.outcome import Complete
from heterps_core.training.step_metrics import Progress
from heterps_core.training.storage.run_directory import RESERVED_BYTES, RunDirectory
from heterps_core.training.training_run import TrainingRun
from tests.heterps_core.training.node_processes import (
    CHECKPOINT_INTERVAL_STEPS,
    GO_ON_VARIABLE,
    HELD,
    HELD_STEP,
    NUM_STEPS,
    Slow,
    make_job,
    prepare_clicks,
    running_nodes,
    train,
    worker_processes,
)
from tests.heterps_core.training.reference import run_plainly
from tests.s3_server import bucket_location

pytestmark = pytest.mark.slow


class FailsAtStep(nn.Module):
    """Raises at its fifth training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        if self.num_calls > 4 * 2:
            raise ValueError("the fifth batch is cursed")
        return activation


def build_wide(features):
    """Its checkpoints are larger than the space that a run reserves for last words."""
    embedding = SlotEmbedding(features, dimension=64)
    return nn.Sequential(
        OrderedDict(embedding=embedding, slow=Slow(), output=nn.Linear(embedding.output_width, 1))
    )


def build_cursed(features):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(
        OrderedDict(embedding=embedding, curse=FailsAtStep(), output=nn.Linear(embedding.output_width, 1))
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def undisturbed(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return train(RunDirectory(str(tmp_path_factory.mktemp("undisturbed"))), make_job(dataset, (2, 1)))


def losses(training_run: TrainingRun) -> list[float]:
    return [metrics.loss for metrics in training_run.steps]


def test_an_undisturbed_run_trains_every_step_and_measures_itself(undisturbed, dataset):
    plain = run_plainly(make_job(dataset, (2, 1)))

    assert losses(undisturbed) == pytest.approx(plain.losses, abs=1e-6)
    assert undisturbed.quality.auc == pytest.approx(plain.quality.auc, abs=1e-5)
    assert [metrics.step for metrics in undisturbed.steps] == list(range(1, NUM_STEPS + 1))
    assert undisturbed.is_complete
    assert undisturbed.num_attempts == 1
    assert undisturbed.quality.num_rows == 320
    assert undisturbed.quality.auc > 0.55
    # Two micro-batches that each sleep 20 ms on one worker: no more than 64 samples in 40 ms, however many in all.
    assert 0 < undisturbed.throughput_samples_per_s < 64 / 0.04
    longest_s = max(after.elapsed_s - before.elapsed_s for before, after in pairwise(undisturbed.steps))
    assert undisturbed.throughput_samples_per_s >= 64 / longest_s


def test_replicas_of_two_kinds_of_machines_with_unequal_shares_train_what_equal_ones_do(
    undisturbed, dataset, tmp_path
):
    job, run = make_job(dataset, (2, 1)), RunDirectory(str(tmp_path))
    first, second = job.stages

    with running_nodes(
        run, replace(job, stages=(replace(first, shares=(3, 1)), second)), is_one_per_replica=True
    ) as (cluster, _):
        assert [node.device_type for node in cluster.nodes] == ["cpu-0", "cpu-1", "cpu-0"]
        outcome = follow_training(run, cluster, on_progress=lambda _: None)

    assert isinstance(outcome, Complete)
    assert losses(outcome.training) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert outcome.training.quality.auc == pytest.approx(undisturbed.quality.auc, abs=1e-5)


def test_a_killed_worker_comes_back_and_no_sample_is_lost_or_doubled(
    undisturbed, dataset, tmp_path, monkeypatch
):
    monkeypatch.setenv(GO_ON_VARIABLE, str(tmp_path / "go on"))

    def kill_one_worker(progress: Progress, nodes: list[psutil.Process]) -> bool:
        if progress.step < HELD_STEP - 1:
            return False
        worker_processes(nodes)[0].send_signal(signal.SIGKILL)
        (tmp_path / "go on").touch()
        return True

    job = make_job(dataset, (2, 1), model=HELD)
    training_run = train(RunDirectory(str(tmp_path / "run")), job, kill_one_worker)

    assert training_run.num_attempts == 2
    assert training_run.num_repeated_steps >= HELD_STEP - 1 - CHECKPOINT_INTERVAL_STEPS
    assert losses(training_run) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert training_run.quality.auc == pytest.approx(undisturbed.quality.auc, abs=1e-5)


def test_a_stopped_run_goes_on_with_other_replicas_as_if_nothing_had_been(undisturbed, dataset, tmp_path):
    run = RunDirectory(str(tmp_path))

    def stop(progress: Progress, nodes: list[psutil.Process]) -> bool:
        run.request_stop()
        return True

    stopped = train(run, make_job(dataset, (2, 1)), stop)
    resumed = train(run, make_job(dataset, (1, 2)))

    assert not stopped.is_complete
    # Held-out rows are not evaluated: who stops a run waits for its checkpoint alone.
    assert stopped.quality is None
    assert 0 < len(stopped.steps) < NUM_STEPS
    assert resumed.is_complete
    assert losses(resumed) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert resumed.num_repeated_steps == 0


def test_an_error_names_the_worker_its_stage_and_its_last_step(dataset, tmp_path):
    job = make_job(dataset, (1, 1), model=f"{__name__}:build_cursed")

    with pytest.raises(TrainingError) as failure:
        train(RunDirectory(str(tmp_path)), job)

    assert "(stage 1, replica 0) failed after step 4: ValueError: the fifth batch is cursed" in str(
        failure.value
    )
    assert "nodes/stage" in str(failure.value)


@pytest.mark.weekly
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_ends_the_run_and_the_last_good_checkpoint_stays(dataset, tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        run = RunDirectory(str(tmp_path))
        job = make_job(dataset, (2, 1), model=f"{__name__}:build_wide")

        def fill(progress: Progress, nodes: list[psutil.Process]) -> bool:
            if not complete_checkpoints(run):
                return False
            with contextlib.suppress(OSError), (tmp_path / "filler").open("wb") as filler:
                while shutil.disk_usage(tmp_path).free > 4_096:
                    filler.write(bytes(4_096))
                    filler.flush()
            return True

        with pytest.raises(TrainingError) as failure:
            train(run, job, fill)
        kept = complete_checkpoints(run)
        message = str(failure.value)
        (tmp_path / "filler").unlink()
        training_run = train(run, job)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)

    free_bytes = int(re.search(r"with ([\d,]+) bytes free there", message).group(1).replace(",", ""))
    assert free_bytes < RESERVED_BYTES
    assert f"the checkpoint of step {int(kept[-1])} stays" in message
    assert "free space there and resume the run" in message
    assert failure.value.exit_status == CheckpointError.exit_status
    assert training_run.is_complete


@pytest.mark.weekly
def test_nodes_read_rows_that_lie_in_a_bucket(undisturbed, dataset, monkeypatch, tmp_path):
    """The same rows in the same row groups; none of them goes through the run directory."""
    with bucket_location(monkeypatch) as location:
        boto3.client("s3").upload_file(str(dataset / "rows-00000.parquet"), "runs", "raw/rows.parquet")
        source = f"s3://runs/raw/rows.parquet?{location.partition('?')[2]}"
        prepare_dataset(source, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=tmp_path / "prepared")
        run = RunDirectory(location, secret=b"the key of this run")
        training_run = train(run, make_job(tmp_path / "prepared", (2, 1)))
        data = run.names("data")

    assert losses(training_run) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert data == ["manifest.json", "row_groups.npy", "rows-00000.footer.zst"]


@pytest.mark.weekly
def test_nodes_that_share_no_disk_train_through_a_bucket(undisturbed, dataset, monkeypatch):
    """Data, checkpoints, metrics and logs go through S3 (moto over HTTP); each node has a folder of its own."""
    with bucket_location(monkeypatch) as location:
        run = RunDirectory(location, secret=b"the key of this run")
        training_run = train(run, make_job(dataset, (2, 1)))
        kept = complete_checkpoints(run)
        stopped_early = [name for name in run.names("nodes") if not run.exists(f"nodes/{name}/workers.log")]
        store = boto3.client("s3")
        keys = [item["Key"] for item in store.list_objects_v2(Bucket="runs")["Contents"]]
        contents = [store.get_object(Bucket="runs", Key=key)["Body"].read() for key in keys]

    assert losses(training_run) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert kept == ["00000030", "00000040"]
    assert stopped_early == []
    assert len(contents) > 20
    assert not any(run.secret in content or run.secret.hex().encode() in content for content in contents)
