"""Optimizer state of tables goes into a checkpoint with the rows, and comes back for another number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import ROW_OPTIMIZERS
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor, load_latest_checkpoint
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.checkpoints import save_checkpoint
from tests.worker_processes import run_in_processes

FEATURES = FeatureSpec(num_dense=2, slot_rows=(11, 6))


def make_stage(optimizer: str, num_replicas: int, seed: int, device: torch.device = CPU) -> StageModel:
    config = TrainingConfig(
        batch_size=8, num_microbatches=1, num_epochs=1, seed=seed, embedding_optimizer=optimizer
    )
    group = dist.group.WORLD if num_replicas > 1 else None
    place = StagePlace(layout=RankLayout((tuple(range(num_replicas)),)), group=group, device=device)
    return build_stage_model("ctrdnn", FEATURES, config, [Stage(0, 7, "cpu", num_replicas)], place)


def train_and_save(rank: int, optimizer: str, folder: str) -> dict[str, list[float]]:
    stage = make_stage(optimizer, 2, seed=1)
    ids = torch.tensor([[rank, 1], [3, 5], [10, 2]])
    batch = ClickBatch(dense=torch.ones(3, 2), ids=ids, labels=torch.zeros(3))
    for _ in range(2):
        stage.layers["embedding"](batch, None).sum().backward()
        stage.update_dense(0.1)
        stage.update_rows(0.1)
    save_checkpoint(RunDirectory(folder), stage, TrainingCursor(), group=dist.group.WORLD)
    return {name: tensor.tolist() for name, tensor in stage.tables["embedding"].tensors().items()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_state_saved_by_two_replicas_is_read_by_one(optimizer: str, tmp_path: Path) -> None:
    shards = run_in_processes(train_and_save, 2, optimizer, str(tmp_path))
    stage = make_stage(optimizer, 1, seed=2)

    cursor = load_latest_checkpoint(RunDirectory(str(tmp_path)), stage)

    assert cursor == TrainingCursor()
    tensors = stage.tables["embedding"].tensors()
    assert set(tensors) == set(shards[0])
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.tensor(shards[0][name] + shards[1][name]))


def save_alone(rank: int, optimizer: str, folder: str, device: torch.device) -> None:
    stage = make_stage(optimizer, 1, seed=1, device=device)
    batch = ClickBatch(
        dense=torch.ones(3, 2), ids=torch.tensor([[4, 1], [3, 5], [10, 2]]), labels=torch.zeros(3)
    )
    activation = None
    for name, layer in stage.layers.items():
        activation = layer(batch.to(device), activation) if name == "embedding" else layer(activation)
    activation.sum().backward()
    stage.update_dense(0.1)
    stage.update_rows(0.1)
    torch.save({name: tensor.cpu() for name, tensor in tensors_of(stage).items()}, f"{folder}/saved.pt")
    save_checkpoint(RunDirectory(folder), stage, TrainingCursor(), group=None)


def tensors_of(stage: StageModel) -> dict[str, torch.Tensor]:
    found = dict(stage.tables["embedding"].tensors())
    for layer_name, layer in stage.layers.items():
        for name, parameter in layer.named_parameters():
            found[f"{layer_name}.{name}"] = parameter.detach()
            for key, tensor in stage.dense_optimizer.state[parameter].items():
                found[f"{layer_name}.{name}.{key}"] = tensor
    return found


CARD = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [(CPU, CARD), (CARD, CPU), (CARD, CARD)], ids=str)
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_what_one_device_saved_another_reads(
    optimizer: str, devices: tuple[torch.device, torch.device], tmp_path: Path
) -> None:
    run_in_processes(save_alone, 1, optimizer, str(tmp_path), devices[0])
    stage = make_stage(optimizer, 1, seed=2, device=devices[1])

    load_latest_checkpoint(RunDirectory(str(tmp_path)), stage)

    saved = torch.load(tmp_path / "saved.pt")
    found = tensors_of(stage)
    assert set(found) == set(saved)
    for name, tensor in found.items():
        assert tensor.device == devices[1]
        assert torch.equal(tensor.cpu(), saved[name])
