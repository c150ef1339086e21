"""From a bucket each worker reads its own rows of a checkpoint or a start model and little more, and uses no disk."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moto.server import DomainDispatcherApplication
from safetensors.torch import save_file

from heterps_core.data.features import FeatureSpec
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor, load_latest_checkpoint
from heterps_core.training.job import OptimizerState, StartModel, TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.start_model import _load_start_model, publish_start_model
from heterps_core.training.storage.exported_files import OPTIMIZER_STATE, WEIGHTS, file_sha256
from heterps_core.training.storage.named_tensors import dense_optimizer_state, row_optimizer_state, weights_of
from heterps_core.training.storage.run_directory import RunDirectory
from tests.checkpoints import save_checkpoint
from tests.s3_server import bucket_location
from tests.tiers import weekly_after
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

SECRET = b"the key of this run"
FEATURES = FeatureSpec(num_dense=2, slot_rows=(70_000, 70_000))
CONFIG = TrainingConfig(batch_size=8, num_microbatches=1, num_epochs=1, seed=1)
EMBEDDING = 0
"""The only layer of the stage, which has nothing but rows."""

MANIFESTS_BYTES = 24_000
"""Most of the manifests that a worker reads, and of the hashes of blocks."""


@pytest.fixture
def bucket(monkeypatch):
    with bucket_location(monkeypatch) as location:
        yield location


@pytest.fixture
def answered(bucket, monkeypatch) -> Counter:
    """Bytes that the server sent, by the folder of the run that they are of."""
    sent: Counter = Counter()
    answer = DomainDispatcherApplication.__call__

    def count(application, environment, start_response):
        for content in answer(application, environment, start_response):
            if environment["REQUEST_METHOD"] == "GET":
                _, _, key = environment["PATH_INFO"].partition("/nightly/")
                sent[key.partition("/")[0]] += len(content)
            yield content

    monkeypatch.setattr(DomainDispatcherApplication, "__call__", count)
    return sent


def build(num_replicas: int) -> StageModel:
    group = dist.group.WORLD if num_replicas > 1 else None
    stages = [Stage(EMBEDDING, EMBEDDING, "cpu", num_replicas), Stage(EMBEDDING + 1, 7, "cpu", 1)]
    return build_stage_model("ctrdnn", FEATURES, CONFIG, stages, StagePlace(group=group))


def numbered(model: StageModel) -> StageModel:
    """Give each row values that tell it from all others."""
    table = model.tables["embedding"]
    numbers_R = torch.arange(table.rows.first, table.rows.stop, dtype=torch.float32)
    table.weight_RD.copy_(numbers_R[:, None] + torch.arange(table.dimension) / 1_024)
    table.state["accumulator"].copy_(-numbers_R)
    return model


def is_numbered(model: StageModel) -> bool:
    table = model.tables["embedding"]
    found = [tensor.clone() for tensor in table.tensors().values()]
    numbered(model)
    return all(torch.equal(*pair) for pair in zip(found, table.tensors().values(), strict=True))


def save(rank: int, location: str, environment: dict[str, str], num_replicas: int) -> None:
    os.environ |= environment
    tempfile.tempdir = "/no folder for temporary files"
    run = RunDirectory(location, secret=SECRET)
    save_checkpoint(run, numbered(build(num_replicas)), TrainingCursor(step=5), group=dist.group.WORLD)


def load(
    rank: int, location: str, environment: dict[str, str], num_replicas: int, start: StartModel | None
) -> tuple[bool, int, int]:
    """Return whether the rows are right, their bytes, and how many were read."""
    os.environ |= environment
    tempfile.tempdir = "/no folder for temporary files"
    run = RunDirectory(location, secret=SECRET)
    model = build(num_replicas)
    if start is None:
        cursor = load_latest_checkpoint(run, model)
        assert cursor == TrainingCursor(step=5)
    else:
        _load_start_model(run, start, model, config=CONFIG)
    shard_bytes = sum(tensor.nbytes for tensor in model.tables["embedding"].tensors().values())
    return is_numbered(model), shard_bytes, run.usage.bytes_read


def aws_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@pytest.mark.parametrize("num_replicas", weekly_after(1, [3, 4]))
def test_a_replica_reads_its_own_rows_of_a_checkpoint(bucket, answered, num_replicas):
    """Also where fewer replicas cut the rows otherwise than the four that wrote them."""
    run_in_processes(save, 4, bucket, aws_environment(), 4)
    answered.clear()

    found = run_in_processes(load, num_replicas, bucket, aws_environment(), num_replicas, None)

    assert all(is_right for is_right, *_ in found)
    shard_bytes = sum(size for _, size, _ in found)
    assert shard_bytes == 140_000 * 4 * (16 + 1)
    for _, size, read_bytes in found:
        assert size <= read_bytes <= 1.1 * size + MANIFESTS_BYTES
    assert answered["checkpoints"] == sum(read_bytes for *_, read_bytes in found)


def export(folder: Path) -> StartModel:
    """Write a whole model with numbered rows in the files of an exported one."""
    model = numbered(build_stage_model("ctrdnn", FEATURES, CONFIG, [Stage(0, 7, "cpu", 1)]))
    folder.mkdir()
    save_file(weights_of(model), folder / WEIGHTS)
    save_file(row_optimizer_state(model) | dense_optimizer_state(model), folder / OPTIMIZER_STATE)
    return StartModel(
        version="4",
        run_id="before",
        weights_sha256=file_sha256(folder / WEIGHTS),
        optimizer_state=OptimizerState(
            sha256=file_sha256(folder / OPTIMIZER_STATE),
            dense_optimizer=CONFIG.dense_optimizer,
            embedding_optimizer=CONFIG.embedding_optimizer,
        ),
    )


@pytest.mark.weekly
def test_a_replica_reads_its_own_rows_of_the_start_model(bucket, answered, tmp_path):
    start = export(tmp_path / "exported")
    publish_start_model(RunDirectory(bucket, secret=SECRET), start, tmp_path / "exported")
    answered.clear()

    found = run_in_processes(load, 4, bucket, aws_environment(), 4, start)

    assert all(is_right for is_right, *_ in found)
    for _, size, read_bytes in found:
        assert size <= read_bytes <= 1.1 * size + MANIFESTS_BYTES
    assert answered["start_model"] == sum(read_bytes for *_, read_bytes in found)
